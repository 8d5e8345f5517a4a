"""The part of the HTML report about the graphs: pictures, operations, fused groups."""

from __future__ import annotations

from stof_compile.report.fold import Folded, Node, fold
from stof_compile.report.fused import Alike, alike_groups, numbers_of, template_source
from stof_compile.report.graph import Graph
from stof_compile.report.layout import layout
from stof_compile.report.markup import Markup, el, join
from stof_compile.report.model import GraphReport, spell_config
from stof_compile.report.pictures import PALETTE, graph_picture
from stof_compile.report.terminal import longest, microseconds

PLACES = 4  # source lines shown of each group
VIEWS = "Views (reshape, transpose and the like) are not drawn."


def graph_section(report: GraphReport) -> Markup:
    """The graph before and after, its operations and its fused groups."""
    entries = alike_groups(report)
    numbers = numbers_of(entries)
    known = {op.name for op in report.before.ops} if report.before else None
    both = []
    for side, title, graph, names in (
        ("b", "Before", report.before, None),
        ("a", "After", report.after, known),
    ):
        if graph is not None:
            both.append(_graph(report, side, title, graph, fold(graph, names), entries, numbers))
    if report.after is None:
        both.append(el("p", "The dump has no graph after rewriting.", cls="warn"))
    stages = ", ".join(f"{stage} {count}" for stage, count in report.stages.items())
    return join(
        (
            el("h3", "Graph before and after", id=f"g{report.number}-graph"),
            el(
                "p",
                f"Operations: {stages or 'the dump has no graphs'}. A colour with a number is a "
                "fused group; the same number before and after is the same group. Each node leads "
                f"to its source line, and from there to template and config. {VIEWS}",
            ),
            el("section", *both, cls="graphs graph-of", aria_label="graphs"),
            el("div", *(_entry(report, entry) for entry in entries), cls="entries"),
        )
    )


def _graph(
    report: GraphReport,
    side: str,
    title: str,
    graph: Graph,
    folded: Folded,
    entries: list[Alike],
    numbers: dict[str, int],
) -> Markup:
    prefix = f"g{report.number}-{side}"
    if graph.remark:
        return el("div", el("h4", f"{title}: {graph.stage}"), el("p", graph.remark, cls="warn"))

    def group(node: Node) -> tuple[int, int, str] | None:
        number = next((numbers[op.name] for op in node.ops if op.name in numbers), None)
        if number is None:
            return None
        words = f"fused group {number}: {entries[number - 1].operator}"
        return number, (number - 1) % PALETTE, words

    items = [
        _operation(report, f"{prefix}-{i}", node, folded, group(node))
        for i, node in enumerate(folded.nodes)
    ]
    repeats = [f"{r.period} operations {r.count} times" for r in folded.repeats_shown]
    words = f"{len(graph.ops)} operations, {len(folded.nodes)} drawn"
    if repeats:
        words += "; layers that repeat are drawn once: " + ", ".join(repeats)
    if folded.cut:
        words += f"; {folded.cut} more do not fit into the picture"
    picture = graph_picture(
        folded,
        layout(folded),
        f"{title}: {words}. The list below the picture says the same.",
        lambda i, _: f"#{prefix}-{i}",
        group,
    )
    return el(
        "div",
        el("h4", f"{title}: {graph.stage}"),
        el("p", words, cls="dim"),
        el(
            "div", picture, cls="scroll", tabindex=0, role="region",
            aria_label=f"picture of the graph {title.lower()}",
        ),
        el(
            "details",
            el("summary", f"The {len(items)} operations with their source lines"),
            el("ol", *items, cls="ops"),
        ),
        cls="card",
    )  # fmt: skip


def _operation(
    report: GraphReport,
    anchor: str,
    node: Node,
    folded: Folded,
    group: tuple[int, int, str] | None,
) -> Markup:
    op = node.op
    repeat = ""
    if node.repeat >= 0:
        repeat = f" (in each of {folded.repeats[node.repeat].count} layers)"
    link = None
    if group:
        href = f"#g{report.number}-k{group[0]}"
        chip = el("span", group[0], cls=f"chip c{group[1]}")
        link = el("div", chip, " ", el("a", group[2], href=href))
    if op.source is None:
        place = el("div", "no source line in the dump", cls="dim")
    else:
        place = el("div", op.source.short, el("br"), el("code", op.source.code))
    return el(
        "li",
        el("b", node.label),
        f" {op.shape}{repeat}",
        place,
        link,
        el("details", el("summary", "in the graph"), *(el("pre", o.code) for o in node.ops[:40])),
        id=anchor,
    )


def _entry(report: GraphReport, entry: Alike) -> Markup:
    first = entry.groups[0]
    colour = (entry.number - 1) % PALETTE
    replaced = [el("li", f"{count}x {words}") for words, count in entry.replaced.items()]
    places = list(dict.fromkeys(g.op.source.short for g in entry.groups if g.op.source))
    sites = [group.site for group in entry.groups if group.site]
    rest = len(places) - PLACES
    parts: list[Markup | None] = [
        el("h4", el("span", entry.number, cls=f"chip c{colour}"), f" {entry.operator}"),
        el("p", "stands for"),
        el("ul", *replaced),
        el("p", "attention of ", ", ".join(sites[:PLACES]), " ..." if len(sites) > PLACES else "")
        if sites
        else None,
        el("p", "from ", ", ".join(places[:PLACES]), f" and {rest} more" if rest > 0 else "")
        if places
        else None,
    ]
    segment = first.segment
    if segment is not None:
        most = longest((segment.median_us, segment.library_us))
        took = microseconds(segment.median_us, most)
        library = microseconds(segment.library_us, most)
        parts.append(el("p", "template ", el("b", segment.template)))
        parts.append(el("p", "config ", el("code", spell_config(segment.config) or "none")))
        parts.append(el("p", f"{took} a call; the same operations under torch.compile {library}"))
        made = report.record.versions.get("stof-compile", "unknown")
        source, where = template_source(segment.template, made)
        body = el("pre", source) if source else el("p", where)
        parts.append(el("details", el("summary", f"Source of the template ({where})"), body))
    elif not sites:
        parts.append(el("p", "The dump does not tell which template wrote it.", cls="dim"))
    parts.append(el("details", el("summary", "The call"), el("pre", first.op.code)))
    return el("div", *parts, cls="card", id=f"g{report.number}-k{entry.number}")
