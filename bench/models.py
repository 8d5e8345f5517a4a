"""Models for end-to-end runs: the zoo, with the cell's mask in every form that a peer takes.

A model has up to three kinds of attention: ``self`` (under the cell's mask), ``causal`` (under the
mask and the model's own causality) and ``cross``, which no mask applies to: distances between two
sequences mean nothing, and STOF's option leaves it alone as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from cases import tile_fraction
from roofline import AttentionWork, ModelWork
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

from stof_compile import zoo
from stof_compile.errors import StofError

SIX = ("bert-base", "bert-large", "gpt2", "llama-1b", "t5-base", "vit-base")
FLEX_NAME = "bench_flex"
MASKED_NAME = "bench_masked"
PRODUCTS = ("aten.mm", "aten.addmm", "aten.convolution")  # bmm is attention, which counts apart


def model_names(wanted: str, smoke: bool) -> list[str]:
    """Models named by a comma-separated list (``all``: the six); toy sizes of them for ``smoke``.

    Raises:
        SystemExit: there is no such model.
    """
    words = [word.strip() for word in wanted.split(",")]
    names = [name for word in words for name in (SIX if word == "all" else (word,))]
    try:
        families = {name: zoo.sizes_of(name).family for name in names}
    except StofError as error:
        raise SystemExit(str(error)) from error
    if smoke:
        names = [f"{families[name]}-tiny" for name in names]
    return list(dict.fromkeys(names))


def roles(name: str) -> tuple[str, ...]:
    """The kinds of attention a model has."""
    return tuple(group.role for group in zoo.attention_layers(name))


def masks_by_role(name: str, keep: Tensor) -> dict[str, Tensor | None]:
    """The mask of each kind of attention, bool ``[S, S]``; ``keep`` is the cell's."""
    kinds = {"self": keep, "causal": keep.tril(), "cross": None}
    return {role: kinds[role] for role in roles(name)}


def build_model(
    name: str, seq: int, attention: str, seed: int, dtype: torch.dtype, device: torch.device | str
) -> nn.Module:
    """A model of the zoo whose attention modules know their ``bench_role``.

    Args:
        seq: as asked for (a ViT has one token more).
        attention: ``sdpa``, :data:`FLEX_NAME` or :data:`MASKED_NAME`, once these are registered.
    """
    model = zoo.build_model(name, seq, seed, attention, dtype, device)
    only = roles(name)[0]
    for path, module in model.named_modules():
        if "Attention" in type(module).__name__:
            role = only
            if "EncDecAttention" in path:
                role = "cross"
            elif path.startswith("decoder.") and zoo.ZOO[name].family == "t5":
                role = "causal"
            module.bench_role = role
    return model


