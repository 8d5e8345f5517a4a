"""Memory-intensive segments that stand beside Inductor's own work, and belong to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch.fx import GraphModule, Node

from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.op_kind import Family, OpKind
from stof_compile.fusion.read_recipe import read_recipe
from stof_compile.fusion.recipe import Recipe
from stof_compile.fusion.rewrite import Segment

JOINED: frozenset[Family] = frozenset({"elementwise", "embedding", "movement", "softmax"})
"""Families of ops that Inductor computes in one kernel with memory-intensive ops beside them."""
APART: frozenset[Family] = frozenset({"movement"})
"""Families of memory-intensive ops that it may well store the operands of."""


class Neighbours:
    """What stands beside the ops of a graph.

    Args:
        gm: a graph. chains: all of it.
    """

    def __init__(self, gm: GraphModule, chains: Iterable[OpChain]) -> None:
        self._nodes = {node.name: node for node in gm.graph.nodes}
        self._homes = {
            name: (c, i) for c in chains for i, op in enumerate(c.ops) for name in op.nodes
        }
        self._left: set[Node] = set()  # ops that are Inductor's for sure
        for node in gm.graph.nodes:  # in order: what an op reads comes before it
            kind = self._kind(node)
            if kind is None or kind.compute_intensive or kind.family == "view":
                continue  # in no chain: a constant, or an op unknown here
            left = kind.family in JOINED and not self._has_recipe(gm, node)
            if not left and not self._is_epilogue(node):
                # one maker would not do: a residual stream begins at an embedding
                makers = [made for made in self._made_by(node) if self._kind(made) is not None]
                left = bool(makers) and self._left.issuperset(makers)
            if left:
                self._left.add(node)

    def claimed(self, chain: OpChain) -> frozenset[int]:
        """The ops of a chain, by number, that should be in no kernel of ours without a product.

        Beside an op that is Inductor's for sure (no template takes it, or all that it reads is made
        by such ops) Inductor computes them in the same kernel, and what
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
            and not self._is_epilogue(self._nodes[op.name])
            and not self._left.isdisjoint(self._beside(self._nodes[op.name]))
        )

    def joined(self, segments: Sequence[Segment]) -> list[bool]:
        """Which segments have no product, and an op beside them that has none of our kernels'
        products either: Inductor computes both in one kernel, and what passes between the two
        never goes through memory. A residual and the norm behind it are one kernel of Inductor's
        that writes both, and two of ours; which ops are Inductor's is known when all chains of a
        graph have their schemes.

        Args:
            segments: what templates are to compute, none of whose ops overlap.
        Returns:
            For each whether it had better be left to Inductor.
        """
        plain = [not any(op.kind.compute_intensive for op in s.ops) for s in segments]
        ours = {n for s, alone in zip(segments, plain, strict=True) if not alone for n in s.nodes}
        return [
            alone and any(self._joins(s, beside, ours) for beside in self._around(s))
            for s, alone in zip(segments, plain, strict=True)
        ]

    def _around(self, segment: Segment) -> Iterator[Node]:
        """Ops outside a segment that made what it reads, or read what it makes."""
        for name in segment.nodes:
            for beside in self._beside(self._nodes[name]):
                if beside.name not in segment.nodes:
                    yield beside

    def _joins(self, segment: Segment, beside: Node, ours: set[str]) -> bool:
        """Whether Inductor computes an op in one kernel with a segment beside it. The other
        segments without a product have no say: a plan without them decides as they did.
        """
        kind = self._kind(beside)
        if kind is None or kind.compute_intensive or kind.family in ("view", *APART):
            return False
        if beside.name in ours:
            return False
        chain, place = self._homes[beside.name]
        others = {self._nodes[name] for name in chain.ops[place].nodes}
        nodes = {self._nodes[name] for name in segment.nodes}
        first, second = (others, nodes) if min(others) < min(nodes) else (nodes, others)
        return not self._meet_outside(first, second)

    def _meet_outside(self, first: set[Node], second: set[Node]) -> bool:
        """Whether ``second`` depends on ``first`` by a way through other ops, too."""
        start = min(first)
        waiting = [n for node in second for n in self._made_by(node) if n not in first | second]
        seen = set(waiting)
        while waiting:
            for made in waiting.pop().all_input_nodes:
                if made in first:
                    return True
                if made not in seen and made > start:
                    seen.add(made)
                    waiting.append(made)
        return False

    def _has_recipe(self, gm: GraphModule, node: Node) -> bool:
        chain, place = self._homes[node.name]
        return isinstance(read_recipe(gm, chain, place, place + 1, self._nodes), Recipe)

    def _kind(self, node: Node) -> OpKind | None:
        home = self._homes.get(node.name)
        return None if home is None else home[0].ops[home[1]].kind

    def _is_view(self, node: Node) -> bool:
        kind = self._kind(node)
        return kind is not None and kind.family == "view"

    def _is_epilogue(self, node: Node) -> bool:
        """Whether an op reads a product, which it can be in one kernel with."""
        kinds = map(self._kind, self._made_by(node))
        return any(kind is not None and kind.compute_intensive for kind in kinds)

    def _made_by(self, node: Node) -> Iterator[Node]:
        """The ops that made what an op reads, views left out."""
        for made in node.all_input_nodes:
            source = made
            while self._is_view(source):
                source = source.all_input_nodes[0]
            yield source

    def _beside(self, node: Node) -> Iterator[Node]:
        """The same, and the ops that read its result."""
        yield from self._made_by(node)
        waiting = list(node.users)
        while waiting:
            reader = waiting.pop()
            if self._is_view(reader):
                waiting.extend(reader.users)
            else:
                yield reader
