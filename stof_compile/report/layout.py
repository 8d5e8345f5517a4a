"""Places of nodes in a picture: layers from top to bottom, few crossings, repeats kept together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import networkx as nx

from stof_compile.report.fold import Folded

WIDTH, HEIGHT = 168, 34  # of a node
GAP_X, GAP_Y = 12, 26
MARGIN, FRAME = 10, 8
TITLE = 20  # above a frame
MOST_ABREAST = 3


@dataclass(frozen=True)
class Box:
    """A rectangle in the units of the picture."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Picture:
    """Where everything of a graph stands.

    Args:
        boxes: one for each node. frames: one for each repeat. width, height: of the whole.
    """

    boxes: tuple[Box, ...]
    frames: tuple[Box, ...]
    width: float
    height: float


def layout(folded: Folded) -> Picture:
    """Place the nodes of a folded graph, part by part: what is in front of a repeat, the repeat,
    what is behind it.
    """
    parts = [
        (repeat, [i for i, _ in members])
        for repeat, members in groupby(enumerate(folded.nodes), key=lambda pair: pair[1].repeat)
    ]
    rows: list[tuple[int, list[int]]] = []
    place: dict[int, float] = {}  # node -> where its row has it, 0 = middle
    for repeat, members in parts:
        for row in _rows(members, folded.edges, place):
            for at, node in enumerate(row):
                place[node] = at - (len(row) - 1) / 2
            rows.append((repeat, row))
    widest = max((len(row) for _, row in rows), default=1)
    width = widest * (WIDTH + GAP_X) - GAP_X + 2 * (MARGIN + FRAME)
    boxes: dict[int, Box] = {}
    frames: dict[int, Box] = {}
    y, current = float(MARGIN), -1
    for repeat, row in rows:
        if repeat != current:
            if current >= 0:
                y += FRAME
            if repeat >= 0:
                frames[repeat] = Box(MARGIN / 2, y, width - MARGIN, 0)
                y += TITLE + FRAME
            current = repeat
        start = (width - len(row) * (WIDTH + GAP_X) + GAP_X) / 2
        for at, node in enumerate(row):
            boxes[node] = Box(start + at * (WIDTH + GAP_X), y, WIDTH, HEIGHT)
        y += HEIGHT + GAP_Y
        if repeat >= 0:
            frame = frames[repeat]
            frames[repeat] = Box(frame.x, frame.y, frame.width, y - frame.y - GAP_Y + FRAME)
    if current >= 0:
        y += FRAME
    return Picture(
        tuple(boxes[i] for i in range(len(folded.nodes))),
        tuple(frames[k] for k in sorted(frames)),
        width,
        max(y - GAP_Y + MARGIN, 2.0 * MARGIN),
    )


def _rows(
    members: list[int], edges: tuple[tuple[int, int], ...], place: dict[int, float]
) -> list[list[int]]:
    inside = set(members)
    graph = nx.DiGraph()
    graph.add_nodes_from(members)
    graph.add_edges_from((a, b) for a, b in edges if a in inside and b in inside)
    where = dict(place)
    rows: list[list[int]] = []
    # as late as possible: what makes a mask or angles stands above its reader, not at the top
    late = reversed(list(nx.topological_generations(graph.reverse(copy=False))))
    for generation in late:
        ordered = sorted(generation, key=lambda n: (_barycentre(n, edges, where), n))
        for start in range(0, len(ordered), MOST_ABREAST):
            row = ordered[start : start + MOST_ABREAST]
            for at, node in enumerate(row):
                where[node] = at - (len(row) - 1) / 2
            rows.append(row)
    return rows


def _barycentre(node: int, edges: tuple[tuple[int, int], ...], where: dict[int, float]) -> float:
    above = [where[a] for a, b in edges if b == node and a in where]
    return sum(above) / len(above) if above else 0.0
