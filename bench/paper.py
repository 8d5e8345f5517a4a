"""All tables and figures of the STOF paper, and Graph Surgeon's table: which commands make them.

``paper`` runs other commands one after the other, each over cells of its own and into a file of its
own, so that everything they can do (a process for each cell, ``--resume``, ``--budget``,
``--gpus``) holds here as well. ``--quick`` is a reduced grid that has every kind of table and
figure in ten minutes; its folder then also gets the page and the pictures.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from columns import check_columns
from driver import BY_CELL, HERE, pending_units, run_command, settle
from results import say

MODELS = {"cuda": "distilbert,distilgpt2", "cpu": "distilbert-tiny,gpt2-tiny"}
QUICK_PEERS = {
    "cuda": "sdpa_mask,flex_default,flex_expert/b64-safe,flex_split/b64-safe,stof",
    "cpu": "sdpa_mask,flex_expert/b32,stof/option",
}
PATIENCE = {"cell_timeout": 500.0}  # of attention over long sequences
COMPARED = "compile-default,flex-default,stof-default"
NO_PICTURES = "matplotlib is missing (pip install -e '.[bench]'); --resume draws them later"
QUICK_PIPELINES = "fuse_transpose,qkv,all"
ABLATION = "compile-default,stof-default,stof-attention,stof-fusion,stof-broken-mha"


@dataclass(frozen=True)
class Part:
    """A command of the paper.

    Args:
        shows: tables and figures it is for. name: rows go to ``<name>-<device>.csv``.
        given: its command line, by the names of the parsed arguments.
        adds: to the rows of a part before it, whose file it shares.
    """

    shows: str
    command: str
    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    adds: bool = False


def full_parts(device: str) -> list[Part]:
    """Everything; hours, cell by cell."""
    long = {"model": "bert-base", "cells": "1x4096,1x8192,1x16384", "peers": COMPARED}
    if device == "cpu":
        long["cells"] = "1x2048,1x4096"
    grids = [("Figures 9 and 10", "table2", "attention"), ("Figures 9 and 10", "mha", ""),
             ("long sequences", "long", ""), ("head dims", "headdims", ""),
             ("single precision", "single", ""),
             ("scattered columns", "scattered", ""),
             ("documents and random tiles", "blocks", ""),
             ("no mask", "dense", "")]  # fmt: skip
    attention = [
        Part(shows, "attention", name or f"attention-{grid}", {"grid": grid, **PATIENCE})
        for shows, grid, name in grids
    ]
    if device == "cpu":
        attention = [Part("Figures 9 and 10", "cpu", "cpu")]
    return [
        Part("Table 2", "density", "density"),
        *attention,
        Part("Figure 11", "e2e", "e2e", {"model": "all"}),
        Part("Figure 12", "e2e", "e2e-ablation", {"model": "all", "peers": ABLATION}),
        Part("long sequences", "e2e", "e2e-long", long),
        Part("long sequences", "mask", "mask"),
        Part("Table 4 and Figure 13", "tuning", "tuning", {"model": "all"}),
        Part("Figure 13", "overhead", "overhead", {"model": "bert-base"}),
        Part("Figures 3 and 4", "operators", "operators", {"tune_budget": 40.0}),
        Part("Graph Surgeon", "passes", "passes"),
    ]


def quick_parts(device: str) -> list[Part]:
    """Two models, two settings, one tuning; the settings are (1,128) and (8,512), on a CPU (1,64)
    and (2,128).

    If the seconds run out, every kind has rows before models and settings are complete.
    """
    cuda = device == "cuda"
    suffix = "" if cuda else "-cpu"
    models, peers = MODELS[device], QUICK_PEERS[device]
    budget: dict[str, Any] = {"tune_budget": 5.0 if cuda else 3.0}
    # a CPU has no cores left for another way's compiler
    turns = {"turn_seconds": 1.0 if cuda else 5.0, "compile_together": cuda}
    settings = ("1x128", "8x512") if cuda else ("1x64", "2x128")
    one = {"model": models.split(",")[0], "cells": settings[0], **budget}
    ways = {**one, **turns}
    long = {**ways, "cells": "1x4096" if cuda else "1x1024"}
    four = {**ways, "model": models, "cells": ",".join(settings)}
    operators = {
        "cells": "bias_norm/1x128x512,linear_norm/1x128x512" if cuda else "1x128x256",
        "tune_budget": 3.0,
    }
    # what is not decided when these seconds end is decided in the process that should be warm
    tuning = {**one, "repeats": 1, "tune_budget": 20.0 if cuda else 3.0}
    steps = {"cells": "build sliding,attention sliding", "length": 131072 if cuda else 2048}
    # last on a CPU, where its C++ takes most of a minute to compile
    flex = Part("Figure 11", "e2e", "e2e", {**ways, "peers": "flex-default"}, adds=True)
    return [
        Part("Table 2", "density", "density"),
        Part("Figures 3 and 4", "operators", "operators", operators),
        Part("Graph Surgeon", "passes", "passes", {**one, "peers": QUICK_PIPELINES}),
        # with FlexAttention of Figure 11, for which a cell of its own would make the model again
        Part("Figure 12", "e2e", "e2e", {**ways, "peers": ABLATION + ",flex-default" * cuda}),
        Part("long sequences", "attention", "attention-long",
             {"grid": f"quick-long{suffix}", "peers": peers, "warm": 0}),
        Part("long sequences", "e2e", "e2e-long",
             {**long, "peers": "compile-default,stof-default"}),
        Part("long sequences", "mask", "mask", steps),
        Part("Table 4 and Figure 13", "tuning", "tuning", tuning),
        Part("Figures 9 and 10", "attention", "attention",
             {"grid": f"quick{suffix}", "peers": peers, "warm": 8 if cuda else 0}),
        Part("Figure 11", "e2e", "e2e", {**four, "peers": "compile-default,stof-default"},
             adds=True),
        *[flex] * (not cuda),
    ]  # fmt: skip


def run_paper(args: argparse.Namespace) -> int:
    """Run the parts in order while the budget lasts; returns the number of failed cells."""
    started = time.monotonic()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = out_folder(args)
    if not (args.quick or args.resume or args.out) and any(folder.glob(f"*-{args.device}.csv")):
        raise SystemExit(
            f"rows in {folder}: --resume goes on with them, --out DIR begins elsewhere"
        )
    folder.mkdir(parents=True, exist_ok=True)
    writes = args.quick or args.out is not None
    if writes and not can_draw():
        say(f"no pictures will be drawn: {NO_PICTURES}")
    args.seed = random.randrange(2**31) if args.seed is None else args.seed
    args.caches = args.caches or Path(tempfile.mkdtemp(prefix="stof-bench-"))
    failed, told = 0, []
    parts = (quick_parts if args.quick else full_parts)(args.device)
    if args.quick and args.resume:  # what has no rows at all comes first
        parts.sort(key=lambda part: (folder / f"{part.name}-{args.device}.csv").exists())
    for part in parts if args.resume else ():  # before hours are spent on the first
        check_columns(part_arguments(args, part, folder))
    for part in parts:
        one = part_arguments(args, part, folder)
        one.budget = args.budget - (time.monotonic() - started)
        say(f"== {part.shows}: {part.command}, {one.budget:.0f} s left")
        if one.budget < 20 and not part.adds and not args.resume:
            told.append((part, -1, 0.0))  # its file stays as it is
            continue
        began = time.monotonic()
        failed += run_command(one)
        one.resume = True
        told.append((part, len(pending_units(one)), time.monotonic() - began))
    for part, left, seconds in told:
        state = "not begun" if left < 0 else f"{left} cells left" if left else "complete"
        say(f"  {part.shows:22s} {part.command:10s} {state:12s} {seconds:5.0f} s")
    if any(left for _, left, _ in told):
        say("run it again with --resume for the rest")
    say(f"{time.monotonic() - started:.0f} s in all; rows in {folder}")
    if writes:
        write_folder(folder)
    return min(failed, 100)


def out_folder(args: argparse.Namespace) -> Path:
    """Where the files of all parts go."""
    if args.out is not None:
        return Path(args.out).resolve()
    return HERE / "out" / f"quick-{args.device}" if args.quick else HERE / "results"


def part_arguments(args: argparse.Namespace, part: Part, folder: Path) -> argparse.Namespace:
    """The command line of a part: what the paper's leaves to it, and what it says itself."""
    one = argparse.Namespace(**vars(args))
    for name, value in {
        "grid": None,
        "cells": None,
        "peers": None,
        "model": None,
        **part.given,
    }.items():
        setattr(one, name, value)
    one.command = part.command
    one.out = folder / f"{part.name}-{args.device}.csv"
    one.caches = args.caches / part.command
    one.resume = args.resume or part.adds
    one.gpus = args.gpus if part.command in BY_CELL else 1
    checked = argparse.Namespace(**vars(one))
    settle(checked)
    return checked


def write_folder(folder: Path) -> None:
    """The page and the pictures of a folder of rows, into that folder."""
    from page import render
    from plot import draw_all

    drawn = can_draw()
    if drawn:
        draw_all(folder, folder)
    (folder / "tables.md").write_text(render(folder, pictures="." if drawn else None))
    pictures = "pictures beside it" if drawn else f"no pictures: {NO_PICTURES}"
    say(f"tables in {folder / 'tables.md'}, {pictures}")


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None
