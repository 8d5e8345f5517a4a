"""The bench of the search: every time of a segment that tuning asks for is taken here.

A candidate is a template with a config, or "inductor": the segment as the rest of the graph would
run it without us. Both are checked against the fp64 reference before they are timed, on operands
made from the recipe alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from stof_compile.budget import Budget
from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, fp32_products, run_recipe
from stof_compile.measure import (
    ErrorReport,
    Timing,
    check_close,
    real_tensors,
    sample_us,
    time_as_in_use,
    time_callable,
)
from stof_compile.search.candidate import LIBRARY, Candidate, candidate_of, closest_to
from stof_compile.search.library import library_call
from stof_compile.search.nan_check import keeps_nan
from stof_compile.search.operands import random_operand
from stof_compile.search.scheme_calls import scheme_calls
from stof_compile.search.segment_workers import SegmentWorkers
from stof_compile.search.trial import Trial, TrialTable
from stof_compile.templates.base import TILELANG, Template

log = logging.getLogger(__name__)

Result = Tensor | tuple[Tensor, ...]
"""What a call of a candidate gives; parts of it side by side, as library_call may."""

TRIAL_S = 0.02  # of replaying, after compilation: about forty samples
ROUND_S = 0.02
# seconds of a turn of a comparison, and turns of each scheme. At its limit of power a GPU's clock
# goes up and down for some tenths of a second after another scheme began: short turns see little of
# what a scheme draws (bench/results/hopper-linear-h200.md)
TURNS, LONG_TURNS = (0.04, 4), (0.2, 2)
FIRST_TRIED = 8  # configs of a segment before the first that takes long to compile
LEAST_SETS, MAX_SETS = 3, 64  # three: packed projections that are left apart
ERROR_SCALE = 2.0  # on the tolerance for each contraction: its result was rounded in between


class SegmentBench(Protocol):
    """What the tuner needs of a bench; tests pass their own.

    Attributes:
        budget: seconds and trials left.
    """

    budget: Budget

    def candidates(self, recipe: Recipe) -> list[Candidate]:
        """Every candidate of the templates that accept a recipe. Each template's first config
        leads, then the templates take turns, each with what it estimates to be fastest, or else
        what is closest to its first config; what takes long to compile comes late.
        """

    def offers(self, recipe: Recipe, candidate: Candidate) -> bool:
        """Whether a candidate is among ``candidates``, without listing them."""

    def prepare(self, recipe: Recipe, candidates: Sequence[Candidate]) -> None:
        """Compile candidates that will be asked for next."""

    def trial(self, recipe: Recipe, candidate: Candidate) -> Trial:
        """The trial of a candidate, measured now or before; one that failed, and is not kept,
        where the budget ended before it could be.
        """

    def known(self, recipe: Recipe, candidate: Candidate) -> Trial | None:
        """The trial of a candidate if it was measured before."""

    def compare(
        self, schemes: Sequence[Sequence[tuple[Recipe, Candidate]]], long_turns: bool = False
    ) -> list[float]:
        """Microseconds of whole schemes, measured in turns and under load.

        Args:
            long_turns: give the power that a scheme draws time to move a GPU's clock.
        """

    def first(self, recipe: Recipe) -> Candidate | None:
        """What rules choose among the templates, None where no template accepts."""


@dataclass
class DeviceBench:
    """A bench on a real device.

    Args:
        templates: those that may be used. facts, device: where they run.
        table: trials of this and other processes. budget: seconds and trials left.
        seed: of the random operands. workers: processes that compile, ended by ``release``.
    Attributes:
        measuring_s: seconds spent compiling, checking and timing candidates. first_calls_s: of
            these, calling candidates for the first time and checking what comes out, which
            compiles what no worker has; timing_s: timing them, alone and in turns.
        first_calls: template -> seconds of each first call of a candidate.
    """

    templates: Sequence[Template]
    facts: DeviceFacts
    device: torch.device
    table: TrialTable
    budget: Budget
    seed: int = 0
    workers: SegmentWorkers = field(default_factory=SegmentWorkers)
    measuring_s: float = 0.0
    first_calls_s: float = 0.0
    timing_s: float = 0.0
    first_calls: dict[str, list[float]] = field(default_factory=dict)
    _operands: dict[str, list[tuple[Tensor, ...]]] = field(default_factory=dict)
    _references: dict[str, Tensor] = field(default_factory=dict)
    _library: dict[str, Callable[..., Result]] = field(default_factory=dict)

    @property
    def compiling_s(self) -> float:
        """Seconds of ``measuring_s`` spent waiting for workers."""
        return self.workers.waited_s

    def candidates(self, recipe: Recipe) -> list[Candidate]:
        """See :class:`SegmentBench`."""
        spaces: dict[bool, list[list[Candidate]]] = {False: [], True: []}  # compiled quickly, not
        for template in self.templates:
            if not self._runs(template, recipe):
                continue
            first = candidate_of(template.name, template.first(recipe, self.facts))
            offered = template.space(recipe, self.facts)
            configs = [candidate_of(template.name, config) for config in offered.configs()]
            if offered.kept is None:  # not ranked by an estimate
                configs = closest_to(first, configs)
            spaces[template.name.startswith(TILELANG)].append(
                list(dict.fromkeys([first, *configs]))
            )
        quick, slow = _in_turns(spaces[False]), _in_turns(spaces[True])
        late = len(spaces[False]) + FIRST_TRIED
        return [
            *quick[:late],
            *slow[: len(spaces[True])],
            *quick[late:],
            *slow[len(spaces[True]) :],
        ]

    def offers(self, recipe: Recipe, candidate: Candidate) -> bool:
        """See :class:`SegmentBench`."""
        for template in self.templates:
            if template.name == candidate.template and self._runs(template, recipe):
                settings = candidate.settings
                if settings in template.space(recipe, self.facts):  # first ranks: asked last
                    return True
                return settings == template.first(recipe, self.facts)
        return False

    def first(self, recipe: Recipe) -> Candidate | None:
        """See :class:`SegmentBench`."""
        for template in self.templates:
            if self._runs(template, recipe):
                return candidate_of(template.name, template.first(recipe, self.facts))
        return None

    def known(self, recipe: Recipe, candidate: Candidate) -> Trial | None:
        """See :class:`SegmentBench`."""
        return self.table.known(recipe.key, candidate.template, candidate.settings)

    def prepare(self, recipe: Recipe, candidates: Sequence[Candidate]) -> None:
        """Have candidates compiled by the pool; each is waited for when it is measured."""
        if self.device.type != "cuda" or self.budget.spent:
            return
        unknown = [c for c in candidates if self.known(recipe, c) is None]
        libraries = {t.name for t in self.templates if t.is_library}
        self.workers.send(recipe, unknown, self.device, libraries)

    def trial(self, recipe: Recipe, candidate: Candidate) -> Trial:
        """See :class:`SegmentBench`."""

        def run() -> tuple[ErrorReport, Timing | None]:
            began = time.monotonic()
            try:
                call = self._call(recipe, candidate)
                sets = self._sets(recipe)
                report = self._check(recipe, call, sets[0], candidate)
            finally:
                called = time.monotonic()
                self.first_calls_s += called - began
                self.first_calls.setdefault(candidate.template, []).append(called - began)
            if not report.ok:
                return report, None
            with self._timed():
                return report, time_callable(call, sets, self.device, budget_s=TRIAL_S)

        started = time.monotonic()
        with self._counted():
            known = self.known(recipe, candidate) is not None
            if not known and self.workers.is_busy_with(recipe, candidate):
                self.table.trials(recipe.key)  # another process may have measured it meanwhile
                known = self.known(recipe, candidate) is not None
            if not known and not self.workers.wait(recipe, candidate, self.budget):
                asked = recipe.key, candidate.template, candidate.config
                return Trial(*asked, "refused", reason="the time ended before it was compiled")
            trial = self.table.measure(
                recipe.key, candidate.template, candidate.settings, run, self.budget
            )
        what = " ".join(step.kind for step in recipe.steps)
        seconds = time.monotonic() - started
        log.debug("%s, %s: %.1f us, after %.2f s", what, candidate, trial.cost_us, seconds)
        return trial

    def compare(
        self, schemes: Sequence[Sequence[tuple[Recipe, Candidate]]], long_turns: bool = False
    ) -> list[float]:
        """See :class:`SegmentBench`."""
        turn_s, rounds = LONG_TURNS if long_turns and self.device.type == "cuda" else TURNS
        with self._counted():
            # once each, and the same for all schemes: ``_sets`` holds those of a few recipes only
            held: dict[str, list[tuple[Tensor, ...]]] = {}
            for recipe, _ in (pair for scheme in schemes for pair in scheme):
                if recipe.key not in held:
                    held[recipe.key] = self._sets(recipe)
            bound = [
                [(recipe, self._call(recipe, c)) for recipe, c in scheme] for scheme in schemes
            ]
            most = max(map(len, held.values()), default=1)
            turns = [(turn,) for turn in range(min(most, 8))]
            with self._timed():
                timings = time_as_in_use(
                    scheme_calls(bound, held), turns, self.device, turn_s=turn_s, rounds=rounds
                )
        return [timing.median_us for timing in timings]

    def operands(self, recipe: Recipe) -> tuple[Tensor, ...]:
        """One set of random operands of a recipe."""
        return self._sets(recipe)[0]

    def rounds(
        self, fns: Sequence[Callable[..., Any]], operands: tuple[Tensor, ...], rounds: int
    ) -> list[list[list[float]]]:
        """Samples of several functions, taken in turns, in microseconds.

        Returns:
            For each function one list of samples a round. Every other round goes backwards
            (ABBA), so that a drift of the machine favours none.
        """
        taken: list[list[list[float]]] = [[] for _ in fns]
        with self._counted(), self._timed():
            for number in range(rounds + 1):  # the first one warms up
                order = range(len(fns)) if number % 2 else reversed(range(len(fns)))
                for index in order:
                    samples = sample_us(fns[index], [operands], self.device, budget_s=ROUND_S)
                    if number:
                        taken[index].append(samples)
        return taken

    def release(self) -> None:
        """Give the memory of operands and references back, and end the workers."""
        self.workers.close()
        self._operands.clear()
        self._references.clear()

    # -- helpers -----------------------------------------------------------------------------------

    def _runs(self, template: Template, recipe: Recipe) -> bool:
        """Whether a template takes a recipe whose operands are where this bench is."""
        here = all(operand.device == self.device.type for operand in recipe.operands)
        return here and template.accepts(recipe, self.facts)

    def _call(self, recipe: Recipe, candidate: Candidate) -> Callable[..., Result]:
        if candidate.template == LIBRARY:
            if recipe.key not in self._library:
                with self._modes():
                    self._library[recipe.key] = library_call(recipe, self._sets(recipe)[0])
            return self._library[recipe.key]
        (template,) = (t for t in self.templates if t.name == candidate.template)
        call = template.build(recipe, candidate.settings)
        return lambda *operands: call.run(operands)

    def _check(
        self, recipe: Recipe, call: Callable[..., Any], operands: tuple[Tensor, ...], c: Candidate
    ) -> ErrorReport:
        with self._modes():
            foreign = any(t.is_library and t.name == c.template for t in self.templates)
            if foreign and not keeps_nan(recipe, call, operands):
                return ErrorReport(math.inf, math.inf, False)
            if recipe.key not in self._references:
                if len(self._references) > 4:  # they are as large as results in fp64
                    self._references.clear()
                wide = run_recipe(recipe, operands, torch.float64)
                self._references[recipe.key] = wide
            scale = ERROR_SCALE ** max(1, recipe.contractions)
            # the second launch goes past Triton, the third past all checks: bound_launch.py
            for _ in range(2 if self.device.type == "cuda" else 0):
                call(*operands)
            out = call(*operands)
            if isinstance(out, tuple):
                shape = recipe.result.shape
                out = torch.cat([part.flatten(0, -2) for part in out], -1).reshape(shape)
            dtype = recipe.result.dtype
            if dtype == torch.float32 and recipe.contractions and fp32_products() == "tf32":
                dtype = torch.float16  # TF32 has its mantissa
            return check_close(out, self._references[recipe.key], dtype, scale)

    def _sets(self, recipe: Recipe) -> list[tuple[Tensor, ...]]:
        """Operands to rotate over: weights of their own in each set, all else shared.

        In a model a weight comes from memory, since a pass over the others has gone through the
        cache; what the op before has written is still there, as far as it fits.
        """
        if recipe.key not in self._operands:
            while len(self._operands) > 3:
                self._operands.pop(next(iter(self._operands)))
            weights = {
                step.inputs[1].index
                for step in recipe.steps
                if step.kind == "linear" and step.inputs[1].kind == "operand"
            }
            one = sum(recipe.operands[i].nbytes for i in weights)
            shared = recipe.nbytes - one
            wanted = 3 * self.facts.l2_bytes - shared
            count = max(LEAST_SETS, min(MAX_SETS, math.ceil(wanted / one))) if one else 1
            count = count if self.facts.is_cuda else 1
            with self._modes():
                generator = torch.Generator(self.device).manual_seed(self.seed)
                first = tuple(
                    random_operand(recipe, i, self.device, generator)
                    for i in range(len(recipe.operands))
                )
                self._operands[recipe.key] = [first] + [
                    tuple(
                        random_operand(recipe, i, self.device, generator) if i in weights else value
                        for i, value in enumerate(first)
                    )
                    for _ in range(count - 1)
                ]
        return self._operands[recipe.key]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.measuring_s += time.monotonic() - started

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.timing_s += time.monotonic() - started

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with real_tensors(), torch.no_grad():
            yield


def _in_turns(spaces: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The first of each space, then the second of each, and so on."""
    return [c for c in chain.from_iterable(zip_longest(*spaces)) if c is not None]
