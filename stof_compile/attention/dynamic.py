"""Attention with symbolic lengths: the op carries the mask rule and keeps block masks per
length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from stof_compile import masks
from stof_compile.attention.recorded import wants_kernel_gradients
from stof_compile.attention.rewrite import replace_output
from stof_compile.attention.site import AttentionSite
from stof_compile.attention.unmeasured import TRITON_DTYPES, TRITON_MAX_HEAD_DIM
from stof_compile.capture import add_buffer
from stof_compile.errors import StofMaskError
from stof_compile.masks.computed import Computed
from stof_compile.masks.spec import MaskSpec
from stof_compile.masks.split import MaskParts
from stof_compile.measure import real_tensors
from stof_compile.node_ops import same_size
from stof_compile.options import StofOptions


@dataclass(frozen=True)
class DynamicOutcome:
    """What became of a site with symbolic lengths.

    Args:
        rule: the mask the op carries, None when the site stays with PyTorch.
        reason: why, in one sentence.
        by_choice: PyTorch's attention is the better one here; False = it could not be rewritten.
    """

    rule: MaskSpec | None
    reason: str
    by_choice: bool = False


def lower_dynamic_site(
    gm: GraphModule,
    site: AttentionSite,
    option: MaskSpec | None,
    parts: MaskParts,
    options: StofOptions,
) -> DynamicOutcome:
    """Replace a site with symbolic lengths by ``stof::attention_rule`` where its mask is a rule.

    The model's own mask becomes a rule too, when it is computed from sizes alone.
    """
    reason = _obstacle(site, option, parts) or _unfit(site, options)
    if reason:
        return DynamicOutcome(None, reason)
    own: MaskSpec | None = None
    sizes: tuple[Node, ...] = ()
    if parts.static_graph is not None:
        try:
            own = _computed(parts)
        except StofMaskError as refusal:
            return DynamicOutcome(None, f"lengths are symbolic: {refusal}")
        sizes = parts.static_graph.symints
    rules = [own, option, masks.causal() if site.is_causal else None]
    found = [rule for rule in rules if rule is not None]
    if not found:
        return DynamicOutcome(None, "no mask: SDPA is the best dense kernel", by_choice=True)
    training = _training(site, parts, options, sparse=own is not None or option is not None)
    if training == "sdpa":
        reason = "training with symbolic lengths stays with SDPA's own backward"
        return DynamicOutcome(None, reason, by_choice=True)
    rule = found[0]
    for other in found[1:]:
        rule = rule & other
    ends_with_keys = option is not None and not site.cross and not _same_length(site)
    _insert(
        gm, site, parts, rule, (own, sizes), options,
        offset_from_lengths=ends_with_keys, keep_lse=training == "kernels",
    )  # fmt: skip
    return DynamicOutcome(
        rule, "lengths are symbolic: block masks are built once per length from the rule"
    )


def _training(
    site: AttentionSite, parts: MaskParts, options: StofOptions, *, sparse: bool
) -> Literal["no", "kernels", "sdpa"]:
    """Whether gradients are wanted, and whose: the kernels' on a GPU, where there is more of a
    mask than SDPA's own causal one, else SDPA's."""
    q, k, v = (node.meta["example_value"] for node in (site.q, site.k, site.v))
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (q, k, v)):
        return "no"
    bias = None if parts.bias is None else parts.bias.meta["example_value"]
    has_kernels = options.attention in ("auto", "paper", "block", "row", "gather")
    if sparse and has_kernels and wants_kernel_gradients(q, k, v, bias):
        return "kernels"
    return "sdpa"


def _unfit(site: AttentionSite, options: StofOptions) -> str:
    """Why no kernel that reads a rule on a GPU takes these operands; empty when one does."""
    q, v = site.q.meta["example_value"], site.v.meta["example_value"]
    if not q.is_cuda or options.attention == "sdpa":
        return ""
    if q.dtype not in TRITON_DTYPES:
        return f"lengths are symbolic and no sparse kernel takes {q.dtype} on a GPU"
    widest = max(q.shape[-1], v.shape[-1])
    if widest > TRITON_MAX_HEAD_DIM:
        return f"lengths are symbolic and no sparse kernel takes head dims of {widest} on a GPU"
    return ""


def _obstacle(site: AttentionSite, option: MaskSpec | None, parts: MaskParts) -> str:
    """Why a site cannot take a rule; empty when it can."""
    if site.form in ("flex", "stof"):
        return f"lengths are symbolic and the attention is a kernel already ({site.form})"
    if parts.dynamic is not None:
        return "; ".join(parts.reasons) or "its mask is known only at run time"
    if parts.static is not None:
        return "lengths are symbolic and the model's own mask is a tensor, not a rule"
    if parts.static_graph is not None and parts.finfo_min:
        return (
            "lengths are symbolic and the model masks with a finite number: a row without keys "
            "would have another value"
        )
    if option is None or site.cross or _same_length(site):
        return ""
    if site.offset.kind == "slice":
        return "lengths are symbolic and the queries are some rows of the sequence"
    if site.is_causal or site.offset.kind != "length":
        return "lengths are symbolic and the queries' position is known only at run time"
    return ""


def _computed(parts: MaskParts) -> MaskSpec:
    """The model's own mask as a rule.

    Raises:
        StofMaskError: it is made from numbers that may be negative, or by calls that cannot travel.
    """
    graph = parts.static_graph
    assert graph is not None, "asked for a computed mask only"
    hints = []
    for node in graph.symints:
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt):
            if not value.node.has_hint() or not value.node.expr.is_nonnegative:
                raise StofMaskError(f"the model's mask reads the number '{node.name}', no size")
            value = value.node.hint
        hints.append(int(value))
    with real_tensors():
        rule = Computed(graph.text, torch.empty((*hints, 0)), graph.tensors)
        rule.plane_shape()  # everything it calls is allowed, its value is a mask
    return rule


def _same_length(site: AttentionSite) -> bool:
    q, k = site.q.meta["example_value"], site.k.meta["example_value"]
    return same_size(q.shape[-2], k.shape[-1] if site.k_transposed else k.shape[-2])


def _insert(
    gm: GraphModule,
    site: AttentionSite,
    parts: MaskParts,
    rule: MaskSpec,
    own: tuple[MaskSpec | None, tuple[Node, ...]],
    options: StofOptions,
    *,
    offset_from_lengths: bool,
    keep_lse: bool,
) -> None:
    device = site.q.meta["example_value"].device
    head_dim = site.q.meta["example_value"].shape[-1]
    scale = float(head_dim) ** -0.5 if site.scale is None else float(site.scale)
    kernel = options.attention if options.attention not in ("auto", "paper") else "auto"

    def tensor_node(number: int, tensor: torch.Tensor) -> Node:
        computed, sizes = own
        if isinstance(computed, Computed) and tensor is computed.sizes:
            return gm.graph.call_function(torch.empty, ((*sizes, 0),), {"device": device})
        return add_buffer(gm, f"rule_{rule.key[:12]}_t{number}", tensor.to(device))

    def build(proxy: Callable[[Node], Any]) -> Any:
        q, k, v = proxy(site.q), proxy(site.k), proxy(site.v)
        if site.k_transposed:
            k = k.transpose(-2, -1)
        offset = (k.size(-2) - q.size(-2)).node if offset_from_lengths else 0
        held = [tensor_node(i, tensor) for i, tensor in enumerate(rule.tensors())]
        operands = (q.node, k.node, v.node, held, rule.to_json(), parts.padding, parts.bias, None)
        numbers = (scale, float(site.softcap), offset, kernel, keep_lse)
        call = gm.graph.call_function(torch.ops.stof.attention_rule.default, (*operands, *numbers))
        return proxy(call)[0]

    replace_output(gm, site.output, build)
