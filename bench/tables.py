"""Tables of result rows in Markdown, one function for each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from e2e_stats import cells, compare, launched, replayed
from gather import Group
from results import number
from stats import (
    OPPONENTS,
    Row,
    best_of,
    by_cell,
    floor_row,
    geometric_mean,
    has_bursts,
    means,
)

# Table 4 of the paper: seconds of STOF's own tuning on an A100 (specs/01, section 10)
PAPER_TUNING_S = {
    ("bert-base", "1x128"): 23.3, ("bert-base", "8x512"): 40.9, ("bert-base", "16x2048"): 99.6,
    ("bert-large", "1x128"): 22.6, ("bert-large", "8x512"): 55.0, ("bert-large", "16x2048"): 225.3,
    ("gpt2", "1x128"): 23.8, ("gpt2", "8x512"): 40.9, ("gpt2", "16x2048"): 122.2,
    ("t5-base", "1x128"): 43.1, ("t5-base", "8x512"): 80.3, ("t5-base", "16x2048"): 388.3,
    ("vit-base", "1x128"): 93.9, ("vit-base", "8x512"): 99.3, ("vit-base", "16x2048"): 412.8,
}  # fmt: skip
ABLATION = {
    "stof-attention": "attention only",
    "stof-fusion": "fusion only",
    "stof-broken-mha": "attention as operators",
}


def density_table(group: Group) -> list[str]:
    """Sparsity of the masks beside the paper's figures."""
    rows = [
        (r["cell"], f"{number(r, 'sparsity_percent'):.2f} %", f"{number(r, 'paper_percent'):.1f} %")
        for r in group.rows
    ]
    return table(("mask", "sparsity", "in the paper"), rows)


def attention_table(group: Group) -> list[str]:
    """Milliseconds of the peers at their best and of STOF."""
    shapes = {(r["heads"], r["head_dim"], r["dtype"]) for r in group.rows}
    bursts = has_bursts(group.rows)
    rows = []
    for cell, held in by_cell(group.rows).items():
        stof, peer = best_of(held, ("stof",)), best_of(held, None)
        groups = (
            ("sdpa_mask",),
            ("flex_default",),
            OPPONENTS["best flex"],
            ("cudnn", "sdpa_causal", "sdpa_dense", "fa4"),
        )
        shown = [best_of(held, peers) for peers in groups]
        times = [_ms(b.median_us) if b else "-" for b in (*shown, peer, stof)]
        ours = [r for r in held if r["peer"] == "stof"]
        fastest = min(ours, key=lambda r: number(r, "median_us")) if ours else None
        graph = peer.median_us / stof.median_us if stof and peer else math.nan
        launch = _gain(held, "launch_us")
        burst = _gain(held, "burst_us")
        first = floor_row(held)
        floors = [100 * number(first, f) / stof.median_us if stof else math.nan
                  for f in ("element_floor_us", "tile_floor_us")]  # fmt: skip
        extra = () if len(shapes) == 1 else (f"{first['heads']}x{first['head_dim']}",)
        peak = number(fastest, "peak_bytes") / 2**20 if fastest else math.nan
        rows.append((
            cell, *extra, f"{number(first, 'density'):.3f}", *times, _plain(graph, 2),
            *([_plain(launch, 2)] if group.on_gpu else []), *([_plain(burst, 2)] if bursts else []),
            *(_plain(f, 0) for f in floors),
            f"{number(fastest, 'rms_rel'):.1e}" if fastest else "-",
            *([_plain(peak, 0)] if group.on_gpu else []),
        ))  # fmt: skip
    head = (
        "cell", *(() if len(shapes) == 1 else ("heads x D",)), "density", "SDPA + mask",
        "flex default", "best flex", "cuDNN, flash, FA4", "best peer", "STOF", "best / STOF",
        *(("with launches",) if group.on_gpu else ()), *(("in bursts",) if bursts else ()),
        "element floor %", "tile floor %", "rms error", *(("MiB",) if group.on_gpu else ()),
    )  # fmt: skip
    heads, dim, dtype = next(iter(shapes))
    same = f"{heads} heads of {dim}, {dtype}; " if len(shapes) == 1 else ""
    note = f"{same}ms. The floors are shares of STOF's time"
    note += "; *MiB* is what one call of STOF takes beyond its inputs." if group.on_gpu else "."
    text = [note, "", *table(head, rows), "", *_code(means(group.rows))]
    if group.on_gpu:
        text += ["", "Launches included:", "", *_code(means(group.rows, "launch_us"))]
    if bursts:
        about = "In bursts of 20 to 30 ms behind pauses, where the fastest peer was timed so, too:"
        text += ["", about, "", *_code(means(group.rows, "burst_us"))]
    return text


