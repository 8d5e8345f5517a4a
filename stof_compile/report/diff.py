"""What differs between two dumps: environment, sites, masks, kernels, schemes, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stof_compile.dump import Record, SiteRecord
from stof_compile.plan import ChainPlan, PackPlan, SegmentPlan
from stof_compile.report.model import (
    GraphReport,
    kinds_of,
    scheme_bits,
    spell_config,
    spell_kernel,
)
from stof_compile.report.terminal import longest, microseconds

PARTS = ("environment", "graph", "site", "mask", "kernel", "chain", "segment", "pack", "time")
"""In the order in which they are told; fallbacks come last."""

SAME_TIME = 0.02  # a smaller share is noise, and no difference
T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """One difference.

    Args:
        graph: number in the first dump, else in the second; -1 = the dumps as a whole.
        part: "environment", "graph", "site", "mask", "kernel", "chain", "segment", "pack",
            "time" or "fallback".
        where: the name of what differs. what: the fact about it.
        a, b: in either dump; "" where it is in one of them only.
    """

    graph: int
    part: str
    where: str
    what: str
    a: str
    b: str

    @property
    def only_in(self) -> str:
        """ "a" or "b" where the thing is in one dump only, else empty."""
        return "a" if not self.b else "b" if not self.a else ""


def diff_reports(a: Sequence[GraphReport], b: Sequence[GraphReport]) -> list[Change]:
    """The differences of two dumps; graphs of equal captured text are pairs, then in order."""
    changes: list[Change] = []
    for left, right in _pairs(a, b):
        if left is not None and right is not None:
            changes += _Comparison(left, right).changes()
        elif left is not None:
            changes.append(Change(left.number, "graph", "graph", "whole", _summary(left), ""))
        elif right is not None:
            changes.append(Change(right.number, "graph", "graph", "whole", "", _summary(right)))
    return changes


def diff_json(changes: Iterable[Change], a: str, b: str) -> dict[str, Any]:
    """The differences for programs."""
    listed = [{**asdict(change), "only_in": change.only_in} for change in changes]
    return {"report": 1, "a": a, "b": b, "changes": listed}


def print_diff(changes: Sequence[Change], a: str, b: str, console: Console) -> None:
    """Print the differences by graph and part."""
    console.print(Text(f"a: {a}\nb: {b}"), soft_wrap=True)
    if not changes:
        console.print("no difference")
        return
    parts = dict.fromkeys((change.graph, change.part) for change in changes)
    for graph, part in parts:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in (part, "", "a", "b"):
            table.add_column(column, overflow="fold")
        for change in changes:
            if (change.graph, change.part) == (graph, part):
                row = (change.where, change.what, change.a or "(not there)",
                       change.b or "(not there)")  # fmt: skip
                table.add_row(*map(Text, row))
        console.print()
        console.print(Text(f"graph {graph}: {part}", style="bold"))
        console.print(table)


class _Comparison:
    """Compares two reports of a graph."""

    def __init__(self, a: GraphReport, b: GraphReport) -> None:
        self._a, self._b = a, b
        self._found: list[Change] = []

    def changes(self) -> list[Change]:
        a, b = self._a.record, self._b.record
        self._environment(a, b)
        for stage in dict.fromkeys([*self._a.stages, *self._b.stages]):
            counts = (str(report.stages.get(stage, "")) for report in (self._a, self._b))
            self._note("graph", stage, "operations", *counts)
        self._groups()
        self._matched(a.sites, b.sites, lambda s: s.name, "site", _site_words, self._site)
        self._matched(a.chains, b.chains, lambda c: c.kinds, "chain", _chain_words, self._chain)
        self._matched(a.packs, b.packs, lambda p: p.sizes, "pack", _pack_words, self._pack)
        self._verdict()
        for name in ("fallbacks", "near_misses"):
            mine, other = ([*map(_told, getattr(record, name))] for record in (a, b))
            for text in mine:
                if text not in other:
                    self._note("fallback", name.replace("_", " "), "entry", text, "")
            for text in other:
                if text not in mine:
                    self._note("fallback", name.replace("_", " "), "entry", "", text)
        order = {part: i for i, part in enumerate(PARTS)}
        return sorted(self._found, key=lambda change: order.get(change.part, len(order)))

    def _note(self, part: str, where: str, what: str, a: str, b: str) -> None:
        if a != b:
            self._found.append(Change(self._a.number, part, where, what, a, b))

    def _time(self, part: str, where: str, what: str, a: float | None, b: float | None) -> None:
        if a is not None and b is not None and abs(a - b) <= SAME_TIME * max(a, b):
            return
        words = ["" if us is None else microseconds(us, longest((a, b))) for us in (a, b)]
        if a and b:
            words[1] += f" ({a / b:.2f}x)"
        self._note(part, where, what, words[0], words[1])

    def _environment(self, a: Record, b: Record) -> None:
        for name, left, right in (
            ("versions", a.versions, b.versions),
            ("device", a.device, b.device),
            ("options", a.options, b.options),
        ):
            for key in dict.fromkeys([*left, *right]):
                if key == "dump_dir" or left.get(key) == right.get(key):
                    continue
                words = [str(values[key]) if key in values else "" for values in (left, right)]
                self._note("environment", name, key, words[0], words[1])

    def _groups(self) -> None:
        counts: list[dict[str, int]] = []
        for report in (self._a, self._b):
            found: dict[str, int] = {}
            for group in report.groups:
                found[group.op.kind] = found.get(group.op.kind, 0) + 1
            counts.append(found)
        for kind in dict.fromkeys([*counts[0], *counts[1]]):
            words = [str(found[kind]) if kind in found else "" for found in counts]
            self._note("graph", kind, "fused groups", words[0], words[1])

    def _matched(
        self,
        a: Sequence[T],
        b: Sequence[T],
        key: Callable[[T], Hashable],
        part: str,
        words: Callable[[T], tuple[str, str]],
        compare: Callable[[T, T], None],
    ) -> None:
        left, right = _numbered(a, key), _numbered(b, key)
        for name in dict.fromkeys([*left, *right]):
            if name in left and name in right:
                compare(left[name], right[name])
            elif name in left:
                self._note(part, *_apart(words(left[name])), words(left[name])[1], "")
            else:
                self._note(part, *_apart(words(right[name])), "", words(right[name])[1])

    def _site(self, a: SiteRecord, b: SiteRecord) -> None:
        for what in ("status", "form"):
            self._note("site", a.name, what, str(getattr(a, what)), str(getattr(b, what)))
        self._note("site", a.name, "shape", str(a.shape), str(b.shape))
        self._note("mask", a.name, "rule", a.mask, b.mask)
        for fact in ("density", "full_tiles", "part_tiles", "empty_tiles", "nbytes"):
            left, right = (str(site.statistics.get(fact, "none")) for site in (a, b))
            self._note("mask", a.name, fact, left, right)
        pictures = (
            report.record.pictures.get(site.picture, {}).get("cells")
            for report, site in ((self._a, a), (self._b, b))
        )
        left_cells, right_cells = pictures
        same_numbers = a.statistics == b.statistics
        if left_cells and right_cells and left_cells != right_cells and same_numbers:
            self._note("mask", a.name, "tiles", "as many", "as many, at other places")
        kernels = [spell_kernel(s.kernel, s.choice.config if s.choice else ()) for s in (a, b)]
        self._note("kernel", a.name, "kernel", kernels[0], kernels[1])
        sources = [s.choice.source if s.choice else "none" for s in (a, b)]
        self._note("kernel", a.name, "source", sources[0], sources[1])
        times = [_chosen_us(site) for site in (a, b)]
        self._time("time", a.name, "chosen kernel", times[0], times[1])

    def _chain(self, a: ChainPlan, b: ChainPlan) -> None:
        name = " ".join(a.kinds)
        self._note("chain", name, "scheme", scheme_bits(a, a.code), scheme_bits(b, b.code))
        self._note("chain", name, "by rules", scheme_bits(a, a.initial), scheme_bits(b, b.initial))
        self._note("chain", name, "source", a.source, b.source)
        self._note("chain", name, "occurrences", str(a.count), str(b.count))
        self._note("chain", name, "moves", str(len(a.moves)), str(len(b.moves)))
        self._time("time", name, "chain", a.final_us, b.final_us)
        left = {(s.start, s.stop): s for s in a.segments}
        right = {(s.start, s.stop): s for s in b.segments}
        for place in sorted({*left, *right}):
            mine, other = left.get(place), right.get(place)
            where = f"{kinds_of(a, SegmentPlan(*place, ''))} (ops {place[0]} to {place[1] - 1})"
            runs = [_runs_as(segment) for segment in (mine, other)]
            self._note("segment", where, "runs as", runs[0], runs[1])
            if mine is not None and other is not None:
                self._time("time", where, "segment", mine.median_us, other.median_us)

    def _pack(self, a: PackPlan, b: PackPlan) -> None:
        where = " + ".join(map(str, a.sizes))
        self._note("pack", where, "packed", str(a.packed), str(b.packed))
        self._note("pack", where, "source", a.source, b.source)
        self._time("time", where, "packed", a.packed_us, b.packed_us)

    def _verdict(self) -> None:
        a, b = self._a.verdict, self._b.verdict
        self._note("graph", "whole graph", "kept", a.winner if a else "", b.winner if b else "")
        times = [verdict.times_us if verdict else {} for verdict in (a, b)]
        for name in dict.fromkeys([*times[0], *times[1]]):
            self._time("time", "whole graph", name, times[0].get(name), times[1].get(name))


def _pairs(
    a: Sequence[GraphReport], b: Sequence[GraphReport]
) -> list[tuple[GraphReport | None, GraphReport | None]]:
    left, right = list(a), list(b)
    pairs: list[tuple[GraphReport | None, GraphReport | None]] = []
    for mine in a:
        text = mine.record.graphs.get("captured")
        same = [o for o in right if text and o.record.graphs.get("captured") == text]
        if same:
            pairs.append((mine, same[0]))
            left.remove(mine)
            right.remove(same[0])
    while left and right:
        pairs.append((left.pop(0), right.pop(0)))
    pairs += [(mine, None) for mine in left] + [(None, other) for other in right]

    def place(pair: tuple[GraphReport | None, GraphReport | None]) -> tuple[bool, int]:
        known = pair[0] or pair[1]
        return pair[0] is None, 0 if known is None else known.number

    return sorted(pairs, key=place)


def _numbered(items: Sequence[T], key: Callable[[T], Hashable]) -> dict[Hashable, T]:
    """Items by key and by their number among equal keys."""
    found: dict[Hashable, T] = {}
    counts: Counter[Hashable] = Counter()
    for item in items:
        found[key(item), counts[key(item)]] = item
        counts[key(item)] += 1
    return found


def _apart(words: tuple[str, str]) -> tuple[str, str]:
    return words[0], "only in one"


def _summary(report: GraphReport) -> str:
    count = report.stages.get("captured", 0)
    return f"{len(report.record.sites)} attention sites, {count} operations"


def _site_words(site: SiteRecord) -> tuple[str, str]:
    return site.name, f"{site.kernel}, {site.mask}"


def _chain_words(chain: ChainPlan) -> tuple[str, str]:
    return " ".join(chain.kinds), f"{chain.count}x, scheme {chain.code}"


def _pack_words(pack: PackPlan) -> tuple[str, str]:
    return " + ".join(map(str, pack.sizes)), "packed" if pack.packed else "left apart"


def _runs_as(segment: SegmentPlan | None) -> str:
    if segment is None:
        return ""
    return f"{segment.template} {spell_config(segment.config)}".strip()


def _chosen_us(site: SiteRecord) -> float | None:
    if site.choice is None:
        return None
    for candidate in site.choice.candidates:
        if (candidate.kernel, candidate.config) == (site.choice.kernel, site.choice.config):
            return candidate.median_us
    return None


def _told(entry: dict[str, str]) -> str:
    return f"{entry.get('where') or entry.get('name', '')}: {entry.get('reason', '')}"
