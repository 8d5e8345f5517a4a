"""Figures 3 and 4 of the STOF paper: operators fused and apart, settings tuned before and after.

Three operators of a Transformer layer over eight sizes ``batch x tokens x hidden``: *bias_norm*
(bias, LayerNorm), *linear_norm* (linear, LayerNorm) and *linear_linear* (linear, GELU, linear, four
times as wide between). ``detached_us``: every operation a kernel of its own (the library's product,
Inductor for the rest). ``inductor_us``: torch.compile over all of them. ``fused_us``: the best of
STOF's templates, ``fused_config`` its settings, tuned on the fused kernel. ``before_us``: the same
kernel with the settings nearest to those that were best for the heaviest operation alone. All four
are timed in turns by CUDA-graph replay (plain calls on a CPU). Errors are the largest relative ones
against fp64, of the kernels that are timed; ``detached_rel`` is that of the worst of several, each
on operands of its own. ``fused_tried`` and ``single_tried`` say how many candidates were measured
of those drawn (``5/32``): few where ``--tune-budget`` ended it, which the log says too.

The paper's own list of sizes (its Table 3) is not among our sources: these are its three settings
and one between, by two hidden widths, eight as in its figures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import timing
import torch
from machine import conditions
from results import append_row, log_event, read_rows, say
from stof_compile.templates import TEMPLATES

from stof_compile.budget import Budget
from stof_compile.device import device_facts
from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec
from stof_compile.search.bench import DeviceBench
from stof_compile.search.candidate import LIBRARY, Candidate
from stof_compile.search.draw import draw_candidates
from stof_compile.search.trial import TrialTable
from stof_compile.triton_environment import settle_triton_environment

FIELDS = (
    "cell", "operator", "batch", "seq", "hidden", "dtype",
    "detached_us", "inductor_us", "fused_us", "before_us",
    "detached_rel", "inductor_rel", "fused_rel", "before_rel",
    "fused_template", "fused_config", "fused_tried",
    "single_template", "single_config", "single_tried", "before_config",
    "trials", "tuning_s", "device", "torch", "triton", "stof", "date",
)  # fmt: skip
OPERATORS = ("bias_norm", "linear_norm", "linear_linear")
SIZES = {
    "cuda": tuple((b, s, h) for b, s in ((1, 128), (1, 1024), (8, 512), (16, 2048))
                  for h in (512, 1024)),
    "cpu": ((1, 128, 256), (1, 512, 256)),
}  # fmt: skip
TRIALS = 32  # candidates measured of each recipe, every template's first choice among them
TRIES = 3  # settings taken over, the nearest first, until one runs


@dataclass(frozen=True)
class Problem:
    """An operator of one size.

    Args:
        whole: all of it. parts: its operations one by one. heaviest: the part whose settings
            Figure 4 takes over.
    """

    whole: Recipe
    parts: tuple[Recipe, ...]
    heaviest: int


class Tuned(NamedTuple):
    """What came of tuning a recipe.

    Args:
        best: the fastest candidate, None where none runs. tried, drawn: how many were measured, of
            how many.
    """

    best: Candidate | None
    tried: int
    drawn: int

    @property
    def told(self) -> str:
        """``tried/drawn``."""
        return f"{self.tried}/{self.drawn}"


def cell_names(device: str) -> list[str]:
    """``operator/BxSxH`` of all cells."""
    return [f"{operator}/{b}x{s}x{h}" for operator in OPERATORS for b, s, h in SIZES[device]]


def operator_units(args: argparse.Namespace) -> list[str]:
    """Cells without a row, of those that ``--cells`` names by operator, size or both.

    Raises:
        SystemExit: a name fits no cell.
    """
    names = cell_names(args.device)
    if args.cells:
        words = args.cells.split(",")
        unknown = [w for w in words if not any(w in (n, *n.split("/")) for n in names)]
        if unknown:
            raise SystemExit(f"no cell {', '.join(unknown)}; cells: {', '.join(names)}")
        names = [n for n in names if any(w in (n, *n.split("/")) for w in words)]
    done = {row["cell"] for row in read_rows(args.out)}
    return [name for name in names if name not in done]


def make_problem(
    operator: str, batch: int, seq: int, hidden: int, dtype: torch.dtype, device: str
) -> Problem:
    """The recipes of an operator."""
    builder = _Builder(dtype, device)
    x = builder.operand(batch, seq, hidden)
    if operator == "bias_norm":
        builder.norm(builder.step("add", (x, builder.operand(hidden)), (batch, seq, hidden)))
        return builder.problem(heaviest=1)
    if operator == "linear_norm":
        builder.norm(builder.linear(x, hidden))
        return builder.problem(heaviest=0)
    assert operator == "linear_linear", f"no operator {operator!r}"
    inner = builder.linear(x, 4 * hidden)
    gelu = builder.step("activation", (inner,), (batch, seq, 4 * hidden), (("name", "gelu"),))
    builder.linear(gelu, hidden)
    return builder.problem(heaviest=0)


class _Builder:
    """Writes a recipe step by step."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self._operands: list[TensorSpec] = []
        self._steps: list[Step] = []

    def operand(self, *shape: int) -> Ref:
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        self._operands.append(TensorSpec(shape, stride, self._dtype, self._device))
        return Ref("operand", len(self._operands) - 1)

    def step(
        self, kind: str, inputs: tuple[Ref, ...], shape: tuple[int, ...], attrs: Any = ()
    ) -> Ref:
        self._steps.append(Step(kind, inputs, shape, self._dtype, attrs))
        return Ref("step", len(self._steps) - 1)

    def linear(self, x: Ref, width: int) -> Ref:
        shape = self._shape(x)
        inputs = (x, self.operand(width, shape[-1]), self.operand(width))
        return self.step("linear", inputs, (*shape[:-1], width))

    def norm(self, x: Ref) -> Ref:
        shape = self._shape(x)
        attrs = (("eps", 1e-5), ("has_bias", True), ("has_weight", True), ("width", shape[-1]))
        inputs = (x, self.operand(shape[-1]), self.operand(shape[-1]))
        return self.step("layer_norm", inputs, shape, attrs)

    def problem(self, heaviest: int) -> Problem:
        whole = Recipe(tuple(self._operands), tuple(self._steps))
        return Problem(whole, tuple(self._alone(step) for step in self._steps), heaviest)

    def _alone(self, step: Step) -> Recipe:
        part = _Builder(self._dtype, self._device)
        inputs = tuple(part.operand(*self._shape(ref)) for ref in step.inputs)
        part.step(step.kind, inputs, step.shape, step.attrs)
        return Recipe(tuple(part._operands), tuple(part._steps))

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        held = self._operands if ref.kind == "operand" else self._steps
        return held[ref.index].shape


