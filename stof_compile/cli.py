"""The command line: ``stof doctor | demo | explain | inspect | tune | cache``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stof_compile import store
from stof_compile.demo import DemoSettings, make_console, run_demo
from stof_compile.device import DeviceFacts, device_facts
from stof_compile.dump import versions
from stof_compile.errors import StofError, StofOptionError, StofPlanError
from stof_compile.explanation import explain_dump
from stof_compile.measure import time_callable
from stof_compile.options import MODES
from stof_compile.report.diff import diff_json, diff_reports, print_diff
from stof_compile.report.html import write_html
from stof_compile.report.load import load_ceilings, load_dump
from stof_compile.report.model import GraphReport, read_report
from stof_compile.report.model import to_json as reports_json
from stof_compile.report.terminal import print_report
from stof_compile.tune import run_tune
from stof_compile.tune_subject import DTYPES, MASKS, TuneSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 fine, 1 something is missing, 2 a wrong call."""
    arguments = _parser().parse_args(argv)
    console = make_console()
    try:
        status: int = arguments.run(arguments, console)
    except StofError as error:
        message = f"stof: {error.args[0]}"
        Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stof", description="sparse attention for torch.compile: tools around the backend"
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="check this machine and the installation")
    doctor.set_defaults(run=_doctor)

    defaults = DemoSettings()
    demo = commands.add_parser("demo", help="run a real encoder with and without STOF")
    demo.add_argument("--model", type=Path, metavar="DIR", help="local Hugging Face directory")
    demo.add_argument("--tokens", type=int, default=defaults.tokens, help="default %(default)s")
    demo.add_argument("--device", help="cpu or cuda; default: cuda if there is one")
    demo.add_argument(
        "--dump-dir", type=Path, default=defaults.dump_dir, help="default %(default)s"
    )
    demo.set_defaults(run=_demo)

    explain = commands.add_parser("explain", help="print what a dump says")
    explain.add_argument("dump", type=Path, help="folder given as dump_dir, or one graph of it")
    explain.set_defaults(run=_explain)

    _add_inspect(commands.add_parser("inspect", help="look at a dump: report, page, difference"))

    _add_tune(commands.add_parser("tune", help="tune a model, show the schemes, save the plan"))

    cache = commands.add_parser("cache", help="show or delete what was measured before")
    cache.add_argument("action", choices=("ls", "clear"))
    cache.add_argument("--dir", type=Path, help="folder given as cache_dir; default: the user's")
    cache.set_defaults(run=_cache)
    return parser


def _add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.description = (
        "Show what STOF did with a model, from a dump (options={'dump_dir': ...}): in the "
        "terminal, as one HTML page, as JSON, or the difference of two dumps."
    )
    inspect.add_argument("dump", nargs="?", type=Path, help="folder given as dump_dir, or a graph")
    inspect.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="two dumps")
    inspect.add_argument("--html", type=Path, metavar="FILE", help="write one page")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.add_argument(
        "--ceilings",
        type=Path,
        metavar="FILE",
        help="what the device can do at most (written by bench/), for shares of the floor",
    )
    inspect.set_defaults(run=_inspect)


def _add_tune(tune: argparse.ArgumentParser) -> None:
    defaults = TuneSettings("")
    tune.description = (
        "Compile a model with a tuning budget, print the scheme of every op chain before and "
        "after, and save the plan: options={'plan': FILE} follows it without a search."
    )
    tune.add_argument(
        "--model",
        required=True,
        help="a model of the zoo (bert-base, bert-large, gpt2, llama-1b, t5-base, vit-base, "
        "distilbert: random weights), a local directory of transformers, or module:function, "
        "which returns (model, example inputs as a dict or tuple)",
    )
    tune.add_argument("--batch", type=int, help="sequences; default 1")
    tune.add_argument("--seq", type=int, help="tokens of each (ViT: patches); default 512")
    tune.add_argument(
        "--mask",
        choices=MASKS,
        default=defaults.mask,
        help="and-ed with the model's own; sqrt(seq) wide, at least 16; default %(default)s",
    )
    tune.add_argument("--dtype", choices=DTYPES, help="default float16 on cuda, else float32")
    tune.add_argument("--device", help="cpu or cuda; default: cuda if there is one")
    tune.add_argument("--mode", choices=[mode for mode in MODES if mode], help="Inductor's mode")
    tune.add_argument(
        "--budget",
        type=float,
        default=defaults.budget_s,
        help="most seconds of measuring per graph; default %(default)g",
    )
    tune.add_argument(
        "--out", type=Path, help="the plan; default <model>-<batch>x<seq>.plan.json here"
    )
    tune.add_argument("--dump-dir", type=Path, help="write a dump there as well")
    tune.add_argument(
        "--seed", type=int, default=defaults.seed, help="of weights, inputs, search; default 0"
    )
    tune.set_defaults(run=_tune)


def _demo(arguments: argparse.Namespace, console: Console) -> int:
    settings = DemoSettings(
        model_dir=arguments.model,
        tokens=arguments.tokens,
        device=arguments.device,
        dump_dir=arguments.dump_dir,
    )
    run_demo(settings, console)
    return 0


def _explain(arguments: argparse.Namespace, console: Console) -> int:
    explanation = explain_dump(arguments.dump)
    if not explanation.graphs:
        raise StofPlanError(
            f"{arguments.dump} holds no dump; write one with options={{'dump_dir': ...}}"
        )
    console.print(str(explanation), markup=False, highlight=False, soft_wrap=True)
    return 0


