"""``stof tune``: compile a model with a tuning budget, show what was chosen, save it as a plan."""

from __future__ import annotations

import logging
import math
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

from stof_compile.dump import Record, versions
from stof_compile.errors import StofOptionError
from stof_compile.explanation import Explanation, explain
from stof_compile.plan import Plan, PlanFile
from stof_compile.store import write_named
from stof_compile.tune_print import print_graph, say
from stof_compile.tune_subject import Subject, TuneSettings, check_settings, make_subject

if TYPE_CHECKING:
    from stof_compile.masks.spec import MaskSpec

RANDOM_FILL = 0.1
"""Share of the empty 64x64 tiles that BigBird fills, as in the benchmarks."""


@dataclass(frozen=True)
class TuneResult:
    """What came out.

    Args:
        explanation: of all graphs. plan: the file with the choices for all of them.
        seconds: of the whole first call: tuning, compiling and one run.
    """

    explanation: Explanation
    plan: Path
    seconds: float

    @property
    def trials(self) -> int:
        """Candidates of fusion measured in this run."""
        return sum(map(fusion_trials, self.explanation.graphs))


def run_tune(settings: TuneSettings, console: Console) -> TuneResult:
    """Tune a model, print what was chosen, and save the plan.

    Raises:
        StofOptionError: a setting is impossible here, or the model cannot be built.
        StofUnsupportedError: transformers is missing.
    """
    check_settings(settings)
    with torch.no_grad():
        subject = make_subject(settings)
        rule = mask_rule(settings.mask, subject.tokens or settings.seq)
        out = settings.out or Path(f"{subject.name}.plan.json")
        _describe(console, settings, subject)
        with _dump_folder(settings.dump_dir) as dump_dir, _shown():
            options: dict[str, Any] = {
                "tune_budget_s": float(settings.budget_s),
                "dump_dir": str(dump_dir),
                "seed": settings.seed,
            }
            options |= {"mode": settings.mode} if settings.mode else {}
            options |= {"mask": rule} if rule is not None else {}
            fast = torch.compile(subject.model, backend="stof", dynamic=False, options=options)
            started = time.perf_counter()
            fast(*subject.args, **subject.kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            explanation = explain(fast)
            save_plan(explanation.graphs, out)
    result = TuneResult(explanation, out, seconds)
    _print_result(console, result, settings)
    return result


def save_plan(records: Sequence[Record], out: Path) -> None:
    """Write the plans of all graphs, as their dumps hold them, into one file.

    Raises:
        StofOptionError: no graph was compiled, or the file cannot be written.
    """
    if not records:
        raise StofOptionError(
            "the model ran without any graph that could be compiled: there is nothing to tune"
        )
    plans: list[Plan] = []
    for record in records:
        path = Path(record.folder) / "plan.json"
        plans += PlanFile.from_json(path.read_text(encoding="utf-8"), f"plan {path}").plans
    try:
        write_named(out, PlanFile.of(plans).to_json())
    except OSError as error:
        raise StofOptionError(f"--out {out} cannot be written: {error}") from error


def mask_rule(name: str, tokens: int | None) -> MaskSpec | None:
    """The mask of a name, as wide as the benchmarks have it: ``sqrt(tokens)``, at least 16.

    Raises:
        StofOptionError: the width cannot be told.
    """
    from stof_compile import masks

    if name == "none":
        return None
    if name == "causal":
        return masks.causal()
    if tokens is None:
        raise StofOptionError(f"--mask {name} is sqrt(seq) wide: give --seq, the model's tokens")
    width = max(16, math.isqrt(tokens))
    if name == "sliding":
        return masks.sliding_window(width)
    if name == "longformer":
        return masks.longformer(window=width, global_tokens=width)
    return masks.bigbird(window=width, global_tokens=width, random_fill=RANDOM_FILL, seed=0)


def fusion_trials(record: Record) -> int:
    """Candidates that fusion measured in a compile."""
    found = (re.match(r"fusion measured (\d+) candidates", note) for note in record.notes)
    return sum(int(match.group(1)) for match in found if match)


@contextmanager
def _dump_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="stof-tune-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _shown() -> Iterator[None]:
    """Progress shows where the logger is enabled for INFO."""
    logger = logging.getLogger("stof_compile")
    before = logger.level
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)


def _describe(console: Console, settings: TuneSettings, subject: Subject) -> None:
    parameters = list(subject.model.parameters()) if isinstance(subject.model, nn.Module) else []
    count = sum(p.numel() for p in parameters) / 1e6
    kinds = sorted({f"{p.dtype}".removeprefix("torch.") + f" on {p.device}" for p in parameters})
    say(console, f"{subject.name}: {count:.1f} M parameters, {', '.join(kinds) or 'none'}")
    say(console, ", ".join(f"{name} {version}" for name, version in versions().items()))
    say(console, f"mask {settings.mask}, budget {settings.budget_s:g} s per graph")


def _print_result(console: Console, result: TuneResult, settings: TuneSettings) -> None:
    graphs = result.explanation.graphs
    for number, record in enumerate(graphs):
        if len(graphs) > 1:
            say(console, f"graph {number}:")
        print_graph(console, record)
    say(console, _spent(result))
    rule = "" if settings.mask == "none" else ", 'mask': the same mask"
    several = f" for all {len(graphs)} graphs" if len(graphs) > 1 else ""
    say(
        console,
        f"plan{several}: {result.plan}; torch.compile(model, backend='stof', options={{'plan': "
        f"'{result.plan}'{rule}}}) follows it without a search",
    )


def _spent(result: TuneResult) -> str:
    steps = Counter[str]()
    for record in result.explanation.graphs:
        steps.update(record.timings_s)
    tuning = f"{steps['stof']:.1f} s tuning"
    if "fusion" in steps:
        tuning += (
            f" ({steps['fusion']:.1f} s operators, {steps['measuring']:.1f} s of it measuring)"
        )
    return (
        f"{result.trials} candidates of fusion measured; {tuning}, {steps['inductor']:.1f} s in "
        f"Inductor, {result.seconds:.1f} s in all"
    )