def _gain(rows: Sequence[Row], time_field: str) -> float:
    """A time of the best peer over STOF's; NaN where one is missing."""
    peer, stof = best_of(rows, None, time_field), best_of(rows, ("stof",), time_field)
    return peer.median_us / stof.median_us if peer and stof else math.nan


def models_table(group: Group) -> list[str]:
    """Milliseconds of whole models and STOF's gain over each group of peers."""
    by_launch = {c.cell: c for c in compare(group.rows, launched)}
    errors = {cell: _worst_error(rows) for cell, rows in cells(group.rows).items()}
    rows = []
    ratios: dict[str, list[float]] = {}
    for c in compare(group.rows, replayed):
        for name in c.peers:
            ratios.setdefault(name, []).append(c.ratio(name))
        both = [_ms(c.peers[name]) for name in c.peers]
        gains = [_plain(c.ratio(name), 2) for name in c.peers]
        rows.append((
            c.cell, *both, _ms(c.stof), *gains,
            *([_plain(by_launch[c.cell].best_ratio, 2)] if group.on_gpu else []),
            _plain(100 * c.floor_us / c.stof, 0), errors[c.cell],
        ))  # fmt: skip
    head = (
        "cell", "torch.compile", "expert flex", "STOF", "torch.compile / STOF", "flex / STOF",
        *(("best / STOF, with launches",) if group.on_gpu else ()), "floor %", "rms error",
    )  # fmt: skip
    lines = table(head, rows)
    lines.append("")
    for name, found in ratios.items():
        held = [r for r in found if math.isfinite(r)]
        if held:
            lines.append(
                f"* against {name}: geometric mean {geometric_mean(held):.2f}x over {len(held)} "
                f"cells, worst {min(held):.2f}x"
            )
    return lines


def backward_table(group: Group) -> list[str]:
    """Milliseconds of both passes and of the backward pass alone, peers at their best in each."""
    rows = []
    for cell, held in by_cell(group.rows).items():
        ours = [r for r in held if r["peer"] == "stof"]
        columns: list[str] = []
        for field in ("median_us", "backward_us"):
            best = [
                best_of(held, peers, field)
                for peers in (("sdpa_mask",), OPPONENTS["best flex"], None, ("stof",))
            ]
            columns += [_ms(b.median_us) if b else "-" for b in best]
            peer, stof = best[2:]
            columns.append(
                _plain(peer.median_us / stof.median_us if peer and stof else math.nan, 2)
            )
        errors = [number(r, "rms_rel") for r in ours]
        rows.append((
            cell, f"{number(held[0], 'density'):.3f}", *columns,
            f"{min(errors):.1e}" if errors else "-",
        ))  # fmt: skip
    times = ("SDPA + mask", "best flex", "best peer", "STOF", "best / STOF")
    head = ("cell", "density", *times, *(f"backward: {name}" for name in times), "rms error")
    lines = ["ms; what is best may be another setting in either time.", "", *table(head, rows)]
    for field, what in (("median_us", "Both passes"), ("backward_us", "The backward pass")):
        lines += ["", f"{what}:", "", *_code(means(group.rows, field))]
    return lines


def has_ablation(rows: Iterable[Row]) -> bool:
    """Whether rows have a way with a part of STOF switched off."""
    return any(row["peer"] in ABLATION for row in rows)


def ablation_table(group: Group) -> list[str]:
    """Gain over torch.compile in its default mode with parts of STOF switched off."""
    rows = []
    for cell, held in cells(group.rows).items():
        times = {r["peer"]: replayed(r) for r in held}
        base = times.get("compile-default", math.nan)
        if not any(name in times for name in ABLATION):
            continue
        gains = [base / times.get(name, math.nan) for name in (*ABLATION, "stof-default")]
        rows.append((cell, _ms(base), *(_plain(gain, 2) for gain in gains)))
    head = ("cell", "torch.compile, ms", *ABLATION.values(), "all of STOF")
    return ["Columns after the first are gains over it.", "", *table(head, rows)]


def bookkeeping_percent(row: Row) -> float:
    """Bookkeeping as a share of all tuning; the column of this name is its share of fusion's."""
    return 100 * number(row, "bookkeeping_s") / number(row, "tuning_s")


def tuning_table(group: Group) -> list[str]:
    """Seconds of tuning and of what comes with it."""
    rows = []
    for r in group.rows:
        shares = _plain(bookkeeping_percent(r), 1), _plain(number(r, "bookkeeping_percent"), 1)
        paper = PAPER_TUNING_S.get((r["model"], r["cell"]))
        rows.append((
            r["model"], r["cell"], f"{number(r, 'tuning_s'):.1f}", f"{paper}" if paper else "-",
            _plain(number(r, "budget_s"), 0), r["trials"], *shares,
            f"{number(r, 'cold_s'):.1f}", f"{number(r, 'plain_cold_s'):.1f}",
            f"{number(r, 'warm_extra_s'):+.2f}", _plain(number(r, "gain"), 2),
        ))  # fmt: skip
    head = (
        "model", "cell", "tuning s", "paper, A100", "budget s", "trials", "bookkeeping, %",
        "% of fusion's", "first call s", "torch.compile's", "second process, extra s",
        "gain of the search",
    )  # fmt: skip
    return table(head, rows)


