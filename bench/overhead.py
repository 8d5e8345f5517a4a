"""Compile overhead of STOF over plain torch.compile, with its choices cached.

Every figure is a cold process. ``inductor-cold``: Inductor compiles from nothing, STOF's choices
are in its store. ``inductor-warm``: Inductor's caches are warm as well. Both ways get the same
model and mask; imports, building the model and one small compiled function (which starts Inductor's
workers) come before the clock.
"""

from __future__ import annotations

import argparse
import shutil
from statistics import median
from typing import Any

import torch
from firstcall import in_new_process, report
from machine import conditions
from models import model_names
from results import append_row, say
from ways import Way, model_cell

FIELDS = (
    "cell", "model", "seq", "batch", "repeats", "compile_s", "stof_s", "overhead_percent",
    "all_compile_s", "all_stof_s",
    "device", "torch", "triton", "stof", "date",
)  # fmt: skip
REPEATS = {"inductor-cold": 3, "inductor-warm": 9}  # warm starts scatter
WAYS = {"compile": Way("compile", "sdpa"), "stof": Way("stof", "stof", options={"strict": True})}


def steps(args: argparse.Namespace) -> list[str]:
    """One row each."""
    return list(REPEATS)


def run_step(args: argparse.Namespace, device: torch.device) -> None:
    """A step that starts processes, or one of those processes (``state/way``)."""
    (model,) = model_names(args.model, args.smoke)
    shape = "1x128" if args.smoke else "1x512"
    if "/" in args.worker:
        report(args, device, model, shape, WAYS[args.worker.split("/")[1]])
        return
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    repeats = REPEATS[args.worker]
    # the first round measures and stores STOF's choices, and fills the caches
    for repeat in range(1 + repeats):
        for name, way in WAYS.items():
            if args.worker == "inductor-cold":
                shutil.rmtree(args.caches / f"{args.command}-{way.attention}", ignore_errors=True)
            spent = in_new_process(args, f"{args.worker}/{name}", args.caches)["seconds"]
            say(f"  {args.worker} {name}: {spent:.2f} s{' (not counted)' if repeat == 0 else ''}")
            if repeat > 0:
                seconds[name].append(spent)
    plain, stof = median(seconds["compile"]), median(seconds["stof"])
    cell = model_cell(model, shape, device)
    row: dict[str, Any] = {
        "cell": args.worker,
        "model": model,
        "seq": cell.seq,
        "batch": cell.batch,
        "repeats": repeats,
        "compile_s": plain,
        "stof_s": stof,
        "overhead_percent": 100 * (stof / plain - 1),
        "all_compile_s": " ".join(f"{s:.2f}" for s in seconds["compile"]),
        "all_stof_s": " ".join(f"{s:.2f}" for s in seconds["stof"]),
        **conditions(device),
    }
    append_row(args.out, FIELDS, row)
