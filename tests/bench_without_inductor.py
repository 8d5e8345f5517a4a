"""Runs commands of bench/run.py in one process, compiled by nobody: ``python THIS '[[...], ...]'``.

STOF's graphs run as they are and its peers eagerly, times are taken from few calls, and what would
be a new process of ``tuning`` or ``e2e`` runs here.
"""

import gc
import json
import sys
import threading
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import firstcall
import roofline
import run
import timing
import tuning
import turns

compile_for_real = torch.compile


def compile_only_stof(model, *, backend="inductor", **options):
    return compile_for_real(model, backend="stof", **options) if backend == "stof" else model


def in_this_process(args, step, caches):
    name = args.command
    given = [name, "--device", args.device, "--seed", str(args.seed), "--out", str(args.out)]
    given += ["--tune-budget", str(args.tune_budget), "--caches", str(caches), "--worker", step]
    run.main(given)
    return json.loads((caches / firstcall.ANSWER).read_text())


def in_a_thread(args, way, there):
    thread = threading.Thread(target=turns.serve, args=(args, way, there))
    thread.start()
    return thread.join


def few_calls(call, sets, device, budget_s):
    return launch_time(call, sets, device, budget_s=0.0)


def one_row(call, sets, device):
    return back_to_back_us(call, sets, device, calls=1)


launch_time, back_to_back_us = timing.launch_time, timing.back_to_back_us

if __name__ == "__main__":
    gc.set_threshold(10_000, 10, 10)  # as in conftest.py
    gc.freeze()
    with FakeTensorMode():
        pass  # torch 2.11 with CUDA and without a GPU crashes once the first thread here ended
    with (
        mock.patch("torch.compile", compile_only_stof),
        mock.patch("stof_compile.backend.compile_with_inductor", lambda gm, *_: gm.forward),
        mock.patch.object(tuning, "in_new_process", in_this_process),
        mock.patch.object(turns, "start", in_a_thread),
        mock.patch.object(turns, "ready", lambda: None),
        mock.patch.object(turns, "ROUNDS", (2, 2)),
        mock.patch.object(timing, "launch_time", few_calls),
        mock.patch.object(timing, "back_to_back_us", one_row),
        mock.patch.object(
            roofline, "measure_ceilings", lambda device: roofline.Ceilings("here", 0.01, 0.1)
        ),
    ):
        for command in json.loads(sys.argv[1]):
            try:
                run.main(command)
            except SystemExit as refused:
                print(f"refused: {refused}", file=sys.stderr)
    gc.unfreeze()