def _inspect(arguments: argparse.Namespace, console: Console) -> int:
    given = [path for path in (arguments.dump, arguments.diff) if path is not None]
    if len(given) != 1 or (arguments.diff and (arguments.html or arguments.ceilings)):
        raise StofOptionError(
            "inspect takes one DUMP, or --diff A B without --html and --ceilings: "
            "`stof inspect --help` shows both"
        )
    if arguments.diff:
        first, second = arguments.diff
        changes = diff_reports(_reports(first), _reports(second))
        if arguments.json:
            _print_json(diff_json(changes, str(first), str(second)))
        else:
            print_diff(changes, str(first), str(second), console)
        return 0
    reports = _reports(arguments.dump, arguments.ceilings)
    if arguments.html:
        try:
            write_html(reports, str(arguments.dump), arguments.html)
        except OSError as error:
            raise StofOptionError(
                f"--html {arguments.html}: cannot be written ({error}); give the path of a file "
                "in a folder that can be written to"
            ) from error
    if arguments.json:
        _print_json(reports_json(reports, str(arguments.dump)))
    elif arguments.html:
        console.print(f"written: {arguments.html}", markup=False, highlight=False, soft_wrap=True)
    else:
        print_report(reports, console)
    return 0


def _reports(dump: Path, ceilings: Path | None = None) -> list[GraphReport]:
    records = load_dump(dump)
    most = None if ceilings is None else load_ceilings(ceilings, records)
    return [read_report(number, record, most) for number, record in enumerate(records)]


def _print_json(body: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(body, indent=1) + "\n")


def _tune(arguments: argparse.Namespace, console: Console) -> int:
    settings = TuneSettings(
        model=arguments.model,
        batch=arguments.batch,
        seq=arguments.seq,
        mask=arguments.mask,
        dtype=arguments.dtype,
        device=arguments.device,
        mode=arguments.mode,
        budget_s=arguments.budget,
        out=arguments.out,
        dump_dir=arguments.dump_dir,
        seed=arguments.seed,
    )
    run_tune(settings, console)
    return 0


def _cache(arguments: argparse.Namespace, console: Console) -> int:
    root = arguments.dir or store.default_root()
    if arguments.action == "clear":
        console.print(f"{store.clear(root)} entries deleted in {root}", markup=False)
        return 0
    table = Table(title=escape(str(root)))
    for column in ("environment", "kind", "key", "bytes"):
        table.add_column(column, overflow="fold")
    count = 0
    for entry in store.entries(root):
        table.add_row(
            escape(entry.environment), entry.kind, escape(entry.key), str(entry.size_bytes)
        )
        count += 1
    if count:
        console.print(table)
    else:
        console.print(f"nothing stored in {root}", markup=False)
    return 0


# -- doctor ---------------------------------------------------------------------------------------


def _doctor(arguments: argparse.Namespace, console: Console) -> int:
    names = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for name, version in versions().items():
        console.print(f"{name} {version}", highlight=False)
    for name in names:
        _print_device(console, device_facts(name), name)
    problems = _problems(torch.cuda.is_available())
    for problem in problems:
        console.print(f"problem: {problem}", markup=False, highlight=False)
    if not problems:
        console.print("all there: try `stof demo`", markup=False, highlight=False)
    return 1 if problems else 0


def _print_device(console: Console, facts: DeviceFacts, name: str) -> None:
    units = "multiprocessors" if facts.is_cuda else "threads"
    copy_gb_s, matmul_tflops = _ceilings(name, facts.is_cuda)
    line = (
        f"{name}: {facts.name}, {facts.runtime}, {facts.arch}, {facts.units} {units}; measured: "
        f"copy {copy_gb_s:.0f} GB/s, matrix product {matmul_tflops:.2f} TFLOP/s"
    )
    if facts.is_cuda:
        line += (
            f"; {facts.shared_memory_bytes} B shared memory, {facts.memory_bytes / 2**30:.0f} GiB"
        )
    console.print(line, markup=False, highlight=False)


def _ceilings(device: str, is_cuda: bool) -> tuple[float, float]:
    """Copy rate (read + written) in GB/s, and matrix rate in TFLOP/s (fp16 on CUDA, else fp32)."""
    size, edge = (2**30, 8192) if is_cuda else (2**26, 1024)
    dtype = torch.float16 if is_cuda else torch.float32
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = time_callable(lambda: target.copy_(source), [()], device)
    left = torch.randn(edge, edge, dtype=dtype, device=device)
    product = time_callable(lambda: left @ left, [()], device)
    return 2 * size / copied.median_us / 1e3, 2 * edge**3 / product.median_us / 1e6


def _problems(has_gpu: bool) -> list[str]:
    problems = []
    if "stof" not in torch._dynamo.list_backends(exclude_tags=()):
        problems.append(
            'torch.compile does not see backend="stof": install the package (pip install -e .)'
        )
    if not has_gpu and not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")):
        problems.append("no C++ compiler: Inductor needs one on a CPU (apt install g++)")
    for package in ("triton", "tilelang"):
        if has_gpu and importlib.util.find_spec(package) is None:
            problems.append(f"{package} is missing: GPU kernels need it (pip install {package})")
    root = store.default_root()
    parent = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        problems.append(f"{root} cannot be written to: give options={{'cache_dir': ...}}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
