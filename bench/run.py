"""Benchmarks: one command line, CSV out, a short summary last.

    python bench/run.py attention --grid table2 [--cells 16x2048,bigbird] [--resume] [--out FILE]
    python bench/run.py attention --grid table2 --peers stof,stof_fp8 --out FILE
    python bench/run.py attention --grid table2 --sweep [--axes "block_q=64;num_warps=4,8"]
    python bench/run.py backward --cells 16x2048,16x4096 [--resume]    # gradients of an attention
    python bench/run.py e2e --model bert-base [--cells 1x128,8x512,16x2048] [--resume]
    python bench/run.py e2e --model all [--peers flex-ro,stof,compile-max-autotune,stof-fusion]
    python bench/run.py tuning [--models bert-base,gpt2] [--cells 1x128] [--tune-budget 60]
    python bench/run.py accuracy [--models bert-base,gpt2] [--cells 1x128] [--peers auto,fused]
    python bench/run.py cpu | mask | overhead | ceilings
    python bench/run.py operators | density      # Figures 3 and 4, Table 2 of the STOF paper
    python bench/run.py passes                   # Graph Surgeon's table
    python bench/run.py paper [--quick] [--resume] [--out FOLDER]    # all of both papers
    python bench/run.py report FILE...           # print the summary of CSV files again
    python bench/run.py page                     # docs/benchmarks.md from the committed CSV files

Every cell runs in a process of its own (cell_process.py). Rows go to a CSV, everything that did not
become a row to ``<out>.log.csv``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
COMMANDS = (
    "attention", "backward", "e2e", "tuning", "accuracy", "cpu", "mask", "overhead", "ceilings",
    "report", "operators", "density", "passes", "paper", "page",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parsed = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parsed.add_argument("command", choices=COMMANDS)
    parsed.add_argument("files", nargs="*", type=Path, help="report: CSV files")
    parsed.add_argument(
        "--grid",
        help="attention, backward: table2 (default), long, headdims, single, scattered, blocks, "
        "mha, cpu, smoke, ...; several with commas between them, each into a file of its own "
        "unless --out names one",
    )
    parsed.add_argument(
        "--cells",
        help="attention: comma-separated BxS, mask or BxS/mask; e2e, tuning, accuracy, passes: any "
        "BxS; operators: an operator, BxSxH or both with a slash; mask, overhead: steps; default "
        "all",
    )
    parsed.add_argument(
        "--peers",
        help="only these peers, comma-separated (attention: peer or peer/variant; stof_fp8 runs "
        "only when named); passes: pipelines; accuracy: its settings; e2e: ways (compile-ro, "
        "stof-default, ...) or sdpa, flex, stof; compile-max-autotune, stof-attention (no fusion), "
        "stof-fusion (no sparse attention) and stof-broken-mha (attention as single operators) run "
        "only when named, the first also in three cells",
    )
    parsed.add_argument("--device", help="cuda or cpu; default what is there")
    parsed.add_argument(
        "--out",
        type=Path,
        help="CSV; default bench/results/<command>-<device>.csv; paper: a folder, default "
        "bench/results, with --quick bench/out/quick-<device>",
    )
    parsed.add_argument(
        "--resume", action="store_true", help="keep the rows of --out and run what is missing"
    )
    parsed.add_argument(
        "--sweep", action="store_true", help="attention: time STOF's configs one by one"
    )
    parsed.add_argument(
        "--kernel",
        default="block",
        choices=("block", "row", "gather"),
        help="--sweep: which kernel",
    )
    parsed.add_argument(
        "--axes", default="", help="--sweep: product of these fields in place of the kernel's list"
    )
    parsed.add_argument(
        "--model",
        "--models",
        help="e2e, tuning, accuracy, overhead, passes: models of stof_compile/zoo.py, "
        "comma-separated, or all (bert-base, bert-large, gpt2, llama-1b, t5-base, vit-base); "
        "default bert-base, for tuning and accuracy all, for passes distilbert,distilgpt2",
    )
    parsed.add_argument(
        "--tune-budget",
        type=float,
        default=60.0,
        help="e2e, tuning, accuracy, passes: tune_budget_s of STOF; operators: seconds of trials a "
        "cell; default %(default)g",
    )
    parsed.add_argument(
        "--seed", type=int, default=None, help="seed of the inputs; default drawn and printed"
    )
    parsed.add_argument(
        "--caches", type=Path, help="compiler caches; default a fresh temporary folder"
    )
    parsed.add_argument(
        "--warm",
        type=int,
        default=None,
        help="processes compiling ahead of the timed pass; default 8 on cuda, 0 on cpu",
    )
    parsed.add_argument(
        "--cell-timeout",
        type=float,
        default=None,
        help="seconds a cell may take; default 240, 540 where whole models are compiled",
    )
    parsed.add_argument(
        "--budget",
        type=float,
        default=540.0,
        help="seconds of the whole run; cells past it are left for --resume",
    )
    parsed.add_argument(
        "--smoke", action="store_true", help="toy sizes: only to see that everything runs"
    )
    parsed.add_argument(
        "--quick", action="store_true", help="paper: a reduced grid (see bench/README.md)"
    )
    parsed.add_argument(
        "--samples",
        type=int,
        default=200,
        help="passes: calls timed of each pipeline; as many before them warm up",
    )
    parsed.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="tuning: processes of each way after the cold one, of which the fastest counts; "
        "default %(default)d",
    )
    parsed.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="e2e: of the models; default float16 on cuda, float32 on cpu",
    )
    parsed.add_argument(
        "--turn-seconds",
        type=float,
        help="e2e: seconds of calls in turns for each way, at least five rounds; default 4 on "
        "cuda, 15 on cpu",
    )
    parsed.add_argument(
        "--compile-together",
        action="store_true",
        help="e2e: all ways of a cell compile at the same time, not one after the other; their "
        "compile seconds and what STOF measures meanwhile are then no results",
    )
    parsed.add_argument(
        "--dump-dir", type=Path, help="e2e: STOF's dump of every cell, in a folder of its own there"
    )
    parsed.add_argument(
        "--gpus", type=int, default=1, help="cells at a time, each on a GPU and cores of its own"
    )
    parsed.add_argument("--length", type=int, help="mask: tokens; default 131072")
    parsed.add_argument("--worker", help=argparse.SUPPRESS)
    parsed.add_argument("--warm-worker", type=int, help=argparse.SUPPRESS)
    parsed.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # that a worker has
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit code is the number of cells that failed, at most 100."""
    args = parser().parse_args(arguments)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    if args.worker is not None:
        if "STOF_BENCH_CORES" in os.environ:  # before torch starts threads
            os.sched_setaffinity(0, map(int, os.environ["STOF_BENCH_CORES"].split(",")))
        from worker import work

        return work(args)
    from cell_process import ending_all, start_server

    with ending_all():
        if args.command == "paper":  # it imports while this process does
            start_server()
        from driver import drive

        return drive(args)


if __name__ == "__main__":
    sys.exit(main())
