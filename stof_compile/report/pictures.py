"""The pictures of the HTML report: graphs, masks, bars and schemes as inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from stof_compile.report.fold import Folded, Node
from stof_compile.report.layout import GAP_X, HEIGHT, WIDTH, Box, Picture
from stof_compile.report.markup import Markup, el, join

LETTERS = 21  # that fit into a line of a node
SHORT = {"scaled_dot_product_attention": "sdpa"}  # names that do not fit
CELL = 8  # of a mask, in units of its picture
PALETTE = 6  # colours of fused groups, c0 to c5 in the style sheet


def graph_picture(
    folded: Folded,
    picture: Picture,
    label: str,
    link: Callable[[int, Node], str],
    group: Callable[[Node], tuple[int, int, str] | None],
) -> Markup:
    """A graph; every node is a link.

    Args:
        label: the picture in words. link: number and node -> where the link leads.
        group: of a node -> (number of its kind, colour, text), None where it has none.
    """
    frames = [
        join(
            (
                _rect(box, cls="frame", rx=8),
                el("text", f"layers: {repeat.count}x", x=box.x + 10, y=box.y + 16, cls="repeat"),
            )
        )
        for repeat, box in zip(folded.repeats_shown, picture.frames, strict=True)
    ]
    lines = [
        el("path", d=_curve(picture.boxes[a], picture.boxes[b]), cls="edge")
        for a, b in folded.edges
    ]
    nodes = [
        _node(node, box, link(i, node), group(node))
        for i, (node, box) in enumerate(zip(folded.nodes, picture.boxes, strict=True))
    ]
    return el(
        "svg",
        *frames,
        *lines,
        *nodes,
        role="group",
        aria_label=label,
        width=picture.width,
        height=picture.height,
        view_box=f"0 0 {picture.width:g} {picture.height:g}",
        cls="graph",
    )


def _node(node: Node, box: Box, href: str, group: tuple[int, int, str] | None) -> Markup:
    shape = node.op.shape
    words = [node.label, shape, group[2] if group else ""]
    if node.op.source:
        words.append(node.op.source.short)
    title = ", ".join(word for word in words if word)
    badge, letters = None, LETTERS
    if group:
        letters -= len(str(group[0]))
        badge = el("text", group[0], x=box.x + box.width - 8, y=box.y + 28, cls="badge")
    return el(
        "a",
        el("title", title),
        _rect(box, rx=5),
        el(
            "text",
            _cut(SHORT.get(node.label, node.label), LETTERS),
            x=box.x + 8,
            y=box.y + 15,
            cls="kind",
        ),
        el("text", _cut(_narrow(shape, letters), letters), x=box.x + 8, y=box.y + 28, cls="shape"),
        badge,
        href=href,
        cls=f"node c{group[1]}" if group else "node",
        data_group=group[0] if group else None,
        aria_label=title,
    )


def _rect(box: Box, **attributes: Any) -> Markup:
    return el("rect", x=box.x, y=box.y, width=box.width, height=box.height, **attributes)


def _curve(start: Box, stop: Box) -> str:
    x0, y0 = start.x + WIDTH / 2, start.y + HEIGHT
    x1, y1 = stop.x + WIDTH / 2, stop.y
    bend = min(40.0, max(10.0, (y1 - y0) / 2))
    if y1 - y0 > 3 * HEIGHT and abs(x1 - x0) < WIDTH / 2:  # around the nodes between
        side = x0 + (WIDTH + GAP_X) / 2
        bend = min(bend, (y1 - y0) / 4)
        return (
            f"M{x0:g} {y0:g}C{side:g} {y0 + bend:g} {side:g} {y0 + bend:g} {side:g} "
            f"{y0 + 2 * bend:g}L{side:g} {y1 - 2 * bend:g}C{side:g} {y1 - bend:g} {x1:g} "
            f"{y1 - bend:g} {x1:g} {y1:g}"
        )
    return f"M{x0:g} {y0:g}C{x0:g} {y0 + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1:g}"


def _narrow(shape: str, most: int) -> str:
    return shape if len(shape) <= most else shape.replace(", ", ",")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def mask_picture(picture: Mapping[str, Any], label: str) -> Markup:
    """A mask: empty, part and full tiles; part ones are darker the more of them is kept."""
    rows: list[str] = picture["cells"]
    wide = max((len(row) for row in rows), default=1)
    size = (max(wide, 1) * CELL, max(len(rows), 1) * CELL)
    cells = []
    for y, row in enumerate(rows):
        x = 0
        for value, run in groupby(row):
            length = len(list(run))
            if value != "0":
                cells.append(
                    el(
                        "rect",
                        x=x * CELL,
                        y=y * CELL,
                        width=length * CELL,
                        height=CELL,
                        cls="full" if value == "9" else f"part p{value}",
                    )
                )
            x += length
    ground = el("rect", width=size[0], height=size[1], cls="empty")
    return el(
        "svg", ground, *cells, role="img", aria_label=label, cls="mask",
        view_box=f"0 0 {size[0]} {size[1]}", shape_rendering="crispEdges",
    )  # fmt: skip


def bar(start: float, length: float, whole: float, kind: str) -> Markup:
    """A bar from ``start`` in a scale up to ``whole``; the number stands beside it as text."""
    scale = 1000 / whole if whole > 0 else 0
    return el(
        "svg",
        el("rect", x=start * scale, width=max(length * scale, 2), y=0, height=10, cls=kind),
        cls="bar",
        view_box="0 0 1000 10",
        preserve_aspect_ratio="none",
        aria_hidden="true",
    )


def scheme_picture(bits: str, kinds: tuple[str, ...]) -> Markup:
    """A scheme: one field for each operation, equal fields side by side are one segment."""
    cells = [
        el(
            "rect",
            el("title", kinds[i]) if i < len(kinds) else None,
            x=i * 12,
            width=11,
            height=14,
            cls="one" if bit == "1" else "zero",
        )
        for i, bit in enumerate(bits)
    ]
    width = max(12 * len(bits), 12)
    return el(
        "svg", *cells, role="img", aria_label=f"scheme {bits}", cls="scheme",
        width=width, height=14, view_box=f"0 0 {width} 14",
    )  # fmt: skip


def key(kind: str, words: str = "") -> Markup:
    """A field in the colour of a kind of bar or tile, and what it means."""
    swatch = el(
        "svg", el("rect", width=16, height=16, cls=kind), cls="key", view_box="0 0 16 16",
        aria_hidden="true",
    )  # fmt: skip
    return el("span", swatch, words or kind, " ", cls="keyed")
