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

    def claim(self, chain: OpChain, start: int, stop: int) -> str | None:
        """Why a segment of memory-intensive ops should be no kernel of ours; None if it may be one.

        Beside an op that no template takes, Inductor computes it in the same kernel, and what
        passes between the two never goes through memory. A kernel of ours takes them apart: it can
        be the faster one alone and make the graph slower, as a norm behind T5's ``clamp`` does.

        Args:
            chain: one of the chains. start, stop: its ops ``start <= i < stop``.
        """
        ops = chain.ops[start:stop]
        if any(op.kind.compute_intensive for op in ops):
            return None
        inside = {name for op in ops for name in op.nodes}
        sources = [
            s for n in inside for s in self._nodes[n].all_input_nodes if s.name not in inside
        ]
        for node in (*_made_by(sources), *_read_by(self._nodes[ops[-1].name])):
            kind = op_kind(node)
            if kind is None or kind.family not in JOINED or node.name not in self._homes:
                continue  # what is in no chain is a constant or an op unknown here
            home, place = self._homes[node.name]
            if not isinstance(read_recipe(self._gm, home, place, place + 1), Recipe):
                return f"Inductor computes it together with '{node.name}' ({kind.name})"
        return None


def _made_by(values: Iterable[Node]) -> Iterator[Node]:
    """The ops that made values, views left out."""
    for made in values:
        node = made
        while _is_view(node):
            node = node.all_input_nodes[0]
        yield node


def _read_by(value: Node) -> Iterator[Node]:
    """The ops that read a value, views left out."""
    waiting = list(value.users)
    while waiting:
        node = waiting.pop()
        if _is_view(node):
            waiting.extend(node.users)
        else:
            yield node


def _is_view(node: Node) -> bool:
    kind = op_kind(node)
    return kind is not None and kind.family == "view"
