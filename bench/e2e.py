"""End to end: a whole model under a BigBird mask, compiled in each way.

The mask reaches SDPA's peers as one 4-D bool tensor, FlexAttention as a block mask inside the
model's attention function, STOF as a rule in its options; in a decoder it is and-ed with causality.
``graph_us`` is the replay of a CUDA graph of the call, which only modes without graphs of their own
allow: the primary time. ``median_us`` is one call of the compiled model with an empty queue (plain
timing, launches included), ``back_to_back_us`` a call in a row of calls. Compiling and tuning stand
apart in ``compile_s``. ``floor_us`` is what the products, the attention and the weights of the
model need at the ceilings of the device.

All ways of a cell are compiled first and then called in turns (turns.py); ``detail`` of STOF's rows
says how its calls differ from those of plain torch.compile by Welch's test and a paired test of
rounds (significance.py).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cell_process
import timing
import torch
import turns
from attention import Paths
from machine import conditions, version_of
from models import model_names, model_work
from results import append_row, log_event, read_rows, say, settled_lines, usual_dtype
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
    wanted = args.dtype or usual_dtype(device.type == "cuda")
    for row in read_rows(args.out):
        if row["dtype"] != wanted:
            raise SystemExit(
                f"{args.out} has rows of {row['dtype']}, asked for is {wanted}: name another --out"
            )
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
    clock = _Clock(args)
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
    if not warming:
        turns.ready()
    given = {"answer": not warming, "dtype": args.dtype}
    subject = make_subject(model, shape, device, store, args.seed, **given)
    if warming:
        _warm(args, ways, subject)
    else:
        _call_in_turns(args, ways, subject, _facts(subject, device, args.out), clock)


def _warm(args: argparse.Namespace, ways: Sequence[Way], subject: Subject) -> None:
    """Compile ways, so that the timed processes find the compilers' caches filled."""
    for way in ways:
        peer = "stof" if way.attention == "stof" else way.name
        # what fails fails again in the timed pass, which says so
        with (
            timing.own_caches(args.caches, f"e2e-{peer}", subject.setup.store),
            contextlib.suppress(Exception),
        ):
            call, _ = compile_model(asked(way, args), subject)
            timing.first_call(call, subject.sets[0], subject.setup.device)


def _append(args: argparse.Namespace, row: dict[str, Any]) -> None:
    append_row(args.out, FIELDS, row)
    say(
        f"  {args.worker:18s} {row['peer']:20s} {row['graph_us'] or row['median_us']:10.1f} us, "
        f"launched {row['median_us']:10.1f} us  (compile {row['compile_s']:.1f} s)"
    )


def _call_in_turns(
    args: argparse.Namespace,
    ways: Sequence[Way],
    subject: Subject,
    facts: dict[str, Any],
    clock: _Clock,
) -> None:
    """The rows of a cell.

    Plain torch.compile takes its turns too where it has a row already: STOF is tested against it.
    """
    wanted = {way.name for way in ways}
    if turns.PLAIN not in wanted and any(way.attention == "stof" for way in ways):
        plain = chosen_ways(subject.setup.device, subject.model, subject.shape, turns.PLAIN)
        ways = [*plain, *ways]
    if subject.setup.device.type == "cuda":
        torch.cuda.empty_cache()  # the processes of the ways need it
    with ExitStack() as held:
        processes = turns.begin(args, ways)
        for process in processes:
            held.callback(process.close)
        if args.compile_together:
            processes = turns.compile_together(args, processes)
        right, errors = [], {}
        for process in processes:
            where = (args.out, args.worker, process.way.name, subject.model)
            waits = process.compile_s is None
            if right and waits and not clock.leaves_time(process.way, len(right) + 1):
                log_event(*where, "note", "not compiled: its cell's seconds were nearly spent")
                continue
            turn = clock.compiled(process)
            if turn is None:
                continue
            errors[turn.way.name] = _errors(turn.output, subject)
            if _is_right(errors[turn.way.name], subject, where):
                right.append(turn)
            else:
                turn.close()
        for turn, times in zip(right, _timed(args, right, subject.model, clock), strict=True):
            largest, rms = errors[turn.way.name]
            row = {
                "peer": turn.way.name, "compile_s": turn.compile_s, "max_rel": largest,
                "rms_rel": rms, **times,
            }  # fmt: skip
            if turn.way.name in wanted:
                _append(args, {**facts, **row})


class _Clock:
    """The seconds of a cell, whose rows are lost where its process is ended before its end."""

    SPARE_S = 10.0

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._begun = args, time.monotonic()
        default = turns.BUDGET_S[args.device]
        self._turn_s = default if args.turn_seconds is None else args.turn_seconds
        self._compile_s = {"stof": args.tune_budget, "other": 0.0}  # the longest so far

    def _left_s(self) -> float:
        if self._args.seconds is None:
            return math.inf
        return float(self._args.seconds) - (time.monotonic() - self._begun)

    def turns_s(self, ways: int) -> float:
        """Seconds for the turns of so many ways."""
        return max(0.0, min(self._turn_s * ways, self._left_s() - self.SPARE_S))

    def leaves_time(self, way: Way, ways: int) -> bool:
        """Whether one more way can be compiled and called in turns with the others."""
        kind = "stof" if way.attention == "stof" else "other"
        wanted = self._compile_s[kind] + self._turn_s * ways
        return self._left_s() >= wanted + self.SPARE_S

    def compiled(self, process: turns.Process) -> turns.Turn | None:
        """Have it compile; None if it fails."""
        begun = time.monotonic()
        turn = turns.compiled(self._args, process)
        kind = "stof" if process.way.attention == "stof" else "other"
        took = time.monotonic() - begun
        # the second way of STOF finds what the first one measured
        self._compile_s[kind] = took if kind == "stof" else max(self._compile_s[kind], took)
        return turn


def _timed(
    args: argparse.Namespace, right: list[turns.Turn], model: str, clock: _Clock
) -> list[dict[str, Any]]:
    """Times of all that can be called; who fails leaves the list, with a line of the log."""
    while True:
        try:
            return turns.timed(right, clock.turns_s(len(right)))
        except turns.TurnFailed as failure:
            where = (args.out, args.worker, failure.turn.way.name, model)
            log_event(*where, "error", failure.reason)
            failure.turn.close()
            right.remove(failure.turn)


def _errors(output: Tensor, subject: Subject) -> tuple[float, float]:
    """The largest and the rms difference from the fp64 model, over its largest and rms value."""
    expected = subject.expected
    assert expected is not None, "only warming has no answer, and it times nothing"
    error = output.to(expected.device).double() - expected
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


def _facts(subject: Subject, device: torch.device, out: Path) -> dict[str, Any]:
    cell, keep = subject.setup.cell, subject.setup.dense
    work = model_work(subject.model, cell.batch, subject.seq, keep, cell.torch_dtype)
    columns = cell.columns()
    kept = ("batch", "seq", "mask", "window", "global_tokens", "dtype")
    ceilings = load_ceilings(Paths(out, out).ceilings, device)
    return {
        "cell": subject.shape,
        "model": subject.model,
        "density": float(keep.double().mean()),
        "floor_us": ceilings.model_floor_us(work, cell.dtype),
        **{name: columns[name] for name in kept},
        **conditions(device),
        "transformers": version_of("transformers"),
    }
