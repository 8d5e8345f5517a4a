"""Rewriting: a product and the rotations behind it become one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from stof_compile.dead_code import erase_dead
from stof_compile.emit import emit
from stof_compile.example_values import update_values
from stof_compile.fusion.rope import RopeSite


def rewrite_rotations(
    gm: GraphModule, calls: Sequence[tuple[RopeSite, Callable[[Sequence[Any]], Any]]]
) -> int:
    """Put a call in the place of each product, and let its views stand for the rotated values.

    Args:
        gm: the graph the sites were found in, unchanged since.
        calls: sites, each with a function of the operands of its recipe (proxies) that returns
            the result [..., N], contiguous.
    Returns:
        Number of sites replaced.
    """
    nodes = {node.name: node for node in gm.graph.nodes}
    for site, call in calls:
        _rewrite(gm, site, call, nodes)
    if calls:
        erase_dead(gm.graph)
    return len(calls)


def _rewrite(
    gm: GraphModule,
    site: RopeSite,
    call: Callable[[Sequence[Any]], Any],
    nodes: dict[str, Node],
) -> None:
    graph, product, place = gm.graph, nodes[site.product], nodes[site.place]
    shape = site.recipe.operands[-1].shape

    def build(*given: Any) -> Any:
        *operands, cos, sin = given
        return call((*operands, cos.reshape(shape), sin.reshape(shape)))

    operands = [nodes[name] for name in (*site.operands, site.cos, site.sin)]
    before = product if place is product else place.next
    (whole,) = emit(graph, before, product, build, *operands)
    product.replace_all_uses_with(whole)
    after = whole
    for name in site.views:  # those in front of it read it now
        view = nodes[name]
        if view < whole:
            after.append(view)
            after = view
    written = []
    for name, value, copied in zip(site.results, site.values, site.copied, strict=True):
        result, view = nodes[name], nodes[value]
        if copied:
            (view,) = emit(graph, result, result, lambda v: v.clone(), view)
        result.replace_all_uses_with(view)
        written.append(view)
    update_values(graph, *written)
    gone = [nodes[name] for name in (*site.inside, site.product)]
    for node in sorted(gone, reverse=True):
        graph.erase_node(node)
