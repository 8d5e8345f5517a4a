"""Folding a graph for its picture: layers that repeat are shown once, written-out lines as one."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from stof_compile.report.graph import Graph, Op

MIN_SAVED = 4  # operations that showing a layer once has to save
MAX_OPS = 6000  # longer graphs are not searched for repeats
MAX_NODES = 240  # of a picture; more cannot be read


@dataclass(frozen=True)
class Repeat:
    """A run of equal layers: ``count`` times the items from ``start``, ``period`` of them each."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The first item behind the last layer."""
        return self.start + self.period * self.count


@dataclass(frozen=True)
class Node:
    """A node of the picture.

    Args:
        ops: its operations in order; the last one gives the result.
        label: what stands in it. repeat: number of the repeat it is a part of, -1 = none.
    """

    ops: tuple[Op, ...]
    label: str
    repeat: int = -1

    @property
    def op(self) -> Op:
        """The operation that gives the result."""
        return self.ops[-1]


@dataclass(frozen=True)
class Folded:
    """What a picture shows.

    Args:
        nodes: in graph order. edges: (from, to) numbers of nodes, without duplicates.
        repeats: the layers shown once.
        left_out: views not drawn. cut: nodes not drawn because they are too many.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    repeats: tuple[Repeat, ...]
    left_out: int = 0
    cut: int = 0

    @property
    def repeats_shown(self) -> tuple[Repeat, ...]:
        """The repeats that have a node in the picture, in order."""
        drawn = {node.repeat for node in self.nodes}
        return tuple(repeat for k, repeat in enumerate(self.repeats) if k in drawn)


def fold(graph: Graph, known: Collection[str] | None = None) -> Folded:
    """Fold a graph.

    Args:
        known: names of operations that the graph before had as well; others of one source line
            that follow each other become one node. None = leave all apart.
    """
    drawn = [op for op in graph.ops if not op.is_view]
    items = _by_line(drawn, known)
    repeats = find_repeats([_signature(item) for item in items])
    inside = {i: k for k, r in enumerate(repeats) for i in range(r.start, r.stop)}
    shown: dict[int, int] = {}  # item -> node
    nodes: list[Node] = []
    cut = 0
    for i, item in enumerate(items):
        k = inside.get(i, -1)
        if k >= 0 and i >= repeats[k].start + repeats[k].period:
            shown[i] = shown.get(repeats[k].start + (i - repeats[k].start) % repeats[k].period, -1)
            continue
        if len(nodes) >= MAX_NODES:
            cut += 1
            shown[i] = -1
            continue
        shown[i] = len(nodes)
        nodes.append(Node(tuple(item), _label(item), k))
    edges = _edges(graph, items, shown, inside, repeats)
    return Folded(tuple(nodes), edges, tuple(repeats), len(graph.ops) - len(drawn), cut)


def find_repeats(signatures: Sequence[Hashable]) -> list[Repeat]:
    """Runs of equal layers, the best first found, then those in front of and behind it."""
    if len(signatures) > MAX_OPS:
        return []
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(s, len(numbers)) for s in signatures], dtype=np.int64)
    return _repeats_in(codes, 0)


def _repeats_in(codes: np.ndarray, offset: int) -> list[Repeat]:
    best: Repeat | None = None
    saved = MIN_SAVED - 1
    for period in range(1, len(codes) // 2 + 1):
        same = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        if not edges.size:
            continue
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        counts = lengths // period + 1
        k = int(np.argmax(counts))
        gain = int(counts[k] - 1) * period
        if gain > saved:
            saved = gain
            best = Repeat(int(starts[k]), period, int(counts[k]))
    if best is None:
        return []
    before = _repeats_in(codes[: best.start], offset)
    after = _repeats_in(codes[best.stop :], offset + best.stop)
    return [*before, Repeat(best.start + offset, best.period, best.count), *after]


def _by_line(ops: Sequence[Op], known: Collection[str] | None) -> list[list[Op]]:
    items: list[list[Op]] = []
    for op in ops:
        new = known is not None and op.name not in known and not op.is_custom
        if items and new:
            last = items[-1][-1]
            alike = last.name not in (known or ()) and not last.is_custom
            if alike and last.source == op.source and op.source is not None:
                items[-1].append(op)
                continue
        items.append([op])
    return items


def _signature(item: Sequence[Op]) -> Hashable:
    source = item[-1].source
    place = (source.file, source.line) if source else None
    return tuple(op.kind for op in item), item[-1].shape, place


def _label(item: Sequence[Op]) -> str:
    if len(item) == 1:
        return item[0].kind
    return f"{len(item)} ops of one line"


def _edges(
    graph: Graph,
    items: Sequence[Sequence[Op]],
    shown: dict[int, int],
    inside: dict[int, int],
    repeats: Sequence[Repeat],
) -> tuple[tuple[int, int], ...]:
    item_of = {op.name: i for i, item in enumerate(items) for op in item}
    ops = {op.name: op for op in graph.ops}
    through: dict[str, tuple[str, ...]] = {}  # a view -> what it is a view of

    def sources(name: str) -> tuple[str, ...]:
        if name in item_of:
            return (name,)
        if name not in through:
            found = [s for read in ops[name].reads if read in ops for s in sources_of(read)]
            through[name] = tuple(dict.fromkeys(found))
        return through[name]

    def sources_of(name: str) -> tuple[str, ...]:
        return (name,) if name in item_of else through.get(name, ())

    for op in graph.ops:  # in order: what a view reads is known before it
        if op.name not in item_of:
            sources(op.name)
    edges: dict[tuple[int, int], None] = {}
    for i, item in enumerate(items):
        target = shown[i]
        k = inside.get(i, -1)
        for op in item:
            for read in op.reads:
                for name in sources_of(read):
                    j = item_of[name]
                    start = shown[j]
                    crosses = k >= 0 and inside.get(j, -1) == k
                    if crosses:  # from one layer to the next: shown by the frame
                        period, first = repeats[k].period, repeats[k].start
                        if (i - first) // period != (j - first) // period:
                            continue
                    if start >= 0 and target >= 0 and start < target:
                        edges[start, target] = None
    return tuple(edges)