def masked_model(
    name: str, seq: int, seed: int, keep: Tensor, dtype: torch.dtype, device: torch.device | str
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model under the cell's mask through SDPA, and the mask arguments of its calls.

    The mask is one 4-D bool tensor, given as the model's own ``attention_mask``. ViT takes none,
    and T5 would apply it to cross-attention: their attention modules have it as a buffer.
    """
    by_role = {
        role: None if mask is None else mask[None, None]
        for role, mask in masks_by_role(name, keep).items()
    }
    if zoo.ZOO[name].family in ("t5", "vit"):
        register_masked()
        model = build_model(name, seq, MASKED_NAME, seed, dtype, device)
        for module in model.modules():
            if hasattr(module, "bench_role"):
                mask = by_role[module.bench_role]
                module.register_buffer("bench_mask", mask, persistent=False)
        return model, {}
    (mask,) = by_role.values()
    assert mask is not None, "a model with one kind of attention has a mask for it"
    return build_model(name, seq, "sdpa", seed, dtype, device), {"attention_mask": mask}


def flex_model(
    name: str,
    seq: int,
    seed: int,
    blocks: Mapping[str, BlockMask],
    options: Any,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """A model that calls FlexAttention with the block mask of each role.

    T5's learned bias is a table of distances (:func:`keep_table`), as an expert would write it.

    Args:
        blocks, options: as :func:`register_flex` takes them.
    """
    register_flex(blocks, options, torch.device(device))
    model = build_model(name, seq, FLEX_NAME, seed, dtype, device)
    for module in model.modules():
        if getattr(module, "has_relative_attention_bias", False):
            keep_table(module, seq)
    return model


def caller(
    model: Callable[..., Any], names: Mapping[str, Any], extra: Mapping[str, Tensor]
) -> Callable[..., Tensor]:
    """``(*inputs) -> last hidden state``; the model's callable stays the compiled one."""
    keys, fixed = tuple(names), dict(extra)
    return lambda *given: model(**dict(zip(keys, given, strict=True)), **fixed).last_hidden_state


# -- attention functions ---------------------------------------------------------------------------


def register_masked() -> None:
    """Make ``attn_implementation=MASKED_NAME`` transformers' SDPA with the module's mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return sdpa_attention_forward(module, query, key, value, module.bench_mask, **kwargs)

    _register(MASKED_NAME, attend)


def register_flex(blocks: Mapping[str, BlockMask], options: Any, device: torch.device) -> None:
    """Make ``attn_implementation=FLEX_NAME`` call FlexAttention with the block mask of the role.

    A role without a block mask is dense. A bias is a table of distances ``[1, H, 1, 2S - 1]``.

    On a CPU FlexAttention is compiled apart from the model: Inductor's CPU template cannot read a
    query that is a view of a linear's output (torch 2.13), so it needs a graph break around it.
    """
    flex = flex_attention
    if device.type == "cpu":
        apart = torch.compile(flex_attention, dynamic=False)
        flex = torch._dynamo.disable(lambda *a, **k: apart(*a, **k), recursive=False)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert dropout == 0.0, "FlexAttention has no dropout"
        role = module.bench_role
        score = None
        if position_bias is not None and role != "cross":  # cross-attention's bias is zero
            assert position_bias.shape[2] == 1, "T5's bias is a table: keep_table was called"
            table, offset = position_bias[0, :, 0], position_bias.shape[3] // 2

            def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return s + table[h, k - q + offset]

        out = flex(
            query,
            key,
            value,
            score_mod=score,
            block_mask=blocks.get(role),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            kernel_options=options or None,
        )
        return out.transpose(1, 2), None

    _register(FLEX_NAME, attend)


@torch.no_grad()
def keep_table(module: Any, tokens: int) -> None:
    """Have T5's attention, whose learned bias depends on ``k - q`` alone, keep it as a table.

    It is made of the weights before the model is compiled, and is what the layers share in place of
    the bias ``[1, H, S, S]``. Made inside the model it would not stay a table: FlexAttention's
    template takes what its score function reads and nothing has stored yet into its inner loop, so
    that each score computes the logarithm of its distance (code of torch 2.11). And Inductor fails
    where ``torch.cat`` makes it for a GPU ("argument is not comparable", torch 2.11 and 2.12): it
    is the decoder's ``torch.min(k - q, 0)`` at an index that the cat hides in an Identity.
    """
    table = distance_table(module.compute_bias(tokens, tokens))
    module.register_buffer("bench_table", table[None, :, None], persistent=False)
    module.compute_bias = MethodType(lambda self, *args, **kwargs: self.bench_table, module)


def distance_table(position_bias: Tensor) -> Tensor:
    """A bias ``[1, H, Q, K]`` that depends on ``k - q`` alone, as ``[H, Q + K - 1]``."""
    before = position_bias[0, :, 1:, 0].flip(-1)
    return torch.cat([before, position_bias[0, :, 0]], dim=-1)


def _register(name: str, attend: Callable[..., Any]) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


# -- work ------------------------------------------------------------------------------------------


def model_work(name: str, batch: int, seq: int, keep: Tensor, dtype: torch.dtype) -> ModelWork:
    """What a call has to compute and to read, counted on a model without storage.

    Args:
        seq: as asked for. keep: the cell's mask, bool ``[S, S]``.
    """
    tokens = keep.shape[0]
    empty = torch.empty(tokens, tokens, dtype=torch.bool, device="meta")
    model, extra = masked_model(name, seq, 0, empty, dtype, "meta")
    inputs = zoo.make_inputs(name, batch, seq, 0, dtype, "meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        caller(model, inputs, extra)(*inputs.values())
    counts = counter.flop_counts["Global"]
    looked_up = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    read = sum(p.numel() for p in model.parameters() if id(p) not in looked_up)
    by_role = masks_by_role(name, keep)
    attention = []
    for group in zoo.attention_layers(name):
        rows, mask = batch * tokens * group.head_dim, by_role[group.role]
        share = 1.0 if mask is None else tile_fraction(mask)
        attention.append(
            AttentionWork(
                count=group.count,
                flop=4 * rows * group.heads * tokens * share,
                moved_bytes=2 * rows * (group.heads + group.kv_heads) * dtype.itemsize,
                head_dim=group.head_dim,
            )
        )
    products = sum(count for op, count in counts.items() if str(op) in PRODUCTS)
    return ModelWork(float(products), float(read * dtype.itemsize), tuple(attention))
