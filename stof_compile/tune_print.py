"""What ``stof tune`` prints: schemes before and after, packs, notes, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stof_compile.dump import Record
from stof_compile.plan import ChainPlan, PackPlan, SegmentPlan


def print_graph(console: Console, record: Record) -> None:
    """Print what became of one graph."""
    kernels = Counter(
        f"{site.kernel}{'' if site.status == 'rewritten' else ' (kept)'}" for site in record.sites
    )
    if kernels:
        say(console, "attention: " + ", ".join(f"{n}x {name}" for name, n in kernels.items()))
    if record.chains:
        console.print(_chain_table(record.chains))
        console.print(_segment_table(record.chains))
    else:
        say(console, "chains: none that a template of this device improves")
    for pack in record.packs:
        say(console, _pack_line(pack))
    for note in record.notes:
        say(console, note)


def _chain_table(chains: Sequence[ChainPlan]) -> Table:
    table = Table(title="schemes of the op chains")
    columns = ("#", "times", "ops", "before", "us", "after", "us", "gain", "source")
    for name in columns:
        table.add_column(name, justify="right" if name in ("#", "times", "us", "gain") else "left")
    for number, chain in enumerate(chains):
        gain = ""
        if chain.initial_us and chain.final_us:
            gain = f"{chain.initial_us / chain.final_us:.2f}x"
        table.add_row(
            str(number),
            str(chain.count),
            escape(" ".join(chain.kinds)),
            chain.initial,
            _us(chain.initial_us),
            chain.code,
            _us(chain.final_us),
            gain,
            chain.source,
        )
    return table


def _segment_table(chains: Sequence[ChainPlan]) -> Table:
    table = Table(title="what runs their segments")
    for name in ("chain", "ops", "template", "us", "as it was, us", "config"):
        table.add_column(name, justify="right" if "us" in name or name == "chain" else "left")
    for number, chain in enumerate(chains):
        for segment in chain.segments:
            table.add_row(
                str(number),
                escape(" ".join(chain.kinds[segment.start : segment.stop])),
                segment.template,
                _us(segment.median_us),
                _us(segment.library_us),
                escape(_config(segment)),
            )
    return table


def _config(segment: SegmentPlan) -> str:
    return " ".join(f"{name}={value}" for name, value in segment.config)


def _pack_line(pack: PackPlan) -> str:
    sizes = " + ".join(map(str, pack.sizes))
    times = f": {pack.reason}" if pack.reason else ""
    if pack.separate_us is not None and pack.packed_us is not None:
        times = f", {pack.separate_us:.1f} us apart, {pack.packed_us:.1f} us packed"
    verb = "packed" if pack.packed else "left apart"
    return f"{pack.count}x projections {sizes}: {verb} ({pack.source}){times}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def say(console: Console, text: str) -> None:
    """Print one line as it is: never wrapped, nothing in it taken for markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
