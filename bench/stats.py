"""Summaries of result rows: best peer, ratio per cell, geometric means, worst cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from results import number

Row = dict[str, str]
STOF_PEERS = ("stof", "stof_fn", "stof_block", "stof_fp8")
EXPERT_PEERS = ("flex_expert",)
OPPONENTS: dict[str, tuple[str, ...] | None] = {
    "best peer": None,
    "best flex": ("flex_expert", "flex_split", "flex_default", "flex_flash"),
    "expert flex": EXPERT_PEERS,
    "default flex": ("flex_default",),
    "SDPA + mask": ("sdpa_mask",),
}
# Masks with random tiles (cases.py) under default blocks; others have a formula, and one spelling.
SPELLED = ("bigbird", "random")
SPELLINGS = {"a dense lookup": "b128", "a tile table": "b128_table"}


@dataclass(frozen=True)
class Best:
    """Fastest row of a group."""

    peer: str
    variant: str
    median_us: float
    launch_us: float


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean; NaN for nothing."""
    held = [v for v in values if v > 0 and math.isfinite(v)]
    return math.exp(sum(map(math.log, held)) / len(held)) if held else float("nan")


def best_of(
    rows: Iterable[Row], peers: Sequence[str] | None, time_field: str = "median_us"
) -> Best | None:
    """Fastest row among some peers (None: all but STOF) by a time.

    None where the one that is the fastest by replay does not have it: another would stand in.
    """
    chosen = [
        r
        for r in rows
        if (r["peer"] in peers if peers is not None else r["peer"] not in STOF_PEERS)
    ]
    if not chosen or not min(chosen, key=lambda r: number(r, "median_us")).get(time_field):
        return None
    row = min((r for r in chosen if r.get(time_field)), key=lambda r: number(r, time_field))
    return Best(row["peer"], row["variant"], number(row, time_field), number(row, "launch_us"))


def floor_row(rows: Sequence[Row]) -> Row:
    """The row of a cell whose floors count: STOF's fastest, as they come from the ceilings of the
    run that measured it; the first where it has none.
    """
    ours = [r for r in rows if r["peer"] == "stof"]
    return min(ours, key=lambda r: number(r, "median_us")) if ours else rows[0]


def has_bursts(rows: Iterable[Row]) -> bool:
    """Whether any row was timed in bursts."""
    return any(row.get("burst_us") for row in rows)


