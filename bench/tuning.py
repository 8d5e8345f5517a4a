"""Cost of tuning a whole model: seconds, trials, bookkeeping, and what a warm start costs after it.

Every figure is a process of its own over one folder of caches per cell. The first process of STOF
finds nothing and tunes; the following ones find its choices and Inductor's caches, as the
processes of plain torch.compile find Inductor's (the fastest of ``--repeats`` counts). Both get the
same model and mask.

``tuning_s`` is all that STOF does before it hands the graph to Inductor; ``fusion_s`` the part of
it that works on operators, ``measuring_s`` compiling and timing candidates there; what is left of
``fusion_s`` is ``bookkeeping_s``: analysis, conversion, reward. ``initial_us`` and ``final_us`` are
the schemes measured in turns, summed over the chains that were.
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

import torch
from firstcall import in_new_process, report
from machine import conditions, version_of
from models import model_names
from results import append_row, read_rows, say
from ways import Way, model_cell

FIELDS = (
    "cell", "model", "batch", "seq", "mask", "dtype", "budget_s",
    "tuning_s", "fusion_s", "measuring_s", "bookkeeping_s", "bookkeeping_percent", "trials",
    "cold_s", "plain_cold_s", "warm_s", "plain_warm_s", "warm_extra_s", "warm_trials",
    "chains", "initial_us", "final_us", "gain", "detail",
    "device", "torch", "triton", "transformers", "stof", "date",
)  # fmt: skip


def tuning_units(args: argparse.Namespace, shapes: list[str]) -> list[str]:
    """Cells without a row, ``model/BxS``."""
    done = {f"{row['model']}/{row['cell']}" for row in read_rows(args.out)}
    names = [
        f"{model}/{shape}" for model in model_names(args.model, args.smoke) for shape in shapes
    ]
    return [name for name in names if name not in done]


def run_tuning(args: argparse.Namespace, device: torch.device) -> None:
    """A cell, which starts processes, or one of those processes (``model/BxS/way``)."""
    model, shape, *way = args.worker.split("/")
    if way:
        report(args, device, model, shape, _way(way[0], args.tune_budget))
        return
    caches = args.caches / f"tuning-{model}-{shape}"
    shutil.rmtree(caches, ignore_errors=True)  # a cell that was cut off is not half warm
    found: dict[str, list[dict[str, Any]]] = {"stof": [], "compile": []}
    for _ in range(1 + max(1, args.repeats)):
        for name, calls in found.items():
            calls.append(in_new_process(args, f"{args.worker}/{name}", caches))
            steps = calls[-1].get("steps", {}).items()
            spent = ", ".join(f"{step} {seconds:.2f}" for step, seconds in steps)
            say(f"  {args.worker} {name}: {calls[-1]['seconds']:.2f} s {spent and f'({spent})'}")
    stof, plain = found["stof"], found["compile"]
    cell = model_cell(model, shape, device)
    row: dict[str, Any] = {
        "cell": shape,
        "model": model,
        "batch": cell.batch,
        "seq": cell.seq,
        "mask": cell.mask,
        "dtype": cell.dtype,
        "budget_s": args.tune_budget,
        **_costs(stof[0]),
        "cold_s": stof[0]["seconds"],
        "plain_cold_s": plain[0]["seconds"],
        **_warm(stof[1:], plain[1:]),
        **conditions(device),
        "transformers": version_of("transformers"),
    }
    append_row(args.out, FIELDS, row)


def _way(name: str, budget_s: float) -> Way:
    if name == "compile":
        return Way("compile", "sdpa")
    return Way("stof", "stof", options={"tune_budget_s": budget_s})


def _costs(cold: dict[str, Any]) -> dict[str, Any]:
    steps = cold["steps"]
    fusion, measuring = steps.get("fusion", ""), steps.get("measuring", "")
    row = {
        "tuning_s": sum(steps.get(step, 0.0) for step in ("stof", "verdict")),
        "fusion_s": fusion,
        "measuring_s": measuring,
        **{name: cold[name] for name in ("trials", "chains", "initial_us", "final_us", "detail")},
    }
    if "" not in (fusion, measuring):
        row["bookkeeping_s"] = fusion - measuring
        row["bookkeeping_percent"] = 100 * (fusion - measuring) / fusion if fusion else 0.0
    if row["final_us"]:
        row["gain"] = row["initial_us"] / row["final_us"]
    return row


def _warm(stof: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    ours, theirs = (min(call["seconds"] for call in calls) for calls in (stof, plain))
    return {
        "warm_s": ours,
        "plain_warm_s": theirs,
        "warm_extra_s": ours - theirs,
        "warm_trials": sum(call["trials"] for call in stof),
    }