def overhead_table(group: Group) -> list[str]:
    """Seconds of compiling with STOF's choices stored."""
    rows = [
        (r["model"], r["cell"], f"{number(r, 'compile_s'):.2f}", f"{number(r, 'stof_s'):.2f}",
         f"{number(r, 'overhead_percent'):+.1f} %")
        for r in group.rows
    ]  # fmt: skip
    return table(("model", "caches", "torch.compile s", "STOF s", "overhead"), rows)


def operators_table(group: Group) -> list[str]:
    """Figures 3 and 4 in numbers."""
    rows = []
    for r in group.rows:
        us = {n: number(r, f"{n}_us") for n in ("detached", "inductor", "fused", "before")}
        chosen = r["fused_template"] or "-"
        rows.append((
            r["cell"], *(_plain(us[n], 2) for n in ("detached", "inductor", "fused")),
            _plain(us["detached"] / us["fused"], 2), _plain(us["inductor"] / us["fused"], 2),
            _plain(us["before"], 2), _plain(us["before"] / us["fused"], 2), chosen,
            *(r.get(f"{name}_tried") or "-" for name in ("fused", "single")),
            f"{number(r, 'fused_rel'):.1e}" if r.get("fused_rel") else "-",
            f"{number(r, 'inductor_rel'):.1e}" if r.get("inductor_rel") else "-",
        ))  # fmt: skip
    head = (
        "operator/size", "apart us", "Inductor us", "fused us", "apart / fused", "Inductor / fused",
        "settings of before us", "before / after", "template", "tried fused", "tried before",
        "max error", "Inductor's",
    )  # fmt: skip
    return table(head, rows)


def passes_table(group: Group) -> list[str]:
    """Graph Surgeon's table."""
    rows = []
    for r in group.rows:
        tested = bool(r["p_holm"])
        rows.append((
            f"{r['model']} {r['cell']}", r["pipeline"], r["changes"] or "-",
            f"{number(r, 'mean_us'):.1f}" if r["mean_us"] else "-",
            f"{number(r, 'sd_us'):.1f}" if r["sd_us"] else "-",
            _plain(number(r, "speedup"), 3), f"{number(r, 't'):.2f}" if tested else "-",
            _plain(number(r, "dof"), 0), f"{number(r, 'p_holm'):.2g}" if tested else "-",
            f"{number(r, 'round_p'):.2g}" if tested else "-", _plain(number(r, "effect_d"), 2),
            r["verdict"] or "-", f"{number(r, 'rms_rel'):.1e}",
        ))  # fmt: skip
    head = (
        "model", "pipeline", "places", "mean us", "sd", "speedup", "Welch t", "dof", "p (Holm)",
        "p of rounds", "Cohen's d", "verdict", "rms error",
    )  # fmt: skip
    first = next((r for r in group.rows if r["samples"]), None)
    note = f"dtype {group.rows[0]['dtype']}"
    if first is not None:
        note += f"; {first['samples']} samples in {first['rounds']} rounds, {first['method']}"
    by = sorted({r["tested_by"] for r in group.rows if r.get("tested_by")})
    note += f"; tested by {', '.join(by)}" if by else ""
    return [f"{note}.", "", *table(head, rows)]


def mask_table(group: Group) -> list[str]:
    """Building of long block masks, and attention over one."""
    rows = [
        (
            r["cell"], r["seq"], f"{number(r, 'median_ms'):.2f}", f"{number(r, 'first_ms'):.0f}",
            f"{number(r, 'kept_bytes') / 1e3:,.0f}", f"{int(number(r, 'tiles_kept')):,}",
            f"{number(r, 'peak_bytes') / 1e6:,.0f}" if r["peak_bytes"] else "-",
            f"{number(r, 'rms_rel'):.1e}" if r["rms_rel"] else "-",
        )
        for r in group.rows
    ]  # fmt: skip
    head = ("step", "tokens", "ms", "first ms", "block mask kB", "tiles", "peak MB", "rms error")
    return table(head, rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _code(text: str) -> list[str]:
    return ["```text", *text.splitlines(), "```"]


def _worst_error(rows: Sequence[Row]) -> str:
    ours = (r for r in rows if r["peer"].startswith("stof") and r["peer"] != "stof_fp8")
    errors = [number(r, "rms_rel") for r in ours]
    return f"{max(errors):.1e}" if errors else "-"


def _ms(us: float) -> str:
    return f"{us / 1e3:.4f}" if us < 1e4 else f"{us / 1e3:.3f}" if math.isfinite(us) else "-"


def _plain(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
