"""Where STOF loses: every cell in which its time is above that of the best peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from e2e_stats import PEERS, STOF, cells, launched, replayed
from gather import Group, of_kind
from results import number
from stats import Row, best_of, by_cell, has_bursts
from tables import table


@dataclass(frozen=True)
class Loss:
    """A cell where a peer is ahead.

    Args:
        cell: with the model where there is one. stof_us, peer_us: best times. peer: which.
    """

    cell: str
    stof_us: float
    peer_us: float
    peer: str

    @property
    def ratio(self) -> float:
        """Time of the peer over STOF's, below 1."""
        return self.peer_us / self.stof_us if self.stof_us else math.inf


@dataclass(frozen=True)
class Losses:
    """The losses of a group by one of its times.

    Args:
        title: what was compared. count: cells in which both have a time.
    """

    title: str
    count: int
    found: tuple[Loss, ...]


def all_losses(held: Sequence[Group]) -> list[Losses]:
    """The losses of all groups, with the comparisons that have none."""
    told: list[Losses] = []
    for group in of_kind(held, "attention"):
        told.append(_attention(group, "median_us", "replay" if group.on_gpu else "calls"))
        if group.on_gpu:
            told.append(_attention(group, "launch_us", "launches included"))
            if has_bursts(group.rows):
                told.append(_attention(group, "burst_us", "replay in bursts"))
    for group in of_kind(held, "backward"):
        how = "replay" if group.on_gpu else "calls"
        told.append(_attention(group, "median_us", f"both passes, {how}"))
        told.append(_attention(group, "backward_us", f"backward pass, {how}"))
    for group in of_kind(held, "e2e"):
        told.append(_models(group, replayed, "replay" if group.on_gpu else "calls"))
        if group.on_gpu:
            told.append(_models(group, launched, "launches included"))
    for group in of_kind(held, "operators"):
        told.append(_operators(group))
    for group in of_kind(held, "passes"):
        told.append(_passes(group))
    for group in of_kind(held, "overhead"):
        told.append(_compiling(group))
    return told


def _attention(group: Group, column: str, how: str) -> Losses:
    pairs = []
    for cell, rows in by_cell(group.rows).items():
        stof, peer = best_of(rows, ("stof",), column), best_of(rows, None, column)
        if stof is not None and peer is not None:
            name = f"{peer.peer} {peer.variant}"
            pairs.append(Loss(cell, stof.median_us, peer.median_us, name))
    what = "Attention" if group.kind == "attention" else "Gradients of attention"
    return _losses(f"{what} (`{group.name}`), {how}", pairs)


def _models(group: Group, time: object, how: str) -> Losses:
    assert callable(time), "a function of a row"
    pairs = []
    for cell, rows in cells(group.rows).items():
        ours = [time(r) for r in rows if r["peer"] in STOF]
        theirs = [(time(r), r["peer"]) for r in rows if r["peer"].startswith(tuple(PEERS.values()))]
        stof = min((us for us in ours if us == us), default=None)
        peer = min((pair for pair in theirs if pair[0] == pair[0]), default=None)
        if stof is not None and peer is not None:
            pairs.append(Loss(cell, stof, *peer))
    return _losses(f"Whole models (`{group.name}`), {how}", pairs)


def _operators(group: Group) -> Losses:
    pairs = []
    for row in group.rows:
        others = [(number(row, f"{n}_us"), n) for n in ("detached", "inductor") if row[f"{n}_us"]]
        if row["fused_us"] and others:
            pairs.append(Loss(row["cell"], number(row, "fused_us"), *min(others)))
    return _losses(
        f"Fused operators (`{group.name}`) against the better of apart and Inductor", pairs
    )


def _passes(group: Group) -> Losses:
    base = {(r["model"], r["cell"]): r for r in group.rows if r["pipeline"] == "baseline"}
    pairs = []
    for row in group.rows:
        other = base.get((row["model"], row["cell"]))
        if row["verdict"] in ("win", "loss", "neutral") and other is not None:
            mean_us = number(row, "mean_us") if row["verdict"] == "loss" else 0.0  # else no loss
            name = f"{row['model']} {row['cell']} {row['pipeline']}"
            pairs.append(Loss(name, mean_us, number(other, "mean_us"), "torch.compile"))
    return _losses(f"Pipelines without a mask (`{group.name}`), significantly slower", pairs)


def _compiling(group: Group) -> Losses:
    pairs = [
        Loss(f"{r['model']} {r['cell']}", 1e6 * number(r, "stof_s"), 1e6 * number(r, "compile_s"),
             "torch.compile")
        for r in group.rows
    ]  # fmt: skip
    return _losses(f"Compiling with stored choices (`{group.name}`)", pairs)


def _losses(title: str, pairs: Iterable[Loss]) -> Losses:
    every = list(pairs)
    lost = sorted((loss for loss in every if loss.ratio < 1.0), key=lambda loss: loss.ratio)
    return Losses(title, len(every), tuple(lost))


def loss_lines(told: Sequence[Losses]) -> list[str]:
    """The section as Markdown."""
    lines: list[str] = []
    for one in told:
        if not one.count:
            continue
        if not one.found:
            lines += [f"* {one.title}: in none of {one.count} cells."]
            continue
        lines += [f"* {one.title}: in **{len(one.found)} of {one.count}** cells."]
    for one in told:
        if one.found:
            head = ("cell", "STOF", "best peer", "peer / STOF", "peer")
            times = [(time_text(x.stof_us), time_text(x.peer_us)) for x in one.found]
            rows = [
                (loss.cell, *both, f"{loss.ratio:.3f}", loss.peer)
                for loss, both in zip(one.found, times, strict=True)
            ]
            lines += ["", f"**{one.title}**", "", *table(head, rows)]
    return lines


def time_text(us: float) -> str:
    """A time with its unit."""
    if us < 100:
        return f"{us:.2f} us"
    return f"{us / 1e3:.3f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def rows_text(rows: Sequence[Row]) -> str:
    """Dates of rows: the first and the last day."""
    days = sorted({row["date"][:10] for row in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
