"""End to end: a whole model under a BigBird mask, compiled in each way.

The mask reaches SDPA's peers as one 4-D bool tensor, FlexAttention as a block mask inside the
model's attention function, STOF as a rule in its options; in a decoder it is and-ed with causality.
``graph_us`` is the replay of a CUDA graph of the call, which only modes without graphs of their own
allow: the primary time. ``median_us`` is one call of the compiled model with an empty queue (plain
timing, launches included), ``back_to_back_us`` a call in a row of calls. Compiling and tuning stand
apart in ``compile_s``. ``floor_us`` is what the products, the attention and the weights of the
model need at the ceilings of the device.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timing
import torch
from attention import Paths, describe_site
from machine import conditions, version_of
from models import model_names, model_work
from results import append_row, log_event, read_rows, say
from roofline import load_ceilings
from torch import Tensor
from ways import Subject, Way, chosen_ways, compile_model, make_subject

FIELDS = (
    "cell", "model", "batch", "seq", "mask", "window", "global_tokens", "dtype", "density", "peer",
    "graph_us", "graph_method", "median_us", "p20_us", "p80_us", "runs", "back_to_back_us",
    "floor_us", "compile_s", "peak_bytes", "max_rel", "rms_rel", "detail",
    "device", "torch", "triton", "transformers", "stof", "date",
)  # fmt: skip
SHAPES = {"cuda": ("1x128", "8x512", "16x2048"), "cpu": ("1x128", "1x512", "1x1024")}
SMOKE_SHAPES = ("1x128", "2x192")
# rms error of a whole model against fp64 that rounding explains
MODEL_RMS = {torch.float16: 1e-2, torch.bfloat16: 8e-2, torch.float32: 1e-4}


def wanted_shapes(args: argparse.Namespace) -> list[str]:
    """``BxS`` of the cells to run."""
    shapes = SMOKE_SHAPES if args.smoke else SHAPES[args.device]
    return args.cells.split(",") if args.cells else list(shapes)


def e2e_units(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Cells with ways missing: (``model/BxS``, how many)."""
    device = torch.device(args.device)
    done: dict[str, set[str]] = {}
    for row in read_rows(args.out):
        done.setdefault(f"{row['model']}/{row['cell']}", set()).add(row["peer"])
    units = []
    for model in model_names(args.model, args.smoke):
        for shape in wanted_shapes(args):
            name = f"{model}/{shape}"
            names = {way.name for way in chosen_ways(device, model, shape, args.peers)}
            left = names - done.get(name, set())
            if left:
                units.append((name, len(left)))
    return units


@torch.no_grad()
def run_e2e(args: argparse.Namespace, device: torch.device) -> None:
    """Compile and measure every way that has no row yet (warming: only compile)."""
    model, shape = args.worker.split("/")
    warming = args.warm_worker is not None
    store = args.caches / (f"warm-store-e2e-{model}-{shape}" if warming else "stof-store")
    subject = make_subject(model, shape, device, store, args.seed, answer=not warming)
    facts = {} if warming else _facts(subject, device, args.out)
    done = {
        row["peer"] for row in read_rows(args.out) if (row["model"], row["cell"]) == (model, shape)
    }
    for way in chosen_ways(device, model, shape, args.peers):
        if way.name in done:
            continue
        where = (args.out, args.worker, way.name, model)
        if way.attention == "stof":
            options = {"tune_budget_s": args.tune_budget, **way.options}
            if args.dump_dir is not None:
                options["dump_dir"] = str(args.dump_dir / f"{model}-{shape}-{way.name}")
            way = replace(way, options=options)
        with timing.own_caches(args.caches, f"e2e-{way.name}", subject.setup.store):
            try:
                row = _run_way(way, subject, where, device)
            except (
                Exception
            ) as failure:  # one way's failure is a line of the log; the others still run
                text = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()[-400:]}"
                log_event(*where, "error", text)
                continue
        if row is None:
            continue
        append_row(args.out, FIELDS, {**facts, **row})
        say(
            f"  {args.worker:18s} {way.name:20s} {row['graph_us'] or row['median_us']:10.1f} us, "
            f"launched {row['median_us']:10.1f} us  (compile {row['compile_s']:.1f} s)"
        )


