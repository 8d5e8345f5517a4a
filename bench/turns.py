"""Ways of a whole model called in turns, each in a process of its own.

What else runs on the machine disturbs calls for seconds at a time, and launches of the same call by
a factor of two, so ways that are timed one after the other cannot be compared. Here all ways of a
cell are compiled first, one at a time or together, and then called in turns.
A process each keeps what one way leaves in Dynamo (FlexAttention needs graph breaks on a CPU, after
which the model's own code is skipped) away from the others. A process prepares its inputs, compiles
when it is told to, reports (on a GPU with the times that do not depend on the host), and then makes
a call whenever it is told to.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import cell_process
import significance
import timing
import torch
from details import stof_detail
from results import log_event
from torch import Tensor
from ways import Subject, Way, asked, compile_model, make_subject

PLAIN = "compile-default"
BUDGET_S = {"cpu": 15.0, "cuda": 4.0}  # of calls in turns, for each way
ROUNDS = (5, 30)  # fewest and most
PAUSE_S = 0.01  # before a call, for threads of the one before to stop waiting for work
WARM_S, CALLS_S = 0.03, 0.06  # of a sample on a GPU: calls in a row, of which the latter count


class TurnFailed(Exception):
    """A way failed when it was called."""

    def __init__(self, turn: Turn, reason: str) -> None:
        super().__init__(f"{turn.way.name}: {reason}")
        self.turn, self.reason = turn, reason


@dataclass
class Process:
    """A way's process, which has its inputs and waits to be told to compile.

    Args:
        end: waits for the end of the process, once the connection is closed.
        compile_s: seconds of the first call, once it was made.
    """

    way: Way
    connection: Connection
    end: Callable[[], object]
    compile_s: float | None = None

    def close(self) -> None:
        """End it; nothing where it has ended."""
        self.connection.close()
        self.end()


@dataclass
class Turn(Process):
    """A way whose process waits for its turns.

    Args:
        output: of the first input set. detail: what STOF did. columns: what else was measured.
    """

    output: Tensor = field(kw_only=True)
    detail: str = field(kw_only=True)
    columns: dict[str, Any] = field(kw_only=True)

    def take(self, turn: int) -> float:
        """Microseconds of one call.

        Raises:
            TurnFailed: the call failed, or the process ended.
        """
        time.sleep(PAUSE_S)
        try:
            self.connection.send(turn)
            answer = self.connection.recv()
        except (EOFError, OSError) as gone:
            raise TurnFailed(self, f"its process ended: {gone!r}") from gone
        if isinstance(answer, dict):
            raise TurnFailed(self, answer["failed"])
        return float(answer)


def ready() -> None:
    """Have what the processes import imported, while the caller goes on."""
    cell_process.start_server()


def begin(args: argparse.Namespace, ways: Sequence[Way]) -> list[Process]:
    """Start the processes of ways together, and wait until all have their inputs; those that fail
    are missing, with a logged line each.
    """
    begun: list[Process] = []
    try:
        for way in ways:
            here, there = Pipe()
            begun.append(Process(way, here, start(args, way, there)))
        return [process for process in begun if _answer(args, process) is not None]
    except BaseException:
        for process in begun:
            process.connection.close()
        raise


def compile_together(args: argparse.Namespace, processes: Sequence[Process]) -> list[Process]:
    """Have all compile at the same time, on the same device; those that fail are missing, with a
    logged line each. Their seconds, and what STOF measures meanwhile, hear each other.
    """
    for process in processes:
        _tell(process, "compile")
    return [process for process in processes if _has_compiled(args, process)]


def compiled(args: argparse.Namespace, process: Process) -> Turn | None:
    """Have a way's process compile, where it has not, and report; None and a logged line if it
    fails.
    """
    if process.compile_s is None:
        _tell(process, "compile")
        if not _has_compiled(args, process):
            return None
    _tell(process, "report")
    found = _answer(args, process)
    if found is None:
        return None
    found["output"] = torch.from_numpy(found["output"])
    return Turn(process.way, process.connection, process.end, process.compile_s, **found)


def _tell(process: Process, what: str) -> None:
    with contextlib.suppress(OSError):  # it has ended, which the answer says
        process.connection.send(what)


def _has_compiled(args: argparse.Namespace, process: Process) -> bool:
    found = _answer(args, process)
    process.compile_s = None if found is None else found["compile_s"]
    return found is not None


def _answer(args: argparse.Namespace, process: Process) -> dict[str, Any] | None:
    """What a process says; None and a logged line if it failed."""
    try:
        found = process.connection.recv()
    except (EOFError, OSError):
        found = {"failed": f"its process ended with {process.end()}"}
    except BaseException:
        process.connection.close()
        raise
    if "failed" not in found:
        return dict(found)
    model = args.worker.split("/")[0]
    log_event(args.out, args.worker, process.way.name, model, "error", found["failed"])
    process.close()
    return None


def start(args: argparse.Namespace, way: Way, there: Connection) -> Callable[[], object]:
    """Start the process that serves a way.

    Returns:
        What waits for its end, which comes when the connection is closed; it returns the exit code.
    """
    command = [sys.executable, str(Path(__file__).with_name("run.py")), args.command]
    for name in ("device", "model", "seed", "out", "tune_budget", "caches", "dump_dir", "dtype"):
        value = getattr(args, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    command += [*(["--smoke"] if args.smoke else []), "--worker", f"{args.worker}/{way.name}"]
    # of the group of this process, which is ended as a whole
    process = cell_process.start(command, os.environ, leads=False, talks=there)
    there.close()
    return partial(cell_process.finish, process, 30.0)


@torch.no_grad()
def serve(args: argparse.Namespace, way: Way, connection: Connection) -> None:
    """Prepare a way, compile and report when told to, and make a call for each number that comes:
    of that input set.
    """
    model, shape = args.worker.split("/")[:2]
    store = args.caches / "stof-store"
    caches = f"{args.command}-{'stof' if way.attention == 'stof' else way.name}"
    with connection:
        try:
            device = torch.device(args.device)
            given = {"answer": False, "dtype": args.dtype}
            subject = make_subject(model, shape, device, store, args.seed, **given)
            timing.synchronize(device)
            connection.send({})
            connection.recv()
            with timing.own_caches(args.caches, caches, store):
                call, model = compile_model(asked(way, args), subject)
                connection.send({"compile_s": timing.first_call(call, subject.sets[0], device)})
                connection.recv()
                connection.send(_report(way, call, model, subject))
                _calls(call, subject, connection)
        except Exception as failure:  # told to the cell, whose other ways still run
            text = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()[-400:]}"
            with contextlib.suppress(OSError):  # nobody is there any more
                connection.send({"failed": text})


def _report(
    way: Way, call: Callable[..., Tensor], model: object, subject: Subject
) -> dict[str, Any]:
    device, sets = subject.setup.device, subject.sets
    first = call(*sets[0])
    timing.poison(first.shape, first.dtype, device)
    del first
    report = {
        "output": sent(call(*sets[0])),
        "detail": stof_detail(model) if way.attention == "stof" else "",
        "columns": _gpu_columns(call, way, subject) if device.type == "cuda" else {"graph_us": ""},
    }
    if device.type == "cuda":  # the ways that compile next need the memory
        gc.collect()
        torch.cuda.empty_cache()
    return report


def sent(output: Tensor) -> Any:
    """An output for another process. numpy has no bf16: fp32 holds all of its numbers."""
    held = output.cpu()
    return (held.float() if held.dtype == torch.bfloat16 else held).numpy()


def _gpu_columns(call: Callable[..., Tensor], way: Way, subject: Subject) -> dict[str, Any]:
    """The columns that the host has no say in, and calls in a row."""
    device, sets = subject.setup.device, subject.sets
    peak = timing.peak_bytes(call, sets[0], device)
    graph = None if way.has_graphs else timing.replay_time(call, sets, device, budget_s=0.5)
    return {
        "graph_us": graph.median_us if graph else "",
        "graph_method": graph.method if graph else "",
        "back_to_back_us": timing.back_to_back_us(call, sets, device),
        "peak_bytes": peak,
    }


def _calls(call: Callable[..., Tensor], subject: Subject, connection: Connection) -> None:
    device = subject.setup.device
    while True:
        try:
            turn = connection.recv()
        except EOFError:  # no more turns
            return
        inputs = subject.sets[turn % len(subject.sets)]
        if device.type == "cuda":
            begun, samples = time.monotonic(), []
            while len(samples) < 3 or time.monotonic() < begun + WARM_S + CALLS_S:
                counts = time.monotonic() > begun + WARM_S  # never the first
                us = timing.call_us(call, inputs, device)
                if counts:
                    samples.append(us)
            connection.send(median(samples))
        else:
            connection.send(timing.call_us(call, inputs, device))


def one_round(takers: Sequence[Callable[[], float]], halves: tuple[int, int]) -> list[list[float]]:
    """Samples of each: all forwards, then all backwards, in each half so many of one in a row."""
    taken: list[list[float]] = [[] for _ in takers]
    forwards = range(len(takers))
    for half, order in zip(halves, (forwards, reversed(forwards)), strict=True):
        for index in order:
            taken[index] += [takers[index]() for _ in range(half)]
    return taken


def in_rounds(takers: Sequence[Callable[[int], float]], budget_s: float) -> list[list[list[float]]]:
    """Microseconds of calls in rounds; a taker gets the number of the round.

    Between the fewest and the most of ``ROUNDS`` the budget decides.

    Returns:
        For each taker its rounds, two samples in each.
    """
    for take in takers:
        take(0)
    end = time.monotonic() + budget_s
    fewest, most = ROUNDS
    rounds: list[list[list[float]]] = []
    while takers and len(rounds) < most and (len(rounds) < fewest or time.monotonic() <= end):
        rounds.append(one_round([partial(take, len(rounds)) for take in takers], (1, 1)))
    return [list(of_one) for of_one in zip(*rounds, strict=True)]


def timed(turns: Sequence[Turn], budget_s: float) -> list[dict[str, Any]]:
    """The columns of times of each way, what else was measured, and its detail.

    Raises:
        TurnFailed: by which one; the others can be timed again.
    """
    rounds = in_rounds([turn.take for turn in turns], budget_s)
    by_name = {turn.way.name: taken for turn, taken in zip(turns, rounds, strict=True)}
    found = []
    for turn in turns:
        samples = [us for one in by_name[turn.way.name] for us in one]
        detail = [turn.detail] if turn.detail else []
        if turn.way.attention == "stof" and PLAIN in by_name:
            detail.append(against_plain(by_name[PLAIN], by_name[turn.way.name]))
        found.append(
            {
                "median_us": median(samples),
                "p20_us": timing.at(samples, 0.2),
                "p80_us": timing.at(samples, 0.8),
                "runs": len(samples),
                **turn.columns,
                "detail": " | ".join(detail),
            }
        )
    return found


def against_plain(plain: list[list[float]], ours: list[list[float]]) -> str:
    """How STOF's calls differ from plain torch.compile's, made in turns with them."""
    found = significance.difference(plain, ours, significance.scipy_stats())
    return (
        f"{found.speedup:.3f}x {PLAIN}: {significance.verdict(found, found.p)} (Welch p "
        f"{found.p:.2g}, paired p {found.round_p:.2g}, {len(ours)} rounds)"
    )