def run_operator(args: argparse.Namespace, device: torch.device) -> None:
    """Tune and time one cell."""
    operator, size = args.worker.split("/")
    batch, seq, hidden = (int(n) for n in size.split("x"))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    problem = make_problem(operator, batch, seq, hidden, dtype, device.type)
    settle_triton_environment(device)
    facts = device_facts(device)
    templates = [t for t in TEMPLATES if facts.kind in t.device_kinds]
    budget = Budget(args.tune_budget)
    bench = DeviceBench(templates, facts, device, TrialTable(None), budget, args.seed)
    with timing.own_caches(args.caches, "operators"):
        try:
            row = measure(problem, bench, args.seed, (args.out, args.worker))
        finally:
            bench.release()
    known = {"operator": operator, "batch": batch, "seq": seq, "hidden": hidden}
    row |= {"cell": args.worker, **known, "dtype": str(dtype).removeprefix("torch.")}
    append_row(args.out, FIELDS, {**row, **conditions(device)})
    times = ", ".join(f"{n} {row[f'{n}_us']}" for n in ("detached", "inductor", "fused", "before"))
    say(f"  {args.worker}: {times} us, {row['trials']} trials")


def measure(problem: Problem, bench: DeviceBench, seed: int, where: tuple[Any, str]) -> dict:
    """The columns of a row that are measured.

    Args:
        where: CSV and cell, for the log of what is missing.
    """
    started = time.monotonic()
    whole, single = problem.whole, problem.parts[problem.heaviest]
    # in this order: the fused kernel gets the larger part of the seconds
    fused = tuned(bench, whole, seed, (*where, "stof", "fused"))
    alone = before = None
    if fused.best is not None:
        alone = tuned(bench, single, seed, (*where, "stof", "single"))
        if alone.best is not None:
            before = taken_over(bench, whole, fused.best, alone.best)
            if before is None:
                log_event(*where, "stof", "before", "missing", "settings taken over do not run")
    schemes: dict[str, list[tuple[Recipe, Candidate]]] = {
        "detached": [(part, Candidate(LIBRARY)) for part in problem.parts],
        "inductor": [(whole, Candidate(LIBRARY))],
    }
    row: dict[str, Any] = {f"{name}_us": "" for name in (*schemes, "fused", "before")}
    for name, candidate in (("fused", fused.best), ("before", before)):
        if candidate is not None:
            schemes[name] = [(whole, candidate)]
            row[f"{name}_config"] = _text(candidate)
    for name, scheme in list(schemes.items()):
        trials = [bench.trial(*pair) for pair in scheme]
        failed = [trial.reason for trial in trials if trial.status != "measured"]
        if failed:
            log_event(*where, name, "-", "error", failed[0])
            del schemes[name]
        else:
            row[f"{name}_rel"] = max(trial.error for trial in trials)
    row["tuning_s"] = time.monotonic() - started
    times = bench.compare(list(schemes.values()))
    row |= {f"{name}_us": us for name, us in zip(schemes, times, strict=True)}
    row |= {"fused_template": fused.best.template} if fused.best else {}
    if alone is not None and alone.best is not None:
        row |= {"single_template": alone.best.template, "single_config": _text(alone.best)}
    tried = {"fused_tried": fused.told, "single_tried": alone.told if alone else ""}
    return {**row, **tried, "trials": bench.table.measured}


