"""The part of the HTML report about time: of segments, of the whole graph, and what is left."""

from __future__ import annotations

from stof_compile.dump_text import spent
from stof_compile.report.markup import Markup, el, join
from stof_compile.report.model import GraphReport, Step, untimed
from stof_compile.report.pictures import bar, key
from stof_compile.report.terminal import longest, microseconds, rate


def time_section(report: GraphReport) -> Markup:
    """The waterfall of time per part against torch.compile, with the share of the floor."""
    anchor = f"g{report.number}-time"
    timed = [step for step in report.steps if step.timed]
    heading = el("h3", "Time per segment against torch.compile", id=anchor)
    if not timed:
        text = "The dump has no measured times: the schemes and kernels were chosen by rules."
        return join((heading, el("p", text)))
    ours = sum(step.count * (step.us or 0) for step in timed)
    theirs = sum(step.count * (step.library_us or 0) for step in timed)
    rows, at_ours, at_theirs = [], 0.0, 0.0
    most = longest(step.count * (us or 0) for step in timed for us in (step.us, step.library_us))
    for step in timed:
        rows.append(_step(step, at_ours, at_theirs, max(ours, theirs), most))
        at_ours += step.count * (step.us or 0)
        at_theirs += step.count * (step.library_us or 0)
    remarks = [
        f"Together {microseconds(theirs, ours)} under torch.compile and "
        f"{microseconds(ours, theirs)} with STOF, each part measured alone and taken as often as "
        "it occurs.",
    ]
    if untimed(report.steps):
        remarks.append(f"Parts without two times, not in it: {untimed(report.steps)}.")
    if report.ceilings is None:
        remarks.append(
            "The share of the floor needs what the device can do at most: give --ceilings FILE."
        )
    keys = join((key("theirs", "torch.compile"), key("ours", "STOF, where it runs the part")))
    return join(
        (
            heading,
            el("p", " ".join(remarks)),
            el("p", keys),
            el("ol", *rows, cls="fall"),
        )
    )


def _step(step: Step, at_ours: float, at_theirs: float, whole: float, most: float) -> Markup:
    us, library = step.count * (step.us or 0), step.count * (step.library_us or 0)
    gain = f", {library / us:.2f}x" if us else ""
    facts = []
    if step.gb_s:
        facts.append(f"{rate(step.gb_s)} GB/s")
    if step.tflops:
        facts.append(f"{rate(step.tflops)} TFLOP/s")
    if step.floor_share is not None:
        facts.append(f"{step.floor_share:.0%} of the floor")
    return el(
        "li",
        el("div", el("b", f"{step.count}x {step.name}"), el("br"), el("code", step.how)),
        el(
            "div",
            bar(at_theirs, library, whole, "theirs"),
            bar(at_ours, us, whole, "ours" if step.ours else "theirs"),
            cls="bars",
        ),
        el(
            "div",
            f"{microseconds(library, most)} → {microseconds(us, most)}{gain}",
            el("br"),
            el("span", ", ".join(facts), cls="dim"),
        ),
    )


def rest_section(report: GraphReport) -> Markup:
    """The verdict, what was left to PyTorch, near misses, notes, time spent."""
    record = report.record
    parts: list[Markup | None] = [el("h3", "Whole graph", id=f"g{report.number}-verdict")]
    verdict = report.verdict
    if verdict is None or not verdict.times_us:
        parts.append(el("p", "The graph was not compared as a whole."))
    else:
        most = longest(verdict.times_us.values())
        rows = []
        for name, us in verdict.times_us.items():
            kept = name == verdict.winner
            rows.append(
                el(
                    "li",
                    el("div", el("b", f"{name} (kept)") if kept else name),
                    el("div", bar(0, us, most, "ours" if kept else "theirs"), cls="bars"),
                    el("div", microseconds(us, most)),
                )
            )
        parts.append(el("ol", *rows, cls="fall"))
    for title, lines in (
        ("Left to PyTorch", [f"{f['where']}: {f['reason']}" for f in record.fallbacks]),
        ("Near misses", [f"{m['name']}: {m['reason']}" for m in record.near_misses]),
        ("Notes", record.notes),
        ("Seconds spent", [f"{step}: {s:.2f}" for step, s in spent(record.timings_s)]),
        ("Options", [f"{name} = {value}" for name, value in record.options.items()]),
    ):
        if lines:
            parts += [el("h3", title), el("ul", *(el("li", line) for line in lines))]
    return join(parts)
