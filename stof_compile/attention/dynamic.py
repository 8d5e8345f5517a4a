"""Attention with symbolic lengths: the op carries the mask rule and keeps block masks per
length."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node, Proxy

from stof_compile import masks
from stof_compile.attention.match import AttentionSite
from stof_compile.attention.rewrite import replace_output
from stof_compile.capture import add_buffer
from stof_compile.masks.spec import MaskSpec
from stof_compile.masks.split import MaskParts
from stof_compile.options import StofOptions

if TYPE_CHECKING:
    from stof_compile.attention.lower import SiteReport


def lower_dynamic_site(
    gm: GraphModule,
    site: AttentionSite,
    option: MaskSpec | None,
    parts: MaskParts,
    options: StofOptions,
    report: SiteReport,
) -> bool:
    """Replace a site with symbolic lengths by ``stof::attention_rule`` where its mask is a rule.

    Returns:
        False when the site must stay with PyTorch; ``report.reason`` says why.
    """
    if parts.dynamic is not None:
        report.reason = "; ".join(parts.reasons) or "its mask is known only at run time"
        return False
    if parts.static is not None or parts.static_graph is not None:
        report.reason = "lengths are symbolic and the model's own mask is a tensor, not a rule"
        return False
    same_length = _same_length(site)
    if option is not None and not same_length and (site.is_causal or site.offset.kind != "length"):
        report.reason = "lengths are symbolic and the queries' position is known only at run time"
        return False
    rule = option
    if site.is_causal:
        rule = masks.causal() if option is None else option & masks.causal()
    if rule is None:
        report.reason = "no mask: SDPA is the best dense kernel"
        return False
    training = any(n.meta["example_value"].requires_grad for n in (site.q, site.k, site.v))
    if training and torch.is_grad_enabled():
        report.reason = "training with symbolic lengths stays with SDPA's own backward"
        return False
    _insert(gm, site, parts, rule, options, offset_from_lengths=option is not None and not same_length and not site.cross)
    report.status = "rewritten"
    report.static_mask = repr(rule)
    report.reason = "lengths are symbolic: block masks are built once per length from the rule"
    return True


def _same_length(site: AttentionSite) -> bool:
    q, k = site.q.meta["example_value"], site.k.meta["example_value"]
    k_len = k.shape[-1] if site.k_transposed else k.shape[-2]
    symbolic = [getattr(getattr(n, "node", None), "expr", n) for n in (q.shape[-2], k_len)]
    return bool(symbolic[0] == symbolic[1])


def _insert(
    gm: GraphModule, site: AttentionSite, parts: MaskParts, rule: MaskSpec, options: StofOptions, *, offset_from_lengths: bool
) -> None:
    device = site.q.meta["example_value"].device
    head_dim = site.q.meta["example_value"].shape[-1]
    scale = float(head_dim) ** -0.5 if site.scale is None else float(site.scale)
    kernel = options.attention if options.attention not in ("auto", "paper") else "auto"

    def build(proxy: Callable[[Node], Proxy]) -> Any:
        q, k, v = proxy(site.q), proxy(site.k), proxy(site.v)
        if site.k_transposed:
            k = k.transpose(-2, -1)
        offset = (k.size(-2) - q.size(-2)).node if offset_from_lengths else 0
        tensors = [add_buffer(gm, f"rule_{rule.key[:12]}_t{i}", t.to(device)) for i, t in enumerate(rule.tensors())]
        call = gm.graph.call_function(
            torch.ops.stof.attention_rule.default,
            (q.node, k.node, v.node, tensors, rule.to_json(), parts.padding, parts.bias, None, scale, float(site.softcap), offset, kernel, False),
        )
        return proxy(call)[0]

    replace_output(gm, site.output, build)