def _run_way(
    way: Way, subject: Subject, where: tuple[Path, str, str, str], device: torch.device
) -> dict[str, Any] | None:
    """A row of a way, or None when there is nothing to time or the output is wrong."""
    call, compiled = compile_model(way, subject)
    compile_s = timing.first_call(call, subject.sets[0], device)
    if subject.expected is None:
        return None
    row = _measure(call, subject, way, where, device)
    if row is None:
        return None
    detail = stof_detail(compiled) if way.attention == "stof" else ""
    return {**row, "peer": way.name, "compile_s": compile_s, "detail": detail}


def _measure(
    call: Callable[..., Tensor],
    subject: Subject,
    way: Way,
    where: tuple[Path, str, str, str],
    device: torch.device,
) -> dict[str, Any] | None:
    """Timings and errors, or None when the output is wrong."""
    sets, expected, dtype = subject.sets, subject.expected, subject.setup.cell.torch_dtype
    assert expected is not None, "only warming has no answer, and it times nothing"
    timing.poison(expected.shape, dtype, device)
    error = call(*sets[0]).double() - expected
    rms = float(error.square().mean().sqrt() / expected.square().mean().sqrt())
    largest = float(error.abs().max() / expected.abs().max())
    if not rms <= MODEL_RMS[dtype]:
        log_event(*where, "incorrect", f"rms {rms:.3g} max {largest:.3g} against the fp64 model")
        return None
    del error
    peak = timing.peak_bytes(call, sets[0], device)
    plain = timing.launch_time(call, sets, device, budget_s=1.0)
    graph = None
    if not way.has_graphs and device.type == "cuda":
        graph = timing.replay_time(call, sets, device, budget_s=0.5)
    return {
        "graph_us": graph.median_us if graph else "",
        "graph_method": graph.method if graph else "",
        "median_us": plain.median_us,
        "p20_us": plain.p20_us,
        "p80_us": plain.p80_us,
        "runs": plain.runs,
        "back_to_back_us": timing.back_to_back_us(call, sets, device),
        "peak_bytes": peak,
        "max_rel": largest,
        "rms_rel": rms,
    }


SEARCH_NOTES = ("fusion measured", "whole graph", "launched one by one")
"""How notes begin that say what the search had time for, and which form was kept."""


def stof_detail(compiled: Any) -> str:
    """How often each kernel was chosen, the schemes of the chains, and the form that was kept."""
    import stof_compile

    seen = stof_compile.explain(compiled)
    return " | ".join([*_counted(map(describe_site, seen.sites)), *scheme_texts(seen.graphs)])


def scheme_texts(records: Sequence[Any]) -> list[str]:
    """Schemes, packs and verdicts of compiled graphs, in words."""
    texts = []
    for record in records:
        for chain in record.chains:
            names = "+".join(segment.template for segment in chain.segments)
            texts.append(
                f"{chain.count}x scheme {chain.initial}->{chain.code} {names} ({chain.source})"
            )
        for pack in record.packs:
            texts.append(f"{pack.count}x {'packed' if pack.packed else 'apart'} {pack.sizes}")
        texts += [note for note in record.notes if note.startswith(SEARCH_NOTES)]
    return texts


def _counted(texts: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    return [f"{n}x {text}" for text, n in counts.items()] or ["no site"]


def _facts(subject: Subject, device: torch.device, out: Path) -> dict[str, Any]:
    cell, keep = subject.setup.cell, subject.setup.dense
    work = model_work(subject.model, cell.batch, subject.seq, keep, cell.torch_dtype)
    columns = cell.columns()
    kept = ("batch", "seq", "mask", "window", "global_tokens", "dtype")
    return {
        "cell": subject.shape,
        "model": subject.model,
        "density": float(keep.double().mean()),
        "floor_us": load_ceilings(Paths(out, out).ceilings, device).model_floor_us(work),
        **{name: columns[name] for name in kept},
        **conditions(device),
        "transformers": version_of("transformers"),
    }
