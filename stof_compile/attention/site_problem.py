"""From a matched site with known lengths to its mask, the position of its queries, its problem."""

from __future__ import annotations

from typing import Any

import torch

from stof_compile import masks
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.attention.site import AttentionSite
from stof_compile.capture import CaptureFacts
from stof_compile.errors import StofMaskError
from stof_compile.masks.rules import Range
from stof_compile.masks.spec import MaskSpec
from stof_compile.masks.split import MaskParts
from stof_compile.node_ops import shape_of


def has_dynamic_lengths(site: AttentionSite, option: MaskSpec | None) -> bool:
    """Tell whether no block mask can be built at compile time.

    That is so when a length, the head count or the head dim is a symbol, or when the batch is one
    and the option's mask differs between batch rows.
    """
    q, k = (shape_of(n) or () for n in (site.q, site.k))
    if any(isinstance(n, torch.SymInt) for n in (*q[1:], *k[1:])):
        return True
    return option is not None and isinstance(q[0], torch.SymInt) and option.plane_shape()[0] != 1


def attention_problem(
    site: AttentionSite, parts: MaskParts, spec: MaskSpec | None, q_offset: int, facts: CaptureFacts
) -> AttentionProblem:
    """Describe a site with static lengths as a problem; a symbolic batch is taken at its hint."""
    q, k, v = (n.meta["example_value"] for n in (site.q, site.k, site.v))
    if site.k_transposed:
        k = k.transpose(-2, -1)
    bias = None if parts.bias is None else TensorMeta.of(parts.bias.meta["example_value"])
    training = facts.grad_enabled and any(t.requires_grad for t in (q, k, v))
    learned = parts.bias is not None and parts.bias.meta["example_value"].requires_grad
    return AttentionProblem(
        q=TensorMeta.of(q),
        k=TensorMeta.of(k),
        v=TensorMeta.of(v),
        spec=spec,
        q_offset=q_offset,
        device=q.device,
        scale=float(q.shape[-1]) ** -0.5 if site.scale is None else float(site.scale),
        softcap=float(site.softcap),
        padding=parts.padding is not None,
        bias=bias,
        training=training,
        bias_grad=training and learned,
        allow_tf32=torch.backends.cuda.matmul.allow_tf32,
    )


class BoundMasks:
    """Masks of the options as the sites of one graph have them.

    Equal layers share one: its key is a walk through the whole rule, and asked for again and again.
    """

    def __init__(self) -> None:
        # with what a key names by its identity, which has to live as long
        self._bound: dict[tuple[Any, ...], tuple[MaskSpec, MaskSpec]] = {}
        self._joined: dict[tuple[Any, ...], tuple[MaskSpec, MaskSpec]] = {}

    def bind(
        self, option: MaskSpec, q_len: int, k_len: int, offset: int, device: torch.device
    ) -> MaskSpec:
        """The option at lengths, see :meth:`MaskSpec.bind`."""
        key = (id(option), q_len, k_len, offset, device)
        if key not in self._bound:
            self._bound[key] = option, option.bind(q_len, k_len, offset, device)
        return self._bound[key][1]

    def join(self, own: MaskSpec, option: MaskSpec) -> MaskSpec:
        """The model's mask and the option's."""
        key = (own.key, repr(own), id(option))
        if key not in self._joined:
            self._joined[key] = option, own & option
        return self._joined[key][1]


def static_obstacle(site: AttentionSite, option: MaskSpec | None, parts: MaskParts) -> str:
    """Why a site with known lengths must stay; empty when it can be rewritten.

    Raises:
        StofMaskError: the position of the queries for the option's mask cannot be told.
    """
    if parts.dynamic is not None:
        return "; ".join(parts.reasons) or "its mask is known only at run time"
    if parts.static_empty_rows and parts.finfo_min:
        return (
            "its mask leaves rows without a key, and the model gives those the mean of the values "
            "or the unmasked attention"
        )
    if option is None:
        return ""
    q_len, k_len = lengths(site)
    first = option_offset(site, q_len, k_len)
    if first is None:
        return "the position of the queries is known only at run time"
    if first < 0:
        return (
            f"{q_len} queries end with {k_len} keys for the mask of the options, and a block mask "
            "has no queries before the first key"
        )
    return ""


def static_spec(
    site: AttentionSite, option: MaskSpec | None, parts: MaskParts, bound: BoundMasks
) -> tuple[MaskSpec | None, int]:
    """And the model's static mask, its causal flag and the option's mask.

    Args:
        bound: of the graph.
    Returns:
        The mask (None when every key is kept) and the position of the first query row.
    Raises:
        StofMaskError: the option needs the position of the queries and it cannot be told.
    """
    q_len, k_len = lengths(site)
    own = own_mask(site, parts)
    if option is None:
        return own, 0
    offset = option_offset(site, q_len, k_len)
    assert offset is not None, "sites with a run-time position are kept"
    q = site.q.meta["example_value"]
    option = bound.bind(option, q_len, k_len, offset, q.device)
    newest = offset + q_len
    if site.offset.kind == "position" and not site.cross and newest < k_len:
        option = option & Range("k", 0, newest)  # the rest of a preallocated cache is not written
    if offset == 0:
        return (option if own is None else bound.join(own, option)), 0
    if own is None:
        return option, offset
    # the model's mask counts rows from 0, the option's from the offset: join them as tensors, the
    # lengths are fixed
    sizes = TensorMeta.of(q).shape[:2]

    def dense(rule: MaskSpec, start: int) -> torch.Tensor:
        return masks.build_block_mask(
            rule, q_len, k_len, 64, q_offset=start, batch=sizes[0], heads=sizes[1], device=q.device
        ).to_dense()

    return masks.recognise(dense(option, offset) & dense(own, 0)), 0


def own_mask(site: AttentionSite, parts: MaskParts) -> MaskSpec | None:
    """The model's static mask and its causal flag as one rule; None when every key is kept."""
    own = None if parts.static is None else masks.recognise(parts.static)
    if site.is_causal:
        own = masks.causal() if own is None else own & masks.causal()
    return None if own is not None and own.key == masks.dense().key else own


def lengths(site: AttentionSite) -> tuple[int, int]:
    """Return query and key length of a site with static lengths."""
    k = site.k.meta["example_value"]
    return int(site.q.meta["example_value"].shape[-2]), int(
        k.shape[-1] if site.k_transposed else k.shape[-2]
    )


def option_offset(site: AttentionSite, q_len: int, k_len: int) -> int | None:
    """Return the position of the first query for the option's mask; None when only the run tells
    it.

    Cross-attention counts queries and keys from 0 each.

    Raises:
        StofMaskError: the position cannot be told.
    """
    where = site.offset
    if site.cross:
        return 0
    if where.kind == "unknown":
        raise StofMaskError(
            f"{site.name}: the mask of the options needs the position of the queries and it cannot "
            f"be told ({where.reason}; {q_len} queries, {k_len} keys); give the mask inside the "
            "model, or name other layers by path"
        )
    return k_len - q_len if where.kind == "length" else where.value
