"""Ways of a whole model called in turns on a CPU, each in a process of its own.

What else runs on the machine disturbs calls for seconds at a time, so ways that are timed one after
the other cannot be compared. Here all ways of a cell are compiled first and then called in turns.
A process each keeps what one way leaves in Dynamo (FlexAttention needs graph breaks on a CPU, after
which the model's own code is skipped) away from the others. A process compiles, reports, and then
makes a call whenever it is told to.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
BUDGET_S = 15.0  # of calls in turns, for each way
ROUNDS = (5, 30)  # fewest and most
PAUSE_S = 0.01  # before a call, for threads of the one before to stop waiting for work


class TurnFailed(Exception):
    """A way failed when it was called."""

    def __init__(self, turn: Turn, reason: str) -> None:
        super().__init__(f"{turn.way.name}: {reason}")
        self.turn, self.reason = turn, reason


@dataclass
class Turn:
    """A way whose process waits for its turns.

    Args:
        end: waits for the end of its process, once the connection is closed.
        compile_s: seconds of the first call. output: of the first input set. detail: what STOF did.
    """

    way: Way
    connection: Connection
    end: Callable[[], object]
    compile_s: float
    output: Tensor
    detail: str

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

    def close(self) -> None:
        """End its process; nothing where it has ended."""
        self.connection.close()
        self.end()


def begin(args: argparse.Namespace, way: Way) -> Turn | None:
    """Start a way's process and wait until it has compiled; None and a logged line if it fails."""
    here, there = Pipe()
    end = start(args, way, there)
    try:
        found = here.recv()
    except (EOFError, OSError):
        found = {"failed": f"its process ended with {end()}"}
    except BaseException:
        here.close()
        raise
    if "failed" in found:
        model = args.worker.split("/")[0]
        log_event(args.out, args.worker, way.name, model, "error", found["failed"])
        here.close()
        end()
        return None
    output = torch.from_numpy(found.pop("output"))
    return Turn(way, here, end, output=output, **found)


def start(args: argparse.Namespace, way: Way, there: Connection) -> Callable[[], object]:
    """Start the process that serves a way.

    Returns:
        What waits for its end, which comes when the connection is closed; it returns the exit code.
    """
    command = [sys.executable, str(Path(__file__).with_name("run.py")), args.command]
    for name in ("device", "model", "seed", "out", "tune_budget", "caches", "dump_dir"):
        value = getattr(args, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    command += [*(["--smoke"] if args.smoke else []), "--worker", f"{args.worker}/{way.name}"]
    cell_process.start_server()
    # of the group of this process, which is ended as a whole
    process = cell_process.start(command, os.environ, leads=False, talks=there)
    there.close()
    return partial(cell_process.finish, process, 30.0)


@torch.no_grad()
def serve(args: argparse.Namespace, way: Way, connection: Connection) -> None:
    """Compile a way, report, and make a call for each number that comes: of that input set."""
    model, shape = args.worker.split("/")[:2]
    store = args.caches / "stof-store"
    with connection:
        try:
            subject = make_subject(
                model, shape, torch.device(args.device), store, args.seed, answer=False
            )
            with timing.own_caches(args.caches, f"{args.command}-{way.name}", store):
                call, report = _compiled(asked(way, args), subject)
                connection.send(report)
                _calls(call, subject, connection)
        except Exception as failure:  # told to the cell, whose other ways still run
            text = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()[-400:]}"
            with contextlib.suppress(OSError):  # nobody is there any more
                connection.send({"failed": text})


def _compiled(way: Way, subject: Subject) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    device = subject.setup.device
    call, compiled = compile_model(way, subject)
    seconds = timing.first_call(call, subject.sets[0], device)
    first = call(*subject.sets[0])
    timing.poison(first.shape, first.dtype, device)
    del first
    return call, {
        "compile_s": seconds,
        "output": call(*subject.sets[0]).numpy(),
        "detail": stof_detail(compiled) if way.attention == "stof" else "",
    }


def _calls(call: Callable[..., Tensor], subject: Subject, connection: Connection) -> None:
    while True:
        try:
            turn = connection.recv()
        except EOFError:  # no more turns
            return
        inputs = subject.sets[turn % len(subject.sets)]
        begun = time.perf_counter_ns()
        call(*inputs)
        connection.send((time.perf_counter_ns() - begun) / 1e3)


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


def timed(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The columns of times of each way, and its detail.

    Raises:
        TurnFailed: by which one; the others can be timed again.
    """
    rounds = in_rounds([turn.take for turn in turns], BUDGET_S * len(turns))
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
