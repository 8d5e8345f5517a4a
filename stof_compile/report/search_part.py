"""The part of the HTML report about the search: candidates, schemes, moves, trials."""

from __future__ import annotations

from stof_compile.plan import ChainPlan, MovePlan
from stof_compile.report.markup import Markup, el, join, table
from stof_compile.report.model import (
    Decision,
    GraphReport,
    kinds_of,
    named,
    scheme_bits,
    spell_config,
    spell_kernel,
)
from stof_compile.report.pictures import bar, scheme_picture
from stof_compile.report.terminal import longest, microseconds

CANDIDATES = 8  # of a decision, the others on demand


def search_section(report: GraphReport) -> Markup:
    """What the search tried: candidates of attention, schemes and moves of chains, packs."""
    parts: list[Markup | None] = [
        el("h3", "What the search tried", id=f"g{report.number}-search"),
        *(_decision(decision) for decision in report.decisions),
        *(_chain(i, chain) for i, chain in enumerate(report.record.chains)),
    ]
    for pack in report.record.packs:
        verb = "packed" if pack.packed else "left apart"
        sizes = " + ".join(map(str, pack.sizes))
        text = f"{pack.count}x projections {sizes}: {verb} ({pack.source}). {pack.reason}"
        parts.append(el("p", text, cls="card"))
    if len(parts) == 1:
        parts.append(el("p", "Nothing was to be decided in this graph."))
    return join(parts)


def _decision(decision: Decision) -> Markup:
    choice = decision.choice
    name = named(decision.sites)
    slowest = longest(c.median_us for c in choice.candidates)
    most = longest(us for c in choice.candidates for us in (c.median_us, c.p80_us))
    ordered = sorted(choice.candidates, key=lambda c: (c.median_us is None, c.median_us or 0.0))
    rows = []
    for candidate in ordered:
        spelled = spell_kernel(candidate.kernel, candidate.config)
        same = spelled == spell_kernel(choice.kernel, choice.config)
        drawn = None
        if candidate.median_us is not None:
            drawn = bar(0, candidate.median_us, slowest, "ours" if same else "theirs")
        spread = ""
        if candidate.p20_us is not None and candidate.p80_us is not None:
            ends = (microseconds(us, most) for us in (candidate.p20_us, candidate.p80_us))
            spread = " to ".join(ends)
        rows.append(
            el(
                "tr",
                el("td", spelled, cls="line"),
                el("td", "accepted" if same else candidate.status),
                el("td", microseconds(candidate.median_us, most), cls="n"),
                el("td", spread, cls="line"),
                el("td", drawn, cls="wide"),
                el("td", candidate.reason, cls="wide"),
                cls="kept" if same else None,
            )
        )
    head = ("kernel", "outcome", "time", "20th to 80th percentile", "", "reason")
    first = rest = None
    if rows:
        first = table(head, rows[:CANDIDATES], f"candidates for {name}", ("time",))
    if rows[CANDIDATES:]:
        more = table(head, rows[CANDIDATES:], f"more candidates for {name}", ("time",))
        rest = el("details", el("summary", f"{len(rows) - CANDIDATES} more candidates"), more)
    return el(
        "div",
        el("h4", f"Attention of {name}"),
        el(
            "p",
            f"{spell_kernel(choice.kernel, choice.config)} ({choice.source}): {choice.reason}",
        ),
        first,
        rest,
        cls="card",
    )


def _chain(number: int, chain: ChainPlan) -> Markup:
    def strip(code: str) -> Markup:
        return scheme_picture(scheme_bits(chain, code), chain.kinds)

    segments = []
    for segment in chain.segments:
        most = longest((segment.median_us, *(us for _, us in segment.trials)))
        trials = [
            el("li", f"{words}: {'failed' if us is None else microseconds(us, most)}")
            for words, us in segment.trials
        ]
        if segment.template == "inductor" and not trials:
            continue
        config = spell_config(segment.config)
        more = f" ({segment.measured} measured)" if segment.measured else ""
        segments.append(
            el(
                "li",
                f"{kinds_of(chain, segment)}: ",
                el("b", f"{segment.template} {config}".strip()),
                f", {microseconds(segment.median_us, most)}{more}",
                el("details", el("summary", "fastest trials"), el("ol", *trials))
                if trials
                else None,
            )
        )
    times = ""
    if chain.initial_us is not None and chain.final_us is not None:
        most = longest((chain.initial_us, chain.final_us))
        times = (
            f"Measured in turns: {microseconds(chain.initial_us, most)} before, "
            f"{microseconds(chain.final_us, most)} after. "
        )
    return el(
        "div",
        el("h4", f"Chain {number}, {chain.count}x: {' '.join(chain.kinds)}"),
        el("p", "scheme by rules ", strip(chain.initial), f" {chain.initial}"),
        el("p", "scheme taken ", strip(chain.code), f" {chain.code}"),
        el("p", f"{times}{chain.source}: {chain.reason}"),
        el("ul", *segments) if segments else None,
        _moves(chain),
        cls="card",
    )


def _moves(chain: ChainPlan) -> Markup:
    if not chain.moves:
        reason = "followed from a plan" if chain.source == "plan" else f"source: {chain.source}"
        return el("p", f"The dump holds no moves for this chain ({reason}).", cls="dim")
    most = longest(us for move in chain.moves for us in (move.before_us, move.after_us))
    rows = [_move(chain, i, move, most) for i, move in enumerate(chain.moves, 1)]
    kept = sum(move.outcome == "kept" for move in chain.moves)
    words = f"{len(rows)} moves, {kept} accepted"
    if chain.moves_left_out:
        words += f"; {chain.moves_left_out} more that were rejected are not in the dump"
    head = ("", "move", "from", "to", "touched before", "touched after", "outcome")
    listed = table(head, rows, "moves of the search", ("touched before", "touched after"))
    return el("details", el("summary", words), listed, open="" if len(rows) <= 12 else None)


def _move(chain: ChainPlan, number: int, move: MovePlan, most: float) -> Markup:
    return el(
        "tr",
        el("td", number),
        el("td", move.name),
        el("td", scheme_picture(scheme_bits(chain, move.before), chain.kinds)),
        el(
            "td",
            el("span", "→ ", cls="narrow"),
            scheme_picture(scheme_bits(chain, move.after), chain.kinds),
        ),
        el("td", microseconds(move.before_us, most), cls="n"),
        el("td", el("span", "→ ", cls="narrow"), microseconds(move.after_us, most), cls="n"),
        el("td", f"{'accepted' if move.outcome == 'kept' else move.outcome} {move.reason}".strip()),
        cls="kept" if move.outcome == "kept" else None,
    )
