"""The parent process: which cells are left, one process each, a summary last."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import cell_process
import torch
from cell_process import CORES
from columns import check_columns
from results import log_event, log_path, read_rows, say, settled_lines

HERE = Path(__file__).resolve().parent
BY_CELL = ("attention", "backward", "e2e", "tuning", "accuracy", "operators", "passes")
NO_MODELS = ("attention", "cpu", "mask", "ceilings", "density", "operators")
ALL_MODELS = ("tuning", "accuracy")  # unless the command line names some


@dataclass(frozen=True)
class Unit:
    """One process: a cell (or a step) by name, and how many of its rows are missing."""

    name: str
    pending: int


def default_out(args: argparse.Namespace) -> Path:
    """Where rows go when no file was named."""
    stem = args.command
    if args.sweep:
        stem = f"sweep-{args.kernel}"
    if args.command == "e2e":
        stem = f"e2e-{args.model.replace(',', '-')}" + (f"-{args.dtype}" if args.dtype else "")
    if args.command in ("attention", "backward") and args.grid not in (None, "table2"):
        stem += f"-{args.grid}"
    return HERE / "results" / f"{stem}-{args.device}.csv"


def settle(args: argparse.Namespace) -> None:
    """Fill in what the command line left open; workers get the settled values."""
    if args.command == "cpu":
        args.grid, args.device = args.grid or "cpu", "cpu"
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.smoke:
        args.grid = args.grid or "smoke"
    args.grid = args.grid or "table2"
    if args.model is None and args.command == "passes":
        args.model = "distilbert,distilgpt2"
    args.model = args.model or ("all" if args.command in ALL_MODELS else "bert-base")
    if args.out is None:
        args.out = (
            Path(tempfile.mkdtemp(prefix="stof-smoke-")) / "rows.csv"
            if args.smoke
            else default_out(args)
        )
    args.out = args.out.resolve()
    args.dump_dir = args.dump_dir and args.dump_dir.resolve()
    if args.gpus > 1 and (args.device != "cuda" or args.command not in BY_CELL):
        raise SystemExit(f"--gpus is for {', '.join(BY_CELL)} on cuda")
    if not 1 <= args.gpus <= max(1, torch.cuda.device_count()):
        there = max(1, torch.cuda.device_count())
        raise SystemExit(f"--gpus {args.gpus}: it has to be from 1 to {there} on this machine")
    args.caches = (args.caches or Path(tempfile.mkdtemp(prefix="stof-bench-"))).resolve()
    args.seed = random.randrange(2**31) if args.seed is None else args.seed
    if args.cell_timeout is None:
        args.cell_timeout = 240.0 if args.command in NO_MODELS else 540.0
    if args.warm is None:  # elsewhere the seconds of a cold compile are part of the result
        args.warm = 8 if args.device == "cuda" and args.command == "attention" else 0


def worker_command(args: argparse.Namespace, unit: str, gpu: int | None = None) -> list[str]:
    """The command line of a worker; on one of several GPUs it has caches of its own, unless they
    were warmed for all.
    """
    command = [
        sys.executable,
        str(HERE / "run.py"),
        "attention" if args.command == "cpu" else args.command,
    ]
    names = (
        "grid", "peers", "device", "out", "kernel", "axes", "model", "seed", "caches", "length",
        "tune_budget", "dump_dir", "samples", "repeats", "turn_seconds", "dtype",
    )  # fmt: skip
    for name in names:
        value = getattr(args, name)
        if name == "caches" and gpu is not None and args.command != "attention":
            value = value / f"gpu{gpu}"
        if value not in (None, ""):
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--sweep"] if args.sweep else []
    command += ["--smoke"] if args.smoke else []
    command += ["--compile-together"] if args.compile_together else []
    return [*command, "--worker", unit]


def worker_environment(args: argparse.Namespace, gpu: int | None = None) -> dict[str, str]:
    """The variables of a worker, which sees one GPU and a share of the cores where there are more.

    Attention peers compile one kernel each: Inductor's pool would cost more than it saves.
    """
    environment = dict(os.environ)
    if gpu is not None:
        given = [g for g in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
        environment["CUDA_VISIBLE_DEVICES"] = given[gpu] if given else str(gpu)
        environment[CORES] = ",".join(map(str, sorted(os.sched_getaffinity(0))[gpu :: args.gpus]))
    if args.command in ("attention", "cpu"):
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return environment


def drive(args: argparse.Namespace) -> int:
    """Run what the command line asks for; returns the number of failed cells, 100 at most."""
    if args.command == "report":
        report(args.files)
        return 0
    if args.command == "page":
        from page import write_page

        write_page()
        return 0
    if args.command == "paper":
        from paper import run_paper

        return run_paper(args)
    started, failed = time.monotonic(), 0
    grids = (args.grid or "").split(",")
    for grid in grids if args.resume else ():  # before minutes are spent on the first
        caches = args.caches or HERE  # not used, and none is made for a check
        one = argparse.Namespace(**{**vars(args), "grid": grid or None, "caches": caches})
        settle(one)
        check_columns(one)
    for number, grid in enumerate(grids):
        one = argparse.Namespace(**vars(args))
        one.grid = grid or None
        one.budget = args.budget - (time.monotonic() - started)
        if number and args.out is not None:  # grids before it wrote to the same file
            one.resume = True
        failed += run_command(one)
    return min(failed, 100)


def run_command(args: argparse.Namespace) -> int:
    """Run one command over one grid, print its summary; returns the number of failed cells."""
    settle(args)
    if not args.resume:
        for path in (args.out, log_path(args.out)):
            path.unlink(missing_ok=True)
    units = pending_units(args)
    say(
        f"{args.command} on {args.device}: {len(units)} cells to run, seed {args.seed}, rows to "
        f"{args.out}, caches in {args.caches}"
    )
    started = time.monotonic()
    if units:
        cell_process.start_server()
    if args.warm > 0 and units:
        warm(args, units)
    failed = run_units(args, units, started)
    print(summary(args.out))
    held = [row for row in read_rows(log_path(args.out)) if row["kind"] != "note"]
    if held:
        print(f"{len(held)} lines in {log_path(args.out).name}:")
    seen: dict[str, list[str]] = {}
    for row in held:
        seen.setdefault(
            f"{row['kind']} {row['peer']} {row['variant'] if len(held) < 40 else ''}: "
            f"{(row['reason'].splitlines() or [''])[0][:120]}",
            [],
        ).append(row["cell"])
    for text, cells in list(seen.items())[:20]:
        print(f"  {text} ({len(cells)}: {cells[0]}{', ...' if len(cells) > 1 else ''})")
    return min(failed, 100)


def run_units(args: argparse.Namespace, units: Sequence[Unit], started: float) -> int:
    """Run the workers one after the other, or with ``--gpus`` one on each GPU at a time.

    Args:
        started: when the command began, of ``time.monotonic``; its budget counts from there.
    Returns:
        How many failed.
    """
    waiting = deque(enumerate(units))

    def serve(gpu: int | None) -> int:
        failed = 0
        while waiting:
            left = args.budget - (time.monotonic() - started)
            if left < 20:
                break
            try:
                index, unit = waiting.popleft()
            except IndexError:  # another thread took the last one
                break
            where = "" if gpu is None else f" on GPU {gpu}"
            say(
                f"[{index + 1}/{len(units)}] {unit.name}: {unit.pending} to measure{where}, "
                f"{time.monotonic() - started:.0f} s spent"
            )
            failed += run_unit(args, unit, min(left, args.cell_timeout), gpu)
        return failed

    if args.gpus == 1:
        failed = serve(None)
    else:
        with ThreadPoolExecutor(args.gpus) as threads:
            try:
                failed = sum(threads.map(serve, range(args.gpus)))
            except BaseException:  # Ctrl-C reaches this thread only, and no cell
                waiting.clear()
                cell_process.end_all()
                raise
    if waiting:
        say(
            f"budget of {args.budget:.0f} s spent: {len(waiting)} cells left; run again with "
            "--resume"
        )
        text = f"budget spent before this cell and {len(waiting) - 1} more"
        log_event(args.out, waiting[0][1].name, "-", "-", "note", text, loud=False)
    return failed


def run_unit(args: argparse.Namespace, unit: Unit, limit_s: float, gpu: int | None = None) -> int:
    """Run one worker; 1 if it failed or took too long, which the log then says."""
    try:
        command = [*worker_command(args, unit.name, gpu), "--seconds", f"{limit_s:.0f}"]
        process = cell_process.start(command, worker_environment(args, gpu))
        code = cell_process.finish(process, limit_s)
    except (OSError, EOFError) as failure:
        text = f"no process could be started: {failure!r}"
        log_event(args.out, unit.name, "-", "-", "error", text)
        return 1
    if code == 0:
        return 0
    text = f"stopped after {limit_s:.0f} s; rows that it has written stay"
    if code is not None:
        text = f"the cell's process ended with {code}"
    log_event(args.out, unit.name, "-", "-", "error", text)
    return 1


def warm(args: argparse.Namespace, units: Sequence[Unit]) -> None:
    """Fill the compiler caches, several cells at a time; nothing is timed."""
    waiting = list(enumerate(units))
    running: list[tuple[str, BaseProcess]] = []
    started = time.monotonic()
    limit = 0.5 * args.budget
    say(f"warming the compiler caches of {len(waiting)} cells, {args.warm} processes at a time")
    try:
        while waiting or running:
            if time.monotonic() - started > limit:
                say(f"  warm-up stopped after {limit:.0f} s; the rest compiles in the timed pass")
                return
            while waiting and len(running) < args.warm:
                index, unit = waiting.pop(0)
                command = [*worker_command(args, unit.name), "--warm-worker", str(index)]
                running.append((unit.name, cell_process.start(command, worker_environment(args))))
            time.sleep(0.2)
            still = []
            for name, process in running:
                if not cell_process.done(process):
                    still.append((name, process))
                elif code := cell_process.finish(process, 0.0):
                    say(f"  warm-up of {name} ended with {code}")
            running = still
    finally:
        for _, process in running:
            cell_process.end(process)
    say(f"  warm after {time.monotonic() - started:.0f} s")


# -- what is left, and the summary -----------------------------------------------------------------


def pending_units(args: argparse.Namespace) -> list[Unit]:
    """Cells with rows missing, in order."""
    if args.command in ("attention", "backward", "cpu"):
        return _attention_units(args)
    if args.command == "e2e":
        from e2e import e2e_units

        return [Unit(*u) for u in e2e_units(args)]
    if args.command == "accuracy":
        from accuracy import accuracy_units

        return [Unit(*u) for u in accuracy_units(args)]
    if args.command == "tuning":
        from e2e import wanted_shapes
        from tuning import tuning_units

        return [Unit(name, 1) for name in tuning_units(args, wanted_shapes(args))]
    if args.command == "operators":
        from operators import operator_units

        return [Unit(name, 1) for name in operator_units(args)]
    if args.command == "passes":
        from passes import pass_units

        return [Unit(name, 1) for name in pass_units(args)]
    if args.command == "density":
        return [] if read_rows(args.out) else [Unit("masks", 1)]
    if args.command == "mask":
        from maskbuild import steps
    elif args.command == "overhead":
        from overhead import steps
    else:
        return [Unit("ceilings", 1)]
    done = {row["cell"] for row in read_rows(args.out)}
    names = [n for n in steps(args) if not args.cells or n in args.cells.split(",")]
    return [Unit(name, 1) for name in names if name not in done]


def _attention_units(args: argparse.Namespace) -> list[Unit]:
    from cases import GRIDS, select_cells
    from peers import attention_variants, chosen_of

    if args.grid not in GRIDS:
        raise SystemExit(f"no grid {args.grid!r}; grids: {', '.join(GRIDS)}")
    cells = select_cells(GRIDS[args.grid], args.cells)
    done: dict[str, set[tuple[str, str]]] = {}
    for row in read_rows(args.out):
        done.setdefault(row["cell"], set()).add((row.get("peer", ""), row.get("variant", "")))
    for row in settled_lines(args.out):
        done.setdefault(row["cell"], set()).add((row["peer"], row["variant"]))
    if args.sweep:
        from sweep import check_axes

        check_axes(args.kernel, args.axes)
        # the worker knows its trials; a cell is offered again and skips what it has
        return [Unit(cell.name, 1) for cell in cells]
    wanted = args.peers.split(",") if args.peers else []
    offered = attention_variants
    if args.command == "backward":
        from backward import backward_variants as offered
    units = []
    for cell in cells:
        variants = chosen_of(offered(cell, torch.device(args.device)), wanted)
        left = [v for v in variants if (v.peer, v.name) not in done.get(cell.name, set())]
        if left:
            units.append(Unit(cell.name, len(left)))
    return units


def report(files: Sequence[Path]) -> None:
    """Print the summary of each file, and one over all end-to-end files where there are several."""
    from gather import kind_of

    together = []
    for path in files:
        print(f"{path.name}\n{summary(path)}\n")
        rows = read_rows(path)
        together += [rows] if rows and kind_of(rows[0]) == "e2e" else []
    if len(together) > 1:
        from e2e_stats import comparison

        print(f"all models\n{comparison([row for rows in together for row in rows])}")


def summary(path: Path) -> str:
    """The summary that fits a CSV's columns."""
    from e2e_stats import e2e_summary
    from gather import is_gpu, kind_of
    from stats import attention_summary, backward_summary, has_bursts, means, plain_summary
    from sweep_stats import sweep_summary

    rows = read_rows(path)
    if not rows:
        return f"no rows in {path}"
    kind = kind_of(rows[0])
    if kind == "sweep":
        return sweep_summary(rows)
    if kind == "e2e":
        return e2e_summary(rows)
    if kind == "accuracy":
        from accuracy import accuracy_summary

        return accuracy_summary(rows)
    if kind == "attention":
        text = attention_summary(rows)
        if is_gpu(rows[0]["device"]):  # on a CPU both columns are plain calls
            text += f"\nlaunch included:\n{means(rows, 'launch_us')}"
            if has_bursts(rows):
                text += f"\nin bursts:\n{means(rows, 'burst_us')}"
        return text
    if kind == "backward":
        return backward_summary(rows)
    return plain_summary(rows)
