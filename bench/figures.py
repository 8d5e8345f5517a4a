"""The figures: each function draws one into a matplotlib figure from the rows of a group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from e2e_stats import cells, compare, launched, replayed
from gather import Group
from results import number
from stats import OPPONENTS, best_of, by_cell, floor_row
from tables import ABLATION, PAPER_TUNING_S, bookkeeping_percent

SHOWN = {
    "SDPA + mask": ("sdpa_mask",),
    "FlexAttention, default": ("flex_default",),
    "FlexAttention, expert": OPPONENTS["best flex"],
    "cuDNN, flash, FA4": ("cudnn", "sdpa_causal", "sdpa_dense", "fa4"),
    "STOF": ("stof",),
}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


def bars(
    axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float]], label: str
) -> None:
    """Bars of several series side by side; what is not finite is left out."""
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        at = [i + (index + 0.5) * width for i, v in enumerate(values) if math.isfinite(v)]
        if at:
            axes.bar(at, [v for v in values if math.isfinite(v)], width, label=name)
        else:
            axes.text(0.5, 0.6, f"missing: {name}", ha="center", transform=axes.transAxes)
    axes.set_xticks([i + 0.4 for i in range(len(names))], names, rotation=60, ha="right",
                    fontsize="small")  # fmt: skip
    axes.set_xlim(-0.2, max(1, len(names)))
    axes.set_ylabel(label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def attention_bars(figure: Any, group: Group) -> None:
    """Time over the tile floor of each cell; lower is better, 1 is the floor."""
    held = by_cell(group.rows)
    figure.set_size_inches(max(8.0, 0.6 * len(held)), 5.0)
    axes = figure.subplots()
    series: dict[str, list[float]] = {}
    for label, peers in SHOWN.items():
        best = [best_of(rows, peers) for rows in held.values()]
        floors = [number(floor_row(rows), "tile_floor_us") for rows in held.values()]
        if any(best):
            series[label] = [
                b.median_us / floor if b else math.nan
                for b, floor in zip(best, floors, strict=True)
            ]
    bars(axes, list(held), series, "time over the tile floor")
    axes.set_yscale("log")
    axes.axhline(1.0, color="black", linewidth=0.8)


def roofline(figure: Any, group: Group) -> None:
    """Useful operations per second over operations per byte, below the ceilings of the device."""
    from roofline import read_ceilings

    figure.set_size_inches(8.0, 5.0)
    axes = figure.subplots()
    for label, peers in {"best peer": None, "STOF": ("stof",)}.items():
        points = []
        for rows in by_cell(group.rows).values():
            best = best_of(rows, peers)
            if best is not None:
                flop, moved = work_of(rows[0])
                points.append((flop / moved, flop / best.median_us / 1e6))
        axes.scatter(*zip(*points, strict=True), label=label, s=18) if points else None
    ceilings = read_ceilings(group.files[0].with_name(f"{group.files[0].stem}.ceilings.json"))
    if ceilings is not None:
        low, high = axes.get_xlim()[0], max(axes.get_xlim()[1], 1000.0)
        dims = sorted({row["head_dim"] for row in group.rows}, key=int)
        dtype = group.rows[0]["dtype"]  # the half types have one rate
        for dim in dims:
            rate = ceilings.rate(int(dim), dtype) / 1e12
            over = [max(low, 1.0) * (high / max(low, 1.0)) ** (i / 60) for i in range(61)]
            roof = [min(rate, ceilings.copy_tb_s * x) for x in over]
            axes.plot(over, roof, linewidth=0.9, label=f"ceiling, D={dim}: {rate:.3g} TFLOP/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations of kept elements per byte of Q, K, V and output")
    axes.set_ylabel("TFLOP/s of kept elements")
    axes.legend(fontsize="small")


def work_of(row: Mapping[str, str]) -> tuple[float, float]:
    """Operations of the kept elements, and bytes of Q, K, V and the output."""
    batch, heads, seq, dim = (int(row[n]) for n in ("batch", "heads", "seq", "head_dim"))
    flop = 4.0 * batch * heads * seq * seq * dim * float(row["density"])
    return flop, 4.0 * batch * heads * seq * dim * ITEMSIZE[row["dtype"]]


def models(figure: Any, group: Group) -> None:
    """How much faster than the best torch.compile mode the others are."""
    found = compare(group.rows, replayed)
    figure.set_size_inches(max(7.0, 0.7 * len(found)), 4.5)
    base = {c.cell: c.peers["torch.compile"] for c in found}
    series = {
        "expert flex": [base[c.cell] / c.peers["expert flex"] for c in found],
        "STOF": [base[c.cell] / c.stof for c in found],
    }
    if group.on_gpu:
        series["STOF, launches included"] = [
            c.ratio("torch.compile") for c in compare(group.rows, launched)
        ]
    axes = figure.subplots()
    bars(axes, [c.cell for c in found], series, "times as fast as torch.compile")
    axes.axhline(1.0, color="black", linewidth=0.8)


def ablation(figure: Any, group: Group) -> None:
    """The same with parts of STOF switched off, over torch.compile in its default mode."""
    held = {
        cell: {r["peer"]: replayed(r) for r in rows} for cell, rows in cells(group.rows).items()
    }
    held = {cell: times for cell, times in held.items() if any(name in times for name in ABLATION)}
    figure.set_size_inches(max(7.0, 0.9 * len(held)), 4.5)
    ways = {**ABLATION, "stof-default": "all of STOF"}
    series = {
        label: [
            times.get("compile-default", math.nan) / times.get(way, math.nan)
            for times in held.values()
        ]
        for way, label in ways.items()
    }
    axes = figure.subplots()
    bars(axes, list(held), series, "times as fast as torch.compile")
    axes.axhline(1.0, color="black", linewidth=0.8)


def tuning(figure: Any, group: Group) -> None:
    """Table 4: seconds of tuning, with the paper's where it has the cell."""
    rows = group.rows
    figure.set_size_inches(max(6.0, 0.6 * len(rows)), 4.5)
    series = {"STOF": [number(r, "tuning_s") for r in rows]}
    paper = [PAPER_TUNING_S.get((r["model"], r["cell"]), math.nan) for r in rows]
    if any(math.isfinite(s) for s in paper):
        series["the paper's STOF, A100"] = paper
    bars(figure.subplots(), _cells(group), series, "seconds of tuning")


