"""A mask rule written into a graph as a dense mask, for attention that STOF does not rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from stof_compile import masks
from stof_compile.capture import add_buffer
from stof_compile.masks.spec import MaskSpec


def dense_keep(
    gm: GraphModule,
    spec: MaskSpec,
    like: Node,
    sizes: Callable[[Callable[[Node], Any]], tuple[Any, Any]],
    *,
    causal: bool,
    positions: Callable[[Callable[[Node], Any], Any], Any] | None = None,
    newest_only: bool = False,
) -> Callable[[Callable[[Node], Any]], Any]:
    """Return a builder of ``stof::dense_mask`` for a rule.

    Args:
        gm, spec: graph and rule.
        like: node ``[B, H, ...]`` that gives device, batch and heads.
        sizes: returns query and key length as proxies.
        causal: and SDPA's upper-left causal rule as well.
        positions: turns the row numbers ``[Q]`` into absolute positions; by default the queries
            end where the keys end.
        newest_only: keys past the last query's position are masked (a preallocated cache).
    """
    device = like.meta["example_value"].device

    def keep(proxy: Callable[[Node], Any]) -> Any:
        q_len, k_len = sizes(proxy)
        rows = proxy(gm.graph.call_function(torch.arange, (q_len.node,), {"device": device}))
        batch, heads = proxy(like).size(0).node, proxy(like).size(1).node

        def dense(rule: MaskSpec, positions: Any) -> Any:
            tensors = [
                add_buffer(gm, f"rule_{rule.key[:12]}_t{i}", tensor.to(device))
                for i, tensor in enumerate(rule.tensors())
            ]
            arguments = (tensors, rule.to_json(), positions.node, k_len.node, batch, heads)
            return proxy(gm.graph.call_function(torch.ops.stof.dense_mask.default, arguments))

        places = rows + (k_len - q_len) if positions is None else positions(proxy, rows)
        wanted = dense(spec, places)
        if newest_only:
            keys = gm.graph.call_function(torch.arange, (k_len.node,), {"device": device})
            wanted = wanted & (proxy(keys) <= places.max())
        return wanted & dense(masks.causal(), rows) if causal else wanted

    return keep
