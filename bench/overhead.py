"""Compile overhead of STOF over plain torch.compile, with its choices cached.

Every figure is a cold process. ``inductor-cold``: Inductor compiles from nothing, STOF's choices
are in its store. ``inductor-warm``: Inductor's caches are warm as well. Both ways get the same
model and mask; imports, building the model and one small compiled function (which starts Inductor's
workers) come before the clock.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import timing
import torch
from cases import dense_mask
from e2e import Way, compile_model, model_cell
from machine import conditions
from models import make_tokens
from peers import Setup
from results import append_row, say

FIELDS = (
    "cell", "model", "seq", "batch", "repeats", "compile_s", "stof_s", "overhead_percent",
    "all_compile_s", "all_stof_s",
    "device", "torch", "triton", "stof", "date",
)  # fmt: skip
STATES = ("inductor-cold", "inductor-warm")
REPEATS = 3


def steps(args: argparse.Namespace) -> list[str]:
    """One row each."""
    return list(STATES)


def run_step(args: argparse.Namespace, device: torch.device) -> None:
    """A step that starts processes, or one of those processes (``state way``)."""
    if "/" in args.worker:
        _, way = args.worker.split("/")
        print(f"seconds {_first_call(args, device, way)}")
        return
    seconds: dict[str, list[float]] = {"compile": [], "stof": []}
    for repeat in range(
        REPEATS + 1
    ):  # the first round measures and stores STOF's choices, and fills the caches
        for way in seconds:
            if args.worker == "inductor-cold":
                for folder in args.caches.glob("e2e-*"):
                    shutil.rmtree(folder)
            spent = _child(args, f"{args.worker}/{way}")
            say(f"  {args.worker} {way}: {spent:.2f} s{' (not counted)' if repeat == 0 else ''}")
            if repeat > 0:
                seconds[way].append(spent)
    plain, stof = median(seconds["compile"]), median(seconds["stof"])
    cell = model_cell(shape_of(args), device, args.smoke)
    row: dict[str, Any] = {
        "cell": args.worker,
        "model": args.model,
        "seq": cell.seq,
        "batch": cell.batch,
        "repeats": REPEATS,
        "compile_s": plain,
        "stof_s": stof,
        "overhead_percent": 100 * (stof / plain - 1),
        "all_compile_s": " ".join(f"{s:.2f}" for s in seconds["compile"]),
        "all_stof_s": " ".join(f"{s:.2f}" for s in seconds["stof"]),
        **conditions(device),
    }
    append_row(args.out, FIELDS, row)


def shape_of(args: argparse.Namespace) -> str:
    """The shape that is compiled."""
    return "1x128" if args.smoke else "1x512"


def _child(args: argparse.Namespace, step: str) -> float:
    command = [
        sys.executable,
        str(Path(__file__).with_name("run.py")),
        "overhead",
        "--device",
        args.device,
    ]
    command += ["--model", args.model, "--seed", str(args.seed), "--caches", str(args.caches)]
    command += ["--out", str(args.out), *(["--smoke"] if args.smoke else []), "--worker", step]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split("seconds ")[1].split()[0])


@torch.no_grad()
def _first_call(args: argparse.Namespace, device: torch.device, name: str) -> float:
    cell = model_cell(shape_of(args), device, args.smoke)
    keep = dense_mask(cell, device)
    tokens = make_tokens(args.model, cell.batch, cell.seq, args.seed, device)
    way = Way(name, "sdpa" if name == "compile" else "stof", None)
    with timing.own_caches(args.caches, f"e2e-{name}"):
        call, _ = compile_model(
            way, args.model, Setup(cell, device, keep, args.caches / "stof-store"), args.seed
        )
        one = torch.ones(8, device=device)
        torch.compile(lambda x: x.sin() + 1)(one)
        return timing.first_call(call, (tokens,), device)