def bookkeeping(figure: Any, group: Group) -> None:
    """Figure 13: what of the seconds is neither compiling nor timing candidates."""
    figure.set_size_inches(max(6.0, 0.6 * len(group.rows)), 4.5)
    series = {
        "of all tuning": [bookkeeping_percent(r) for r in group.rows],
        "of fusion's seconds": [number(r, "bookkeeping_percent") for r in group.rows],
    }
    axes = figure.subplots()
    bars(axes, _cells(group), series, "per cent")
    axes.axhline(3.0, color="black", linewidth=0.8, linestyle="--")


def operators(figure: Any, group: Group) -> None:
    """Figures 3 and 4: apart = 1, and settings taken over = 1."""
    rows = group.rows
    figure.set_size_inches(max(9.0, 0.8 * len(rows)), 5.0)
    left, right = figure.subplots(1, 2)
    us = {n: [number(r, f"{n}_us") for r in rows]
          for n in ("detached", "inductor", "fused", "before")}  # fmt: skip
    names = [r["cell"] for r in rows]
    series = {
        label: [a / b for a, b in zip(us["detached"], us[n], strict=True)]
        for n, label in (("inductor", "Inductor"), ("fused", "fused by STOF"))
    }
    bars(left, names, series, "times as fast as operations apart")
    after = [a / b for a, b in zip(us["before"], us["fused"], strict=True)]
    bars(right, names, {"tuned after fusion": after}, "times as fast as settings of before")
    for axes in (left, right):
        axes.axhline(1.0, color="black", linewidth=0.8)


def passes(figure: Any, group: Group) -> None:
    """Speedups with their standard errors; filled where they are significant."""
    rows = [r for r in group.rows if r["speedup"]]
    figure.set_size_inches(max(6.0, 0.8 * len(rows)), 4.5)
    axes = figure.subplots()
    base = {(r["model"], r["cell"]): r for r in group.rows if r["pipeline"] == "baseline"}
    for place, row in enumerate(rows):
        own = _relative_error(row) ** 2 + _relative_error(base[row["model"], row["cell"]]) ** 2
        gain = number(row, "speedup")
        color = {"win": "tab:green", "loss": "tab:red"}.get(row["verdict"], "tab:gray")
        axes.bar(place, gain - 1.0, 0.7, bottom=1.0, color=color,
                 yerr=1.96 * gain * math.sqrt(own), capsize=3)  # fmt: skip
    names = [f"{r['model']} {r['pipeline']}" for r in rows]
    axes.set_xticks(range(len(rows)), names, rotation=60, ha="right", fontsize="small")
    axes.set_ylabel("times as fast (green: win, red: loss)")
    axes.axhline(1.0, color="black", linewidth=0.8)


def compiling(figure: Any, group: Group) -> None:
    """Seconds to compile with stored choices."""
    figure.set_size_inches(6.0, 4.0)
    series = {
        "torch.compile": [number(r, "compile_s") for r in group.rows],
        "STOF": [number(r, "stof_s") for r in group.rows],
    }
    bars(figure.subplots(), _cells(group), series, "seconds")


def masks(figure: Any, group: Group) -> None:
    """Milliseconds of the steps over long masks."""
    figure.set_size_inches(6.0, 4.0)
    series = {"median": [number(r, "median_ms") for r in group.rows]}
    axes = figure.subplots()
    bars(axes, [r["cell"] for r in group.rows], series, f"ms at {group.rows[0]['seq']} tokens")
    axes.set_yscale("log")


def density(figure: Any, group: Group) -> None:
    """Table 2: sparsity beside the paper's."""
    figure.set_size_inches(6.0, 4.0)
    series = {
        "STOF's rules": [number(r, "sparsity_percent") for r in group.rows],
        "the paper": [number(r, "paper_percent") for r in group.rows],
    }
    axes = figure.subplots()
    bars(axes, [r["cell"] for r in group.rows], series, "per cent of elements that are masked")
    axes.set_ylim(0, 100)


def _relative_error(row: Mapping[str, str]) -> float:
    return (
        number(dict(row), "sd_us") / number(dict(row), "mean_us") / math.sqrt(int(row["samples"]))
    )


def _cells(group: Group) -> list[str]:
    return [f"{r['model']} {r['cell']}" for r in group.rows]
