"""The child process: one cell of one command."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch
from results import read_rows, settled_lines


def work(args: argparse.Namespace) -> int:
    """Measure the cell named by ``--worker`` (with ``--warm-worker``: only compile it)."""
    device = torch.device(args.device)
    if args.command in ("attention", "backward"):
        _attention(args, device)
    elif args.command == "e2e":
        from e2e import run_e2e

        run_e2e(args, device)
    elif args.command == "mask":
        from maskbuild import run_step

        if args.warm_worker is None:
            run_step(args, device)
    elif args.command == "tuning":
        from tuning import run_tuning

        if args.warm_worker is None:
            run_tuning(args, device)
    elif args.command == "accuracy":
        from accuracy import run_accuracy

        if args.warm_worker is None:
            run_accuracy(args, device)
    elif args.command in ("operators", "passes", "density"):
        if args.warm_worker is None:
            _paper(args, device)
    elif args.command == "overhead":
        from overhead import run_step as run_overhead

        if args.warm_worker is None:
            run_overhead(args, device)
    else:
        from roofline import load_ceilings

        print(json.dumps(asdict(load_ceilings(args.out.with_suffix(".json"), device)), indent=1))
    return 0


def _paper(args: argparse.Namespace, device: torch.device) -> None:
    if args.command == "operators":
        from operators import run_operator

        run_operator(args, device)
    elif args.command == "passes":
        from passes import run_passes

        run_passes(args, device)
    else:
        from density import run_density

        run_density(args, device)


def _attention(args: argparse.Namespace, device: torch.device) -> None:
    from attention import Paths, run_cell, warm_cell
    from cases import GRIDS

    cell = next(c for c in GRIDS[args.grid] if c.name == args.worker)
    paths = Paths(args.out, args.caches)
    peers = args.peers.split(",") if args.peers else []
    rows = [r for r in read_rows(args.out) if r["cell"] == cell.name]
    if args.sweep:
        from sweep import check_axes, run_sweep, warm_sweep

        axes = check_axes(args.kernel, args.axes)
        if args.warm_worker is not None:
            warm_sweep(cell, device, paths, args.seed, args.kernel, axes, args.warm_worker)
        else:
            done = [f"{r['form']}:{r['config']}" for r in rows if r["kernel"] == args.kernel]
            run_sweep(cell, device, paths, args.seed, args.kernel, axes, done)
    else:
        over = [r for r in settled_lines(args.out) if r["cell"] == cell.name]
        done = [(r["peer"], r["variant"]) for r in (*rows, *over)]
        run = run_cell if args.warm_worker is None else warm_cell
        if args.command == "backward":
            if args.warm_worker is not None:
                return  # its compilers use all cores by themselves
            from backward import run_cell as run
        run(cell, device, paths, args.seed, done, peers)