def by_cell(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each cell, short cells first."""
    grouped: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: int(r["seq"])):
        grouped.setdefault(row["cell"], []).append(row)
    return grouped


def _ms(best: Best | None) -> str:
    return "-" if best is None else f"{best.median_us / 1e3:.4f}"


def _ratio(other: Best | None, stof: Best | None) -> float:
    return float("nan") if other is None or stof is None else other.median_us / stof.median_us


def attention_summary(rows: Sequence[Row], time_field: str = "median_us") -> str:
    """Short table: per cell the best peer, STOF and their ratio; then means and the worst cell."""
    if not rows:
        return "no rows"
    first = rows[0]
    lines = [
        f"{first['device']} · torch {first['torch']} · triton {first['triton']} · stof "
        f"{first['stof']} · {time_field}, ms",
        f"{'cell':21s} {'dens':>5s} {'SDPA+mask':>9s} {'flex dflt':>9s} {'expert':>9s} "
        f"{'cuDNN':>9s} {'best peer':>9s} {'STOF':>9s} {'ratio':>6s} {'elem%':>5s} {'tile%':>5s} "
        f"{'rms err':>7s} {'MiB':>7s}  best peer's setting / STOF's choice (floors' shares of its "
        "time, its error and memory)",
    ]
    for cell, group in by_cell(rows).items():
        stof = best_of(group, ("stof",), time_field)
        peer = best_of(group, None, time_field)
        shown = [
            best_of(group, peers, time_field)
            for peers in (("sdpa_mask",), ("flex_default",), EXPERT_PEERS, ("cudnn",))
        ]
        ours = [r for r in group if r["peer"] == "stof"]
        fastest = min(ours, key=lambda r: number(r, time_field)) if ours else {}
        took = stof.median_us if stof is not None else math.nan
        floors = floor_row(group)
        shares = [100 * number(floors, f"{f}_floor_us") / took for f in ("element", "tile")]
        setting = f"{peer.peer} {peer.variant}" if peer is not None else "-"
        times = " ".join(f"{_ms(best):>9s}" for best in (*shown, peer, stof))
        lines.append(
            f"{cell:21s} {number(group[0], 'density'):5.3f} {times} {_ratio(peer, stof):6.2f} "
            f"{shares[0]:5.0f} {shares[1]:5.0f} {number(fastest, 'rms_rel'):7.1e} "
            f"{number(fastest, 'peak_bytes') / 2**20:7.0f}  {setting} / "
            f"{fastest.get('detail', 'MISSING')}"
        )
    return "\n".join([*lines, means(rows, time_field)])


def backward_summary(rows: Sequence[Row]) -> str:
    """Per cell forward and backward pass of the best peer and of STOF, and means of the ratios.

    The best of a time is the variant with that shortest time: a peer may have another one for the
    backward pass than for both.
    """
    lines = [
        f"{rows[0]['device']} · torch {rows[0]['torch']} · stof {rows[0]['stof']} · ms: both "
        "passes, and the backward pass alone",
        f"{'cell':21s} {'dens':>5s} {'peer':>8s} {'STOF':>8s} {'ratio':>6s} {'flex':>8s} "
        f"{'peer':>8s} {'STOF':>8s} {'ratio':>6s} {'flex':>8s} {'rms err':>7s}  best peer",
    ]
    for cell, group in by_cell(rows).items():
        shown: list[str] = []
        for field in ("median_us", "backward_us"):
            peer, stof = best_of(group, None, field), best_of(group, ("stof",), field)
            flex = best_of(group, OPPONENTS["best flex"], field)
            shown.append(
                f"{_ms(peer):>8s} {_ms(stof):>8s} {_ratio(peer, stof):6.2f} {_ms(flex):>8s}"
            )
        best = best_of(group, None)
        ours = [number(r, "rms_rel") for r in group if r["peer"] == "stof"]
        lines.append(
            f"{cell:21s} {number(group[0], 'density'):5.3f} {' '.join(shown)} "
            f"{min(ours, default=math.nan):7.1e}  "
            + (f"{best.peer} {best.variant}" if best is not None else "-")
        )
    for field, what in (("median_us", "both passes"), ("backward_us", "backward pass")):
        lines += [f"{what}:", means(rows, field)]
    return "\n".join(lines)


def means(rows: Sequence[Row], time_field: str = "median_us") -> str:
    """STOF against each group of peers: geometric means and the worst cell."""
    against: dict[str, dict[str, float]] = {name: {} for name in OPPONENTS}
    for cell, group in by_cell(rows).items():
        stof = best_of(group, ("stof",), time_field)
        for name, peers in OPPONENTS.items():
            other = best_of(group, peers, time_field)
            if other is not None and stof is not None:
                against[name][cell] = _ratio(other, stof)
    for spelling, variant in SPELLINGS.items():
        ratios, where = spelling_ratios(rows, variant, time_field)
        against[f"default flex with {spelling} (in {where} cells)"] = ratios if where else {}
    return "\n".join(mean_lines(against))


def spelling_ratios(
    rows: Sequence[Row], variant: str, time_field: str = "median_us"
) -> tuple[dict[str, float], int]:
    """STOF against one spelling of default flex per cell; and in how many cells with random
    tiles it is.

    A cell without that spelling counts with its best default row.
    """
    ratios, where = {}, 0
    for cell, group in by_cell(rows).items():
        spelled = [
            r
            for r in group
            if (r["peer"], r["variant"]) == ("flex_default", variant) and r["mask"] in SPELLED
        ]
        stof = best_of(group, ("stof",), time_field)
        other = best_of(spelled or group, ("flex_default",), time_field)
        if stof is not None and other is not None:
            ratios[cell] = _ratio(other, stof)
            where += bool(spelled)
    return ratios, where


def _is_long(cell: str) -> bool:
    return int(cell.split("/")[0].split("x")[1]) >= 2048


def mean_lines(against: dict[str, dict[str, float]]) -> list[str]:
    """Geometric means over all and over long cells, and the worst cell, per opponent."""
    lines = []
    for name, ratios in against.items():
        if not ratios:
            continue
        worst = min(ratios, key=lambda c: ratios[c])
        longer = [v for c, v in ratios.items() if _is_long(c)]
        at_length = f"{geometric_mean(longer):.2f}x at S>=2048, " if longer else ""
        lines.append(
            f"STOF against {name:12s}: geometric mean {geometric_mean(ratios.values()):.2f}x over "
            f"{len(ratios)} cells, {at_length}worst {ratios[worst]:.2f}x in {worst}"
        )
    return lines


def plain_summary(rows: Sequence[Row]) -> str:
    """All rows as aligned columns, without the condition columns, which stand in a first line."""
    hidden = ("device", "torch", "triton", "stof", "date", "transformers")
    fields = [f for f in rows[0] if f not in hidden and any(r[f] for r in rows)]
    widths = [max(len(f), *(len(r[f]) for r in rows)) for f in fields]
    head = " · ".join(f"{f} {rows[0][f]}" for f in hidden[:-2] if rows[0].get(f))
    table = [fields, *([r[f] for f in fields] for r in rows)]
    body = [
        "  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in table
    ]
    return "\n".join([head, *body])
