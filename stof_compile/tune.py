"""``stof tune``: compile a model with a tuning budget, show what was chosen, save it as a plan."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

from stof_compile.dump import Record, versions, write_dump
from stof_compile.dump_text import spent
from stof_compile.errors import StofOptionError, StofPlaceError
from stof_compile.explanation import Explanation, explain
from stof_compile.places import not_written
from stof_compile.plan import PlanFile
from stof_compile.store import write_atomic, write_named
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
        StofPlaceError: the plan or the dump cannot be written; mostly before the model is built.
        StofUnsupportedError: transformers is missing.
    """
    check_settings(settings)
    with torch.no_grad():
        subject = make_subject(settings)
        rule = mask_rule(settings.mask, subject.tokens or settings.seq)
        out = settings.out or Path(f"{subject.name}.plan.json")
        _describe(console, settings, subject)
        with TemporaryDirectory(prefix="stof-tune-") as dump_dir, _shown():
            options: dict[str, Any] = {
                "tune_budget_s": float(settings.budget_s),
                "dump_dir": str(dump_dir),  # the plans stand there, and nowhere else
                "seed": settings.seed,
            }
            options |= {"mode": settings.mode} if settings.mode else {}
            options |= {"mask": rule} if rule is not None else {}
            fast = torch.compile(subject.model, backend="stof", dynamic=False, options=options)
            started = time.perf_counter()
            fast(*subject.args, **subject.kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            result = TuneResult(explain(fast), out, time.perf_counter() - started)
            _print_result(console, result)
            plans = plans_of(result.explanation.graphs)  # their folder goes now
    save(result, plans, settings.dump_dir)
    _print_plan(console, result, settings, rule)
    return result


def plans_of(records: Sequence[Record]) -> list[PlanFile]:
    """The plan of each graph, as its dump holds it.

    Raises:
        StofOptionError: no graph was compiled. StofPlaceError: a dump was not written.
    """
    if not records:
        raise StofOptionError(
            "the model ran without any graph that could be compiled: there is nothing to tune"
        )
    plans = []
    for record in records:
        path = Path(record.folder) / "plan.json"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise StofPlaceError(
                f"what was chosen could not be kept until the end ({error}): make room in the "
                f"folder of temporary files ({gettempdir()}, TMPDIR sets it) and tune again; "
                "choices that were measured are in the cache"
            ) from error
        plans.append(PlanFile.from_json(text, f"plan {path}"))
    return plans


def save(result: TuneResult, plans: Sequence[PlanFile], dump_dir: Path | None) -> None:
    """Write the plans into one file and, where one is wanted, the dump.

    Args:
        plans: of the graphs, in their order.
    Raises:
        StofOptionError: one of the two could not be written; the other one was, if it could be.
    """
    written, failures = "", []
    try:
        together = PlanFile.of(plan for file in plans for plan in file.plans)
        write_named(result.plan, together.to_json())
        written = f" (the plan is in {result.plan})"
    except OSError as error:
        failures.append(not_written(f"--out {result.plan}", error))
    try:
        for record, plan in zip(result.explanation.graphs, plans, strict=True):
            record.folder = ""  # the one it was in goes
            if dump_dir is not None:
                record.options["dump_dir"] = str(dump_dir)
                write_atomic(write_dump(record, dump_dir) / "plan.json", plan.to_json())
    except OSError as error:
        failures.append(not_written(f"--dump-dir {dump_dir}", error))
    if failures:
        raise type(failures[0])("; ".join(str(failure.args[0]) for failure in failures) + written)


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


def _print_result(console: Console, result: TuneResult) -> None:
    graphs = result.explanation.graphs
    for number, record in enumerate(graphs):
        if len(graphs) > 1:
            say(console, f"graph {number}:")
        print_graph(console, record)
    say(console, _spent(result))


def _print_plan(
    console: Console, result: TuneResult, settings: TuneSettings, rule: MaskSpec | None
) -> None:
    graphs = result.explanation.graphs
    several = f" for all {len(graphs)} graphs" if len(graphs) > 1 else ""
    say(
        console,
        f"plan{several}: {result.plan}; the model is tuned without gradients (torch.no_grad) and "
        "follows it without a search, compiled so:",
    )
    options = {"plan": repr(str(result.plan))}
    options |= {"mode": repr(settings.mode)} if settings.mode else {}
    options |= {"mask": f"masks.{rule}"} if rule is not None else {}
    lines = ["import torch"]
    lines += ["from stof_compile import masks"] if rule is not None else []
    told = ", ".join(f"{name!r}: {value}" for name, value in options.items())
    lines += [
        f"options = {{{told}}}",
        "fast = torch.compile(model, backend='stof', dynamic=False, options=options)",
    ]
    for line in lines:  # from the edge, to be copied
        say(console, line)


def _spent(result: TuneResult) -> str:
    steps = Counter[str]()
    for record in result.explanation.graphs:
        steps.update(record.timings_s)
    parts = spent(steps)
    rest = result.seconds - sum(seconds for _, seconds in parts)
    parts.append(("capturing and one call", max(0.0, rest)))
    told = ", ".join(f"{seconds:.1f} s {what}" for what, seconds in parts)
    return f"{result.trials} candidates of fusion measured; {result.seconds:.1f} s in all: {told}"
