"""Finding linear layers that can become one, and saying why others cannot.

Forward hooks, adapters and parametrised weights need no rule but that of the graph: Dynamo traces
them, so a hook that changes an input or a weight makes another x, or a weight that is no constant.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from torch.fx import GraphModule, Node

from stof_compile.between import switches_gradients_on, writer_between
from stof_compile.capture import CaptureFacts
from stof_compile.node_ops import dtype_of, operation, shape_of, tensor_meta
from stof_compile.packing_consumers import consumer_problem, needs_copy
from stof_compile.packing_siblings import (
    Constants,
    Form,
    Layout,
    Sibling,
    first_node,
    sibling_groups,
)

Role = Literal["attention", "gate_up", "other"]
MAX_SIBLINGS = 4
ALREADY_PACKED = "already packed"


@dataclass(frozen=True)
class Pack:
    """Linear layers that can become one; by names, which hold in every copy of the graph.

    Args:
        nodes: nodes of the layers, all of them. results: the value of each layer.
        before: node in front of which the packed layer is computed. x: what it reads there.
        weights, biases: parameters of each layer; None for a layer without bias, which gets zeros.
        sizes: n of each layer; their order is that of the packed weight's slices.
        width: K. layout: "nk": weights [n, K], "kn": [K, n]. form: how the layers are written.
        copied: whether a result has to be copied out of the packed one, because it is returned,
            or because a reader needs it contiguous.
        role: "attention" (Q/K/V), "gate_up" (both sides of a gated product) or "other".
        key: equal for layers of equal shapes, dtypes and layout.
        nbytes: memory of the packed copies in bytes; the originals stay.
    """

    nodes: tuple[str, ...]
    results: tuple[str, ...]
    before: str
    x: str
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    sizes: tuple[int, ...]
    width: int
    layout: Layout
    form: Form
    copied: tuple[bool, ...]
    role: Role
    key: str
    nbytes: int


@dataclass(frozen=True)
class PackRefusal:
    """Layers that stay apart although they share an input, and why."""

    nodes: tuple[str, ...]
    reason: str


def find_packs(gm: GraphModule, facts: CaptureFacts) -> list[Pack]:
    """Find linear layers that can be packed; see :func:`search_packs`."""
    return search_packs(gm, facts)[0]


def search_packs(gm: GraphModule, facts: CaptureFacts) -> tuple[list[Pack], list[PackRefusal]]:
    """Find linear layers that can be packed, and those that cannot.

    Args:
        gm: normalised graph; not changed. facts: its facts.
    Returns:
        Packs of 2 to 4 layers in graph order, and refusals. None is found where gradients are
        recorded, or where the values of parameters are unknown (fake inputs).
    """
    if facts.fake_inputs:
        return [], [PackRefusal((), "the inputs are fake: the values of parameters are unknown")]
    refusals = _packed_by_the_model(gm, facts)
    gradients = facts.grad_enabled or switches_gradients_on(gm.graph)
    packs: list[Pack] = []
    constants = Constants(gm, facts)
    for group in sibling_groups(gm, facts):
        reason = "gradients are recorded" if gradients else _group_problem(group, constants)
        if reason is None:
            packs.append(_pack(group, constants))
        else:
            refusals.append(PackRefusal(tuple(s.product.name for s in group), reason))
    return packs, refusals


def packs_bytes(packs: Sequence[Pack]) -> int:
    """Memory that the packed copies of some packs need together, in bytes."""
    return sum({(p.weights, p.biases): p.nbytes for p in packs}.values())


def _group_problem(group: Sequence[Sibling], constants: Constants) -> str | None:
    """Why linear layers of one input stay apart."""
    if len(group) > MAX_SIBLINGS:
        return f"{len(group)} layers read one input; at most {MAX_SIBLINGS} are packed"
    if len({(s.weight, s.bias) for s in group}) < len(group):
        return "two of the layers are the same"
    parts = {part for s in group for part in constants.path(s.weight)}
    if any(part.startswith("lora_") or part == "base_layer" for part in parts):
        return "adapters"
    biases = [b for b in (constants.value(s.bias) for s in group) if b is not None]
    if len({b.dtype for b in biases}) > 1:
        return "biases of different dtypes"
    first, last = first_node(group), max(s.result for s in group)
    writer = writer_between([group[0].root], first, last)
    if writer is not None:
        return f"'{writer.name}' may write to their input in between"
    if len({(dtype_of(s.result), str(shape_of(s.result)[:-1])) for s in group}) > 1:  # type: ignore[index]
        return "results of different dtypes"
    return next((p for p in (consumer_problem(s.result) for s in group) if p), None)


def _pack(group: Sequence[Sibling], constants: Constants) -> Pack:
    first = min(group, key=lambda s: s.product)
    weight = constants.value(first.weight)
    assert weight is not None, "siblings have constant weights"
    sizes = tuple(s.size for s in group)
    starts, total = tuple(accumulate((0, *sizes[:-1]))), sum(sizes)
    copied = tuple(
        needs_copy(s.result, total, start) for s, start in zip(group, starts, strict=True)
    )
    biases = [constants.value(s.bias) for s in group]
    bias_dtype = next((b.dtype for b in biases if b is not None), None)
    width = weight.shape[1 if first.layout == "nk" else 0]
    x = tensor_meta(first.x)
    assert x is not None, "siblings read a tensor"
    told = {
        "form": first.form,
        "layout": first.layout,
        "x": [str(x.dtype), x.device.type, [str(n) for n in (*x.shape, *x.stride())]],
        "weights": [str(weight.dtype), list(sizes), width],
        "biases": [str(bias_dtype), [b is not None for b in biases]],
        "copied": copied,
    }
    nbytes = total * width * weight.element_size()
    if bias_dtype is not None:
        nbytes += total * bias_dtype.itemsize
    return Pack(
        nodes=tuple(node.name for s in group for node in s.nodes),
        results=tuple(s.result.name for s in group),
        before=first.product.name,
        x=first.x.name,
        weights=tuple(s.weight.name for s in group),
        biases=tuple(s.bias.name if s.bias is not None else None for s in group),
        sizes=sizes,
        width=width,
        layout=first.layout,
        form=first.form,
        copied=copied,
        role=_role(group),
        key=hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest(),
        nbytes=nbytes,
    )


def _role(group: Sequence[Sibling]) -> Role:
    """What the layers are for, by their readers: a product of both, or a split into heads."""
    if len(group) == 2:
        a, b = (_readers(s.result) for s in group)
        if any(operation(node) == "mul" for node in a & b):
            return "gate_up"
    ranks = {len(shape_of(s.result) or ()) for s in group}
    for s in group:
        for user in s.result.users:
            splits = operation(user) in ("view", "reshape", "unflatten")
            if splits and len(shape_of(user) or ()) > min(ranks):
                return "attention"
    return "other"


def _readers(node: Node) -> set[Node]:
    """Readers of a value, and of what single operations make of it (the gate's activation)."""
    users = set(node.users)
    return users | {u for user in users if len(user.all_input_nodes) == 1 for u in user.users}


def _packed_by_the_model(gm: GraphModule, facts: CaptureFacts) -> list[PackRefusal]:
    """Layers whose result the model itself splits into two to four parts."""
    found = []
    constants = Constants(gm, facts)
    for node in gm.graph.nodes:
        if operation(node) not in ("split", "chunk", "unbind", "tensor_split"):
            continue
        value = node.meta.get("example_value")
        source = node.args[0] if node.args else None
        while isinstance(source, Node) and operation(source) in ("view", "reshape", "unflatten"):
            source = source.args[0]
        if not isinstance(source, Node) or not isinstance(value, list | tuple):
            continue
        contraction = operation(source) in ("linear", "addmm", "matmul")
        if contraction and 2 <= len(value) <= MAX_SIBLINGS and _has_weight(source, constants):
            found.append(PackRefusal((source.name,), ALREADY_PACKED))
    return found


def _has_weight(node: Node, constants: Constants) -> bool:
    return any(constants.value(source) is not None for source in node.all_input_nodes)
