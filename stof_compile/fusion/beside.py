"""Memory-intensive segments that stand beside Inductor's own work, and belong to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import GraphModule, Node

from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.op_kind import Family, op_kind
from stof_compile.fusion.read_recipe import read_recipe
from stof_compile.fusion.recipe import Recipe

JOINED: frozenset[Family] = frozenset({"elementwise", "embedding", "movement", "softmax"})
"""Families of ops that Inductor computes in one kernel with memory-intensive ops beside them."""


class Neighbours:
    """What stands beside the ops of a graph.

    Args:
        gm: a graph, unchanged while this is asked. chains: all of it.
    """

    def __init__(self, gm: GraphModule, chains: Iterable[OpChain]) -> None:
        self._gm = gm
        self._nodes = {node.name: node for node in gm.graph.nodes}
        self._homes = {
            name: (c, i) for c in chains for i, op in enumerate(c.ops) for name in op.nodes
        }
        self._left: dict[Node, bool] = {}

    def claimed(self, chain: OpChain) -> frozenset[int]:
        """The ops of a chain, by number, that should be in no kernel of ours without a product.

        Beside an op that no template takes, Inductor computes them in the same kernel, and what
        passes between the two never goes through memory. A kernel of ours takes them apart: it can
        be the faster one alone and make the graph slower, as a norm behind T5's ``clamp`` does.

        Args:
            chain: one of the chains.
        """
        return frozenset(
            number
            for number, op in enumerate(chain.ops)
            if not op.kind.compute_intensive
            and op.kind.family != "view"
            and any(map(self._is_left, _beside(self._nodes[op.name])))
        )

    def _is_left(self, node: Node) -> bool:
        """Whether an op is Inductor's for sure, and one that it joins with others."""
        if node not in self._left:
            kind, home = op_kind(node), self._homes.get(node.name)
            left = kind is not None and kind.family in JOINED and home is not None
            if left and home is not None:  # in no chain: a constant, or an op unknown here
                chain, place = home
                left = not isinstance(read_recipe(self._gm, chain, place, place + 1), Recipe)
            self._left[node] = left
        return self._left[node]


def _beside(node: Node) -> Iterator[Node]:
    """The ops that made what an op reads, and those that read its result; views left out."""
    for made in node.all_input_nodes:
        source = made
        while _is_view(source):
            source = source.all_input_nodes[0]
        yield source
    waiting = list(node.users)
    while waiting:
        reader = waiting.pop()
        if _is_view(reader):
            waiting.extend(reader.users)
        else:
            yield reader


def _is_view(node: Node) -> bool:
    kind = op_kind(node)
    return kind is not None and kind.family == "view"
