"""The first call of a compiled model in a process of its own: its seconds, and what STOF noted.

Imports, building the model and one small compiled function (which starts Inductor's workers) come
before the clock, and a full garbage collection: it takes 0.3 s among all the modules, and without
this it falls into the first calls of one way or of the other, by how far the collector had counted.
The process is a fork of one that has imported torch, STOF and these modules.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import cell_process
import timing
import torch
from details import scheme_texts
from ways import Way, compile_model, make_subject

ANSWER = "first-call.json"  # in the folder of caches


def in_new_process(args: argparse.Namespace, step: str, caches: Path) -> dict[str, Any]:
    """Run ``--worker step`` of the same command and read what :func:`report` left.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, str(Path(__file__).with_name("run.py")), args.command]
    for name in ("device", "model", "seed", "out", "tune_budget"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--caches", str(caches), *(["--smoke"] if args.smoke else []), "--worker", step]
    answer = caches / ANSWER
    answer.unlink(missing_ok=True)
    cell_process.start_server()
    # of the group of this process, which is ended as a whole
    process = cell_process.start(command, os.environ, leads=False)
    code = cell_process.finish(process, None)
    if code or not answer.exists():
        raise RuntimeError(f"the process of {step} ended with {code} and left no answer")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@torch.no_grad()
def report(
    args: argparse.Namespace, device: torch.device, model: str, shape: str, way: Way
) -> None:
    """Make the first call and leave its figures for :func:`in_new_process`."""
    store = args.caches / "stof-store"
    subject = make_subject(model, shape, device, store, args.seed, answer=False)
    with timing.own_caches(args.caches, f"{args.command}-{way.attention}", store):
        call, compiled = compile_model(way, subject)
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
        gc.collect()
        seconds = timing.first_call(call, subject.sets[0], device)
        noted = what_stof_noted(compiled) if way.attention == "stof" else {}
    (args.caches / ANSWER).write_text(json.dumps({"seconds": seconds, **noted}))


def what_stof_noted(compiled: Any) -> dict[str, Any]:
    """Seconds of STOF's steps, trials, schemes with their times, over all graphs of a model."""
    import stof_compile
    from stof_compile.tune import fusion_trials

    graphs = stof_compile.explain(compiled).graphs
    seconds: dict[str, float] = {}
    for record in graphs:
        for step, spent in record.timings_s.items():
            seconds[step] = seconds.get(step, 0.0) + spent
    chains = [chain for record in graphs for chain in record.chains]
    timed = [c for c in chains if c.initial_us is not None and c.final_us is not None]
    return {
        "steps": seconds,
        "trials": sum(map(fusion_trials, graphs)),
        "chains": len(chains),
        "initial_us": sum(c.count * (c.initial_us or 0.0) for c in timed) if timed else "",
        "final_us": sum(c.count * (c.final_us or 0.0) for c in timed) if timed else "",
        "detail": " | ".join(scheme_texts(graphs)),
    }
