"""End to end: a whole model under a BigBird mask, compiled in each way.

The mask reaches SDPA's peers as one 4-D bool tensor, FlexAttention as a block mask inside the
model's attention function, STOF as a rule in its options; in a decoder it is and-ed with causality.
``graph_us`` is the replay of a CUDA graph of the call, which only modes without graphs of their own
allow: the primary time. ``median_us`` is one call of the compiled model with an empty queue (plain
timing, launches included), ``back_to_back_us`` a call in a row of calls. Compiling and tuning stand
apart in ``compile_s``. ``floor_us`` is what the products, the attention and the weights of the
model need at the ceilings of the device.

On a CPU all ways of a cell are compiled first and then called in turns (turns.py); ``detail`` of
STOF's rows says how its calls differ from those of plain torch.compile by Welch's test and a paired
test of rounds (significance.py).
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cell_process
import timing
import torch
import turns
from attention import Paths
from details import stof_detail
from machine import conditions, version_of
from models import model_names, model_work
from results import append_row, log_event, read_rows, say, settled_lines
from roofline import load_ceilings
from torch import Tensor
from ways import Subject, Way, asked, chosen_ways, compile_model, make_subject

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
    for row in settled_lines(args.out):
        done.setdefault(row["cell"], set()).add(row["peer"])
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
    model, shape, *one = args.worker.split("/")
    warming = args.warm_worker is not None
    store = args.caches / (f"warm-store-e2e-{model}-{shape}" if warming else "stof-store")
    if one:
        (way,) = chosen_ways(device, model, shape, one[0])
        connection = cell_process.given_connection()
        assert connection is not None, f"{args.worker} is started by its cell"
        turns.serve(args, way, connection)
        return
    done = {
        row["peer"] for row in read_rows(args.out) if (row["model"], row["cell"]) == (model, shape)
    }
    done |= {row["peer"] for row in settled_lines(args.out) if row["cell"] == args.worker}
    ways = [w for w in chosen_ways(device, model, shape, args.peers) if w.name not in done]
    subject = make_subject(model, shape, device, store, args.seed, answer=not warming)
    facts = {} if warming else _facts(subject, device, args.out)
    if device.type == "cpu" and not warming:
        _call_in_turns(args, ways, subject, facts)
        return
    for way in ways:
        where = (args.out, args.worker, way.name, model)
        peer = "stof" if way.attention == "stof" else way.name
        with timing.own_caches(args.caches, f"e2e-{peer}", subject.setup.store):
            try:
                row = _run_way(asked(way, args), subject, where, device)
            except (
                Exception
            ) as failure:  # one way's failure is a line of the log; the others still run
                if not warming:  # the timed pass meets it again
                    text = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()[-400:]}"
                    log_event(*where, "error", text)
                continue
        if row is not None:
            _append(args, {**facts, **row})


def _append(args: argparse.Namespace, row: dict[str, Any]) -> None:
    append_row(args.out, FIELDS, row)
    say(
        f"  {args.worker:18s} {row['peer']:20s} {row['graph_us'] or row['median_us']:10.1f} us, "
        f"launched {row['median_us']:10.1f} us  (compile {row['compile_s']:.1f} s)"
    )


def _call_in_turns(
    args: argparse.Namespace, ways: Sequence[Way], subject: Subject, facts: dict[str, Any]
) -> None:
    """The rows of a cell on a CPU.

    Plain torch.compile takes its turns too where it has a row already: STOF is tested against it.
    """
    wanted = {way.name for way in ways}
    if ways and turns.PLAIN not in wanted:
        plain = chosen_ways(subject.setup.device, subject.model, subject.shape, turns.PLAIN)
        ways = [*plain, *ways]
    with ExitStack() as held:
        right, errors = [], {}
        for way in ways:
            where = (args.out, args.worker, way.name, subject.model)
            turn = turns.begin(args, way)
            if turn is None:
                continue
            held.callback(turn.close)
            errors[way.name] = _errors(turn.output, subject)
            if _is_right(errors[way.name], subject, where):
                right.append(turn)
            else:
                turn.close()
        for turn, times in zip(right, _timed(args, right, subject.model), strict=True):
            largest, rms = errors[turn.way.name]
            row = {
                "peer": turn.way.name, "graph_us": "", "compile_s": turn.compile_s,
                "max_rel": largest, "rms_rel": rms, **times,
            }  # fmt: skip
            if turn.way.name in wanted:
                _append(args, {**facts, **row})


def _timed(args: argparse.Namespace, right: list[turns.Turn], model: str) -> list[dict[str, Any]]:
    """Times of all that can be called; who fails leaves the list, with a line of the log."""
    while True:
        try:
            return turns.timed(right)
        except turns.TurnFailed as failure:
            where = (args.out, args.worker, failure.turn.way.name, model)
            log_event(*where, "error", failure.reason)
            failure.turn.close()
            right.remove(failure.turn)


def _errors(output: Tensor, subject: Subject) -> tuple[float, float]:
    """The largest and the rms difference from the fp64 model, over its largest and rms value."""
    expected = subject.expected
    assert expected is not None, "only warming has no answer, and it times nothing"
    error = output.double() - expected
    rms = float(error.square().mean().sqrt() / expected.square().mean().sqrt())
    return float(error.abs().max() / expected.abs().max()), rms


def _is_right(
    errors: tuple[float, float], subject: Subject, where: tuple[Path, str, str, str]
) -> bool:
    """Whether rounding explains errors; else a line of the log."""
    largest, rms = errors
    if rms <= MODEL_RMS[subject.setup.cell.torch_dtype]:
        return True
    log_event(*where, "incorrect", f"rms {rms:.3g} max {largest:.3g} against the fp64 model")
    return False


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
    sets, expected = subject.sets, subject.expected
    assert expected is not None, "only warming has no answer, and it times nothing"
    timing.poison(expected.shape, subject.setup.cell.torch_dtype, device)
    errors = _errors(call(*sets[0]), subject)
    if not _is_right(errors, subject, where):
        return None
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
        "max_rel": errors[0],
        "rms_rel": errors[1],
    }


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
