"""The report of a dump in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stof_compile.dump_text import spent
from stof_compile.plan import ChainPlan
from stof_compile.report.model import (
    Decision,
    GraphReport,
    alike_sites,
    kinds_of,
    named,
    scheme_bits,
    spell_config,
    spell_kernel,
    untimed,
)

CELLS = 32  # of a mask on either side
MARKS = {"unicode": ("· ", "▒▒", "██"), "ascii": (". ", "++", "##")}
MOVES = 12  # of a chain
CANDIDATES = 6  # of a decision
KINDS = 8  # of operations
MILLISECONDS_FROM = 10_000  # microseconds


def print_report(reports: Sequence[GraphReport], console: Console) -> None:
    """Print the report of every graph."""
    for report in reports:
        _Printer(report, console).run()


def mask_lines(picture: dict[str, Any], cells: int = CELLS, marks: str = "unicode") -> list[str]:
    """A mask as text, two characters a cell; several cells of the picture may share one."""
    rows: list[str] = picture["cells"]
    if not rows or not rows[0]:
        return []
    empty, part, full = MARKS[marks]
    size = -(-max(len(rows), len(rows[0])) // cells)  # equal for all, or a band looks torn
    lines = []
    for i in range(0, len(rows), size):
        line = ""
        for j in range(0, len(rows[0]), size):
            values = {value for row in rows[i : i + size] for value in row[j : j + size]}
            line += empty if values == {"0"} else full if values == {"9"} else part
        lines.append(line)
    return lines


def microseconds(us: float | None, longest_us: float = 0.0) -> str:
    """A time as text; "-" where there is none.

    Args:
        longest_us: the longest of the times in the same column or sentence: they share its unit.
    """
    if us is None:
        return "-"
    if max(us, longest_us) < MILLISECONDS_FROM:
        return f"{us:.1f} us"
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us / 1000:.3g} ms"


def longest(times_us: Iterable[float | None]) -> float:
    """The longest of some times, 0 where there is none."""
    return max((us for us in times_us if us is not None), default=0.0)


def rate(value: float) -> str:
    """A rate as text, three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class _Printer:
    """Prints one graph, section by section."""

    def __init__(self, report: GraphReport, console: Console) -> None:
        self._report, self._record, self._console = report, report.record, console
        encoding = (console.encoding or "").lower()
        self._marks = "unicode" if "utf" in encoding else "ascii"

    def run(self) -> None:
        record = self._record
        folder = f": {record.folder}" if record.folder else ""
        self._console.rule(Text(f"graph {self._report.number}{folder}"), align="left")
        versions = ", ".join(f"{name} {value}" for name, value in record.versions.items())
        self._line(f"{record.device.get('name', 'unknown device')}; {versions}")
        if record.changes_function:
            self._line(
                f"The option's mask {record.options.get('mask')} changes what the model computes."
            )
        sections: tuple[Callable[[], None], ...] = (
            self._graph,
            self._sites,
            self._masks,
            self._attention,
            self._segments,
            self._packs,
            self._schemes,
            self._verdict,
            self._rest,
        )
        for section in sections:
            section()

    def _line(self, text: str = "", style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _title(self, text: str) -> None:
        self._line()
        self._line(text, "bold")

    def _table(self, *columns: str) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in columns:
            right = column in ("time", "before", "after", "x", "gain", "floor", "number")
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        return table

    def _graph(self) -> None:
        report = self._report
        self._title("graph")
        for graph in (report.before, report.after):
            if graph is None:
                continue
            if graph.remark:
                self._line(f"  {graph.remark}")
                continue
            kinds = ", ".join(f"{count} {name}" for name, count in graph.counts.most_common(KINDS))
            self._line(f"  {graph.stage}: {len(graph.ops)} operations ({kinds}, ...)")
        if report.after is None:
            self._line("  the dump has no graph after rewriting")
        counts: dict[tuple[str, str], int] = {}
        for group in report.groups:
            kinds = self._member_kinds(group.members)
            counts[kinds, group.op.kind] = counts.get((kinds, group.op.kind), 0) + 1
        for (kinds, operator), count in counts.items():
            self._line(f"  {count}x {kinds} -> {operator}")

    def _member_kinds(self, members: Sequence[str]) -> str:
        before = self._report.before
        kinds = {op.name: op for op in before.ops} if before else {}
        computing = [kinds[name].kind for name in members if not kinds[name].is_view]
        text = " + ".join(computing[-4:]) or "operations that the dump does not tell"
        return f"{len(computing) - 4} operations + {text}" if len(computing) > 4 else text

    def _sites(self) -> None:
        self._title("attention sites")
        if not self._record.sites:
            self._line("  none")
            return
        table = self._table("site", "kernel", "problem", "mask", "density", "source")
        for alike in alike_sites(self._record.sites):
            site, shape = alike[0], alike[0].shape
            problem = (
                f"B{shape.get('batch', '?')} H{shape.get('q_heads', '?')} "
                f"{shape.get('q_len', '?')}x{shape.get('k_len', '?')} D{shape.get('head_dim', '?')}"
                if shape
                else "-"
            )
            density = site.statistics.get("density")
            kernel = site.kernel if site.status == "rewritten" else f"{site.kernel} (kept)"
            table.add_row(
                *map(
                    Text,
                    (
                        named(alike),
                        kernel,
                        problem,
                        site.mask if len(site.mask) <= 40 else site.mask[:37] + "...",
                        "-" if density is None else f"{density:.3f}",
                        _short_source(site.source),
                    ),
                )
            )
        self._console.print(table)
        for site in self._record.sites:
            if site.status != "rewritten":
                for note in site.notes:
                    self._line(f"  {site.name}: {note}")

    def _masks(self) -> None:
        for name, picture in self._record.pictures.items():
            sites = [site for site in self._record.sites if site.picture == name]
            if not sites:
                continue
            rows, cols = picture["tiles"]
            block = " x ".join(map(str, picture["block"]))
            self._title(f"mask of {named(sites)}")
            empty, part, full = MARKS[self._marks]
            planes = picture["planes"]
            self._line(
                f"  {rows} x {cols} tiles of {block}; {full} full, {part} part, {empty}empty"
                + (f"; the first of {planes} planes" if planes > 1 else "")
            )
            for line in mask_lines(picture, CELLS, self._marks):
                self._line(f"  {line}".rstrip())

    def _attention(self) -> None:
        for decision in self._report.decisions:
            self._decision(decision)

    def _decision(self, decision: Decision) -> None:
        choice = decision.choice
        self._title(f"kernel of {named(decision.sites)}")
        chosen = spell_kernel(choice.kernel, choice.config)
        self._line(f"  {chosen} ({choice.source}): {choice.reason}")
        table = self._table("candidate", "status", "time", "error", "reason")
        timed = sorted(
            choice.candidates,
            key=lambda c: (c.median_us is None, c.median_us or 0.0),
        )
        most = longest(candidate.median_us for candidate in timed[:CANDIDATES])
        for candidate in timed[:CANDIDATES]:
            name = spell_kernel(candidate.kernel, candidate.config)
            error = "" if candidate.error is None else f"{candidate.error:.1e}"
            time = microseconds(candidate.median_us, most)
            row = (name, candidate.status, time, error, candidate.reason)
            table.add_row(*map(Text, row), style="green" if name == chosen else "")
        self._console.print(table)
        if len(timed) > CANDIDATES:
            self._line(f"  and {len(timed) - CANDIDATES} slower or refused ones")

    def _segments(self) -> None:
        steps = [step for step in self._report.steps if step.us is not None]
        self._title("time of parts, before (torch.compile) and after")
        if not steps:
            self._line("  nothing was measured")
            return
        table = self._table("part", "x", "before", "after", "gain", "runs as", "rate", "floor")
        most = longest(us for step in steps for us in (step.us, step.library_us))
        for step in steps:
            gain = "-"
            if step.us and step.library_us:
                gain = f"{step.library_us / step.us:.2f}x"
            rates = [f"{rate(step.gb_s)} GB/s"] if step.gb_s else []
            rates += [f"{rate(step.tflops)} TFLOP/s"] if step.tflops else []
            share = step.floor_share
            row = (
                step.name,
                str(step.count),
                microseconds(step.library_us, most),
                microseconds(step.us, most),
                gain,
                step.how,
                ", ".join(rates) or "-",
                "-" if share is None else f"{share:.0%}",
            )
            table.add_row(*map(Text, row), style="green" if step.ours else "")
        self._console.print(table)
        missing = untimed(self._report.steps)
        if missing:
            self._line(f"  {missing} parts have no two times: views, or nothing to choose there")
        if self._report.ceilings is None:
            self._line("  share of the floor: give --ceilings FILE, what the device can do at most")

    def _packs(self) -> None:
        for pack in self._record.packs:
            verb = "packed" if pack.packed else "left apart"
            sizes = " + ".join(map(str, pack.sizes))
            self._line(f"  {pack.count}x projections {sizes} {verb} ({pack.source}): {pack.reason}")

    def _schemes(self) -> None:
        for number, chain in enumerate(self._record.chains):
            self._title(f"chain {number}: {chain.count}x {' '.join(chain.kinds)}")
            self._line(f"  scheme before {scheme_bits(chain, chain.initial)} ({chain.initial})")
            self._line(f"  scheme after  {scheme_bits(chain, chain.code)} ({chain.code})")
            self._line(f"  {chain.source}: {chain.reason}" if chain.reason else f"  {chain.source}")
            for segment in chain.segments:
                if segment.template != "inductor":
                    config = spell_config(segment.config)
                    self._line(f"  {kinds_of(chain, segment)} -> {segment.template} {config}")
                most = longest(us for _, us in segment.trials[:3])
                for words, us in segment.trials[:3]:
                    took = "failed" if us is None else microseconds(us, most)
                    self._line(f"    trial {words}: {took}", "dim")
                if segment.measured > 3:
                    self._line(f"    of {segment.measured} measured", "dim")
            self._moves(chain)

    def _moves(self, chain: ChainPlan) -> None:
        if not chain.moves:
            self._line("  the dump holds no moves of this search", "dim")
            return
        told = sorted(chain.moves, key=lambda move: move.outcome != "kept")[:MOVES]
        table = self._table("move", "from", "to", "before", "after", "outcome", "reason")
        most = longest(us for move in told for us in (move.before_us, move.after_us))
        for move in (move for move in chain.moves if move in told):
            row = (
                move.name,
                scheme_bits(chain, move.before),
                scheme_bits(chain, move.after),
                microseconds(move.before_us, most),
                microseconds(move.after_us, most),
                move.outcome,
                move.reason,
            )
            table.add_row(*map(Text, row), style="green" if move.outcome == "kept" else "")
        self._console.print(table)
        missing = len(chain.moves) - len(told) + chain.moves_left_out
        if missing > 0:
            self._line(f"  and {missing} more moves that were not kept")

    def _verdict(self) -> None:
        verdict = self._report.verdict
        self._title("whole graph")
        if verdict is None:
            self._line("  not compared as a whole")
            return
        most = longest(verdict.times_us.values())
        for name, us in verdict.times_us.items():
            kept = name == verdict.winner
            text = f"  {microseconds(us, most).rjust(10)}  {name}{'  <- kept' if kept else ''}"
            self._line(text, "green" if kept else "")
        if not verdict.times_us:
            self._line(f"  kept: {verdict.winner}, there was no time to compare")

    def _rest(self) -> None:
        record = self._record
        parts: tuple[tuple[str, list[str]], ...] = (
            ("left to PyTorch", [f"{f['where']}: {f['reason']}" for f in record.fallbacks]),
            ("near misses", [f"{m['name']}: {m['reason']}" for m in record.near_misses]),
            ("notes", record.notes),
            ("spent", [f"{step} {s:.2f} s" for step, s in spent(record.timings_s)]),
        )
        for title, lines in parts:
            if lines:
                self._title(title)
            for line in lines:
                self._line(f"  {line}")


def _short_source(source: str) -> str:
    head = source.split(" in ")[0]
    return "/".join(head.split("/")[-2:])
