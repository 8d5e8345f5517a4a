"""How much memory packed copies of weights may take."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.fx import GraphModule

from stof_compile.capture import CaptureFacts
from stof_compile.packing_search import Pack, packs_bytes


def parameter_bytes(gm: GraphModule, facts: CaptureFacts) -> int:
    """Bytes of the parameters a graph reads; memory that several share counts once.

    0 where the inputs are fake: then nothing is packed.
    """
    if facts.fake_inputs:
        return 0
    tensors = [facts.inputs[name].example for name in facts.names("parameter")]
    tensors += [p for p in gm.parameters() if isinstance(p, nn.Parameter)]
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storages[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(storages.values())


def within_memory(
    packs: Sequence[Pack], model_bytes: int, share: float
) -> tuple[list[Pack], dict[str, str]]:
    """Choose the packs whose copies fit beside the model.

    Layers of one key are taken or refused together; Q/K/V comes first, gate and up last.

    Args:
        packs: packs of one graph. model_bytes: see :func:`parameter_bytes`.
        share: of ``model_bytes``, what the copies may take together (option ``pack_memory``).
    Returns:
        (the packs that fit, in the order given; key -> why those of that key do not).
    """
    order = {"attention": 0, "other": 1, "gate_up": 2}
    keys = dict.fromkeys(p.key for p in sorted(packs, key=lambda p: order[p.role]))
    taken: list[Pack] = []
    refused = {}
    for key in keys:
        layers = [p for p in packs if p.key == key]
        together = packs_bytes([*taken, *layers])
        if together <= share * model_bytes:
            taken += layers
            continue
        refused[key] = (
            f"{together / 1e6:.1f} MB of packed copies would be above {share:.0%} of the model's "
            f"{model_bytes / 1e6:.1f} MB"
        )
        if model_bytes:
            enough = (100 * together // model_bytes + 1) / 100
            refused[key] += f" (option pack_memory={enough:g} allows them)"
    chosen = {id(p) for p in taken}
    return [p for p in packs if id(p) in chosen], refused
