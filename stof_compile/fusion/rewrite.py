"""Rewriting: segments of a graph become calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from stof_compile.dead_code import erase_dead
from stof_compile.emit import emit
from stof_compile.fusion.chain import ChainOp, OpChain
from stof_compile.fusion.read_recipe import segment_operands


@dataclass(frozen=True)
class Segment:
    """A run of ops of a chain: ``start <= i < stop``."""

    chain: OpChain
    start: int
    stop: int

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the nodes it reads from outside."""
        return segment_operands(self.chain, self.start, self.stop)

    @property
    def ops(self) -> tuple[ChainOp, ...]:
        """Its ops."""
        return self.chain.ops[self.start : self.stop]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of its nodes, in graph order within each op."""
        return tuple(name for op in self.ops for name in op.nodes)


def rewrite_segments(
    gm: GraphModule, calls: Sequence[tuple[Segment, Callable[[Sequence[Any]], Any]]]
) -> int:
    """Put a call in the place of each segment.

    A call stands where the last op of its segment stood, and every legal segment may be computed
    there (``segment_refusal``).

    Args:
        gm: the graph the chains were found in, unchanged since.
        calls: segments that do not overlap, each with a function of its operands (proxies, in the
            order of ``Segment.operands``) that returns the result.
    Returns:
        Number of segments replaced.
    """
    nodes: Mapping[str, Node] = {node.name: node for node in gm.graph.nodes}
    replaced: dict[str, Node] = {}  # last node of a segment -> what stands in its place

    def current(name: str) -> Node:
        return replaced.get(name) or nodes[name]

    for segment, call in calls:
        last = nodes[segment.nodes[-1]]
        operands = [current(name) for name in segment.operands]
        (result,) = emit(gm.graph, last, last, lambda *given: call(given), *operands)  # noqa: B023
        last.replace_all_uses_with(result)
        for name in reversed(segment.nodes):
            gm.graph.erase_node(nodes[name])
        replaced[last.name] = result
    if calls:
        erase_dead(gm.graph)
    return len(calls)