def tuned(bench: DeviceBench, recipe: Recipe, seed: int, where: tuple[Any, str, str, str]) -> Tuned:
    """Measure some candidates of the templates while there are seconds, one at least.

    Args:
        where: for the log, which hears of a recipe that none runs or that was hardly tuned.
    """
    space = bench.candidates(recipe)
    drawn = draw_candidates(space, TRIALS, f"{seed}", library=False, slow=True)
    bench.prepare(recipe, drawn)
    timed: list[tuple[float, Candidate]] = []
    for candidate in drawn:
        if bench.budget.spent and any(math.isfinite(us) for us, _ in timed):
            break
        timed.append((bench.trial(recipe, candidate).cost_us, candidate))
    finite = [(us, candidate) for us, candidate in timed if math.isfinite(us)]
    best = min(finite, key=lambda pair: pair[0])[1] if finite else None
    result = Tuned(best, len(timed), len(drawn))
    if not drawn:
        log_event(*where, "missing", "no template of STOF takes it here")
    elif best is None:
        log_event(*where, "error", f"no candidate runs, of {result.told} tried")
    elif len(timed) < len(drawn):
        log_event(*where, "note", f"{result.told} candidates tried when the seconds were spent")
    return result


def taken_over(
    bench: DeviceBench, whole: Recipe, fused: Candidate, alone: Candidate
) -> Candidate | None:
    """The fused kernel with the settings of the operation alone, or the nearest that run."""
    space = [c for c in bench.candidates(whole) if c.template == fused.template]
    for candidate in nearest(space, alone)[:TRIES]:
        if math.isfinite(bench.trial(whole, candidate).cost_us):
            return candidate
    return None


def nearest(space: Sequence[Candidate], alone: Candidate) -> list[Candidate]:
    """Candidates by how near their settings are to another kernel's, where both have them.

    A number counts by how often it has to be doubled, all else by being different.
    """

    def far(candidate: Candidate) -> float:
        settings, wanted = candidate.settings, alone.settings
        return sum(_far(settings[name], wanted[name]) for name in settings.keys() & wanted.keys())

    return sorted(space, key=far)


def _far(a: Any, b: Any) -> float:
    numbers = all(type(v) in (int, float) and v > 0 for v in (a, b))
    return abs(math.log2(a / b)) if numbers else float(a != b)


def _text(candidate: Candidate) -> str:
    return " ".join(f"{name}={value}" for name, value in candidate.config)
