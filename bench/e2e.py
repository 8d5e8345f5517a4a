"""End to end: a whole model under a BigBird mask, compiled in each way.

The mask reaches SDPA's peers as one 4-D bool tensor, FlexAttention as a block mask inside the
model's attention function, STOF as a rule in its options; in a decoder it is and-ed with causality.
``graph_us`` is the replay of a CUDA graph of the call, which only modes without graphs of their own
allow: the primary time. ``median_us`` is one call of the compiled model with an empty queue (plain
timing, launches included), ``back_to_back_us`` a call in a row of calls. Compiling and tuning stand
apart in ``compile_s``. ``floor_us`` is what the products, the attention and the weights of the
model need at the ceilings of the device.

On a CPU, which other programs disturb for seconds at a time, all ways of a cell are compiled first
and then called in turns; ``detail`` of STOF's rows says how the calls differ from those of plain
torch.compile (Welch's test and a paired test of rounds, ``significance.py``).
"""

from __future__ import annotations

import argparse
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import significance
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
PLAIN = "compile-default"
TURNS_S = 15.0  # of calls in turns, for each way


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
    in_turns = device.type == "cpu" and not warming
    if in_turns:
        torch._dynamo.config.recompile_limit = 64  # all ways compile the same code objects
    compiled: list[Compiled] = []
    for way in chosen_ways(device, model, shape, args.peers):
        if way.name in done:
            continue
        if way.attention == "stof":
            options = {"tune_budget_s": args.tune_budget, **way.options}
            if args.dump_dir is not None:
                options["dump_dir"] = str(args.dump_dir / f"{model}-{shape}-{way.name}")
            way = replace(way, options=options)
        caches = timing.own_caches(
            args.caches, f"e2e-{way.name}", subject.setup.store, reset=not in_turns
        )
        with caches, _one_way(args.out, args.worker, way.name, model):
            ready = _compiled(way, subject, device)
            if subject.expected is None or not _is_right(ready, subject, args.out, device):
                continue
            if in_turns:
                compiled.append(ready)
            else:
                _append(args, facts, _measure(ready, subject, device))
    for row in _in_turns(compiled, subject, device):
        _append(args, facts, row)


@dataclass
class Compiled:
    """A way after its first call.

    Args:
        model: what torch.compile returned. compile_s: seconds of that call. errors: largest and
            rms difference from the fp64 model, over the largest and rms value of it.
    """

    way: Way
    call: Callable[..., Tensor]
    model: Any
    compile_s: float
    errors: tuple[float, float] = (math.nan, math.nan)

    def columns(self) -> dict[str, Any]:
        """What its row says beside times."""
        largest, rms = self.errors
        detail = stof_detail(self.model) if self.way.attention == "stof" else ""
        return {
            "peer": self.way.name, "compile_s": self.compile_s, "max_rel": largest, "rms_rel": rms,
            "detail": detail,
        }  # fmt: skip


@contextmanager
def _one_way(*where: Any) -> Iterator[None]:
    """One way's failure is a line of the log; the others still run."""
    try:
        yield
    except Exception as failure:
        text = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()[-400:]}"
        log_event(*where, "error", text)


def _compiled(way: Way, subject: Subject, device: torch.device) -> Compiled:
    call, model = compile_model(way, subject)
    return Compiled(way, call, model, timing.first_call(call, subject.sets[0], device))


def _is_right(ready: Compiled, subject: Subject, out: Path, device: torch.device) -> bool:
    """Note the errors of a way; a line of the log where they are not those of rounding."""
    expected, dtype = subject.expected, subject.setup.cell.torch_dtype
    assert expected is not None, "only warming has no answer, and it times nothing"
    timing.poison(expected.shape, dtype, device)
    error = ready.call(*subject.sets[0]).double() - expected
    rms = float(error.square().mean().sqrt() / expected.square().mean().sqrt())
    ready.errors = (float(error.abs().max() / expected.abs().max()), rms)
    if rms <= MODEL_RMS[dtype]:
        return True
    text = f"rms {rms:.3g} max {ready.errors[0]:.3g} against the fp64 model"
    name = f"{subject.model}/{subject.shape}"
    log_event(out, name, ready.way.name, subject.model, "incorrect", text)
    return False


def _append(args: argparse.Namespace, facts: dict[str, Any], row: dict[str, Any]) -> None:
    append_row(args.out, FIELDS, {**facts, **row})
    say(
        f"  {args.worker:18s} {row['peer']:20s} {row['graph_us'] or row['median_us']:10.1f} us, "
        f"launched {row['median_us']:10.1f} us  (compile {row['compile_s']:.1f} s)"
    )


def _measure(ready: Compiled, subject: Subject, device: torch.device) -> dict[str, Any]:
    """The row of one way by itself."""
    call, sets = ready.call, subject.sets
    peak = timing.peak_bytes(call, sets[0], device)
    plain = timing.launch_time(call, sets, device, budget_s=1.0)
    graph = None
    if not ready.way.has_graphs and device.type == "cuda":
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
        **ready.columns(),
    }


def _in_turns(
    compiled: Sequence[Compiled], subject: Subject, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The rows of ways that are called in turns, on a CPU."""
    rounds = timing.rounds_of([c.call for c in compiled], subject.sets, TURNS_S * len(compiled))
    taken = {c.way.name: found for c, found in zip(compiled, rounds, strict=True)}
    for ready in compiled:
        found = timing.summary_of([us for one in taken[ready.way.name] for us in one])
        columns = ready.columns()
        if ready.way.attention == "stof" and PLAIN in taken:
            columns["detail"] += f" | {_against_plain(taken[PLAIN], taken[ready.way.name])}"
        yield {
            "graph_us": "",
            "graph_method": "",
            "median_us": found.median_us,
            "p20_us": found.p20_us,
            "p80_us": found.p80_us,
            "runs": found.runs,
            "back_to_back_us": "",
            "peak_bytes": "",
            **columns,
        }


def _against_plain(plain: list[list[float]], ours: list[list[float]]) -> str:
    """How STOF's calls differ from plain torch.compile's, made in turns with them."""
    found = significance.difference(plain, ours, significance.scipy_stats())
    return (
        f"{found.speedup:.3f}x {PLAIN}: {significance.verdict(found, found.p)} (Welch p "
        f"{found.p:.2g}, paired p {found.round_p:.2g}, {len(ours)} rounds)"
    )


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
