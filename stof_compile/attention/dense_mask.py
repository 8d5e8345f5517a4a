"""A mask rule written into a graph as a dense mask, for attention that STOF does not rewrite."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from stof_compile import masks
from stof_compile.capture import add_buffer
from stof_compile.masks.spec import MaskSpec
from stof_compile.measure import real_tensors

MOST_KEPT = 2**28
"""Bytes of masks that one graph keeps; what is more is evaluated at each call."""

KEPT = "kept_mask_"  # how the names of such buffers begin


class Place(NamedTuple):
    """Where the queries of an attention lie, if that is known when it is compiled.

    Args:
        first: position of the first query. q_len, k_len: queries and keys.
    """

    first: int
    q_len: int
    k_len: int


def dense_keep(
    gm: GraphModule,
    spec: MaskSpec,
    like: Node,
    sizes: Callable[[Callable[[Node], Any]], tuple[Any, Any]],
    *,
    causal: bool,
    positions: Callable[[Callable[[Node], Any], Any], Any] | None = None,
    newest_only: bool = False,
    place: Place | None = None,
) -> Callable[[Callable[[Node], Any]], Any]:
    """Return a builder of a rule's dense mask: a buffer where it can be one, else
    ``stof::dense_mask``, which evaluates the rule at each call. A rule that depends on the lengths
    takes ``stof::dense_mask_of_lengths``, which no CUDA graph of Inductor holds.

    Args:
        gm, spec: graph and rule.
        like: node ``[B, H, ...]`` that gives device, batch and heads.
        sizes: returns query and key length as proxies.
        causal: and SDPA's upper-left causal rule as well.
        positions: turns the row numbers ``[Q]`` into absolute positions; by default the queries
            end where the keys end.
        newest_only: keys past the last query's position are masked (a preallocated cache).
        place: known when it is compiled; None = the mask differs from call to call.
    """
    device = like.meta["example_value"].device
    kept = None if place is None or newest_only else _kept(gm, spec, like, place, causal)
    if kept is not None:
        return lambda proxy: proxy(kept)

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
            ops = torch.ops.stof
            operator = ops.dense_mask_of_lengths if rule.depends_on_lengths else ops.dense_mask
            return proxy(gm.graph.call_function(operator.default, arguments))

        places = rows + (k_len - q_len) if positions is None else positions(proxy, rows)
        wanted = dense(spec, places)
        if newest_only:
            keys = gm.graph.call_function(torch.arange, (k_len.node,), {"device": device})
            wanted = wanted & (proxy(keys) <= places.max())
        return wanted & dense(masks.causal(), rows) if causal else wanted

    return keep


def _kept(gm: GraphModule, spec: MaskSpec, like: Node, place: Place, causal: bool) -> Node | None:
    """A buffer with the mask, for all layers alike; None where the graph would keep too much."""
    example = like.meta["example_value"]
    batch, heads = example.shape[:2]
    rows, columns = spec.plane_shape()
    if not all(isinstance(n, int) for n in (batch, heads)):
        return None
    parts = (spec.key, example.device, *place, batch, heads, int(causal))
    name = KEPT + re.sub(r"\W", "_", " ".join(map(str, parts)))
    held = getattr(gm, name, None)
    planes = (rows or batch) * (heads if columns is None else columns)
    kept = sum(b.nbytes for other, b in gm.named_buffers() if other.startswith(KEPT))
    if held is None and kept + planes * place.q_len * place.k_len > MOST_KEPT:
        return None
    if held is None:
        with real_tensors(), torch.no_grad():

            def dense(rule: MaskSpec, first: int) -> torch.Tensor:
                tensors = [tensor.to(example.device) for tensor in rule.tensors()]
                positions = torch.arange(first, first + place.q_len, device=example.device)
                arguments = (tensors, rule.to_json(), positions, place.k_len, batch, heads)
                wanted: torch.Tensor = torch.ops.stof.dense_mask(*arguments)
                return wanted

            held = dense(spec, place.first)
            if causal:
                held = held & dense(masks.causal(), 0)
    return add_buffer(gm, name, held)
