"""The option's mask put into attention that STOF does not rewrite: a fallback never changes the
function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node, Proxy

from stof_compile.attention.match import NearMiss
from stof_compile.attention.rewrite import and_mask_into_sdpa, and_mask_into_softmax
from stof_compile.capture import CaptureFacts, add_buffer
from stof_compile.errors import StofMaskError
from stof_compile.masks import as_mask_spec
from stof_compile.masks.spec import MaskSpec
from stof_compile.options import StofOptions


def mask_near_misses(gm: GraphModule, near_misses: Sequence[NearMiss], mask: object) -> None:
    """And the option's mask into attention that was recognised but cannot be rewritten.

    Raises:
        StofMaskError: the mask is given by path (a near miss has no reliable one), or there is no
            place to put it.
    """
    for miss in near_misses:
        if isinstance(mask, Mapping):
            continue  # a path that names no site was refused or listed by resolve_masks
        _mask_node(gm, miss.node, as_mask_spec(mask), f"{miss.name} ({miss.reason})")


def mask_only(gm: GraphModule, facts: CaptureFacts, options: StofOptions) -> None:
    """And the option's mask into every attention of a graph in which no site could be matched.

    Raises:
        StofMaskError: masks by path cannot be assigned without sites, or an attention has no place
            for the mask.
    """
    if options.mask is None:
        return
    if isinstance(options.mask, Mapping):
        raise StofMaskError(
            "the masks of the options are given by path and STOF's own passes failed on this graph, so they cannot be "
            "assigned; see the logged reason, or run without the option"
        )
    spec = as_mask_spec(options.mask)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and (node.target is F.scaled_dot_product_attention or _is_softmax(node)):
            _mask_node(gm, node, spec, node.name)


def _is_softmax(node: Node) -> bool:
    if node.op == "call_method":
        return node.target == "softmax"
    return node.target in (F.softmax, torch.softmax)


def _mask_node(gm: GraphModule, node: Node, spec: MaskSpec, where: str) -> None:
    """And a mask into one SDPA or softmax node; queries end where the keys end."""
    if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
        query, key = node.args[0], node.args[1]
        if not isinstance(query, Node) or not isinstance(key, Node):
            raise StofMaskError(f"{where}: the mask of the options cannot be put into this attention")
        keep = dense_keep(gm, spec, query, lambda p: (p(query).size(-2), p(key).size(-2)), causal=bool(node.kwargs.get("is_causal")))
        and_mask_into_sdpa(gm, node, keep)
    elif _is_softmax(node) and isinstance(node.args[0], Node):
        scores = node.args[0]
        keep = dense_keep(gm, spec, scores, lambda p: (p(scores).size(-2), p(scores).size(-1)), causal=False)
        and_mask_into_softmax(gm, node, keep)
    else:
        raise StofMaskError(f"{where}: the mask of the options cannot be put into {node.name!r}; name the layers to mask by path")


def dense_keep(
    gm: GraphModule,
    spec: MaskSpec,
    like: Node,
    sizes: Callable[[Callable[[Node], Proxy]], tuple[Proxy, Proxy]],
    *,
    causal: bool,
    positions: Callable[[Callable[[Node], Proxy], Proxy], Any] | None = None,
) -> Callable[[Callable[[Node], Proxy]], Any]:
    """Return a builder of ``stof::dense_mask`` for a rule.

    Args:
        gm, spec: graph and rule.
        like: node ``[B, H, ...]`` that gives device, batch and heads.
        sizes: returns query and key length as proxies.
        causal: and SDPA's upper-left causal rule as well.
        positions: turns the row numbers ``[Q]`` into absolute positions; by default the queries
            end where the keys end.
    """
    from stof_compile import masks

    device = like.meta["example_value"].device

    def keep(proxy: Callable[[Node], Proxy]) -> Any:
        q_len, k_len = sizes(proxy)
        rows = proxy(gm.graph.call_function(torch.arange, (q_len.node,), {"device": device}))
        batch, heads = proxy(like).size(0).node, proxy(like).size(1).node

        def dense(rule: MaskSpec, positions: Proxy) -> Any:
            tensors = [add_buffer(gm, f"rule_{rule.key[:12]}_t{i}", t.to(device)) for i, t in enumerate(rule.tensors())]
            arguments = (tensors, rule.to_json(), positions.node, k_len.node, batch, heads)
            return proxy(gm.graph.call_function(torch.ops.stof.dense_mask.default, arguments))

        wanted = dense(spec, rows + (k_len - q_len) if positions is None else positions(proxy, rows))
        return wanted & dense(masks.causal(), rows) if causal else wanted

    return keep
