"""Which products are computed together with the rotations behind them.

The candidate "as it was" is the product and what Inductor makes of the rotations of its parts,
each a kernel of its own; a template that computes the product alone faster is counted for it. The
decision is a plan of the two operations: one segment, of a template or left to Inductor.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stof_compile.errors import StofPlanError, StofUnsupportedError
from stof_compile.fusion.recipe import Recipe, fp32_products
from stof_compile.plan import ChainPlan, SegmentPlan
from stof_compile.search.candidate import LIBRARY, Candidate, candidate_of
from stof_compile.search.context import TuningContext
from stof_compile.search.draw import draw_candidates
from stof_compile.search.segments import finite
from stof_compile.search.stage1 import SAMPLES
from stof_compile.search.stage2 import sample_configs
from stof_compile.templates.space import near

log = logging.getLogger("stof_compile")

STORE_KIND = "rotations"
KINDS = ("linear", "rope")
CODE = "0"  # the scheme of two operations that are one segment
MIN_GAIN = 0.01  # share of the time that has to be saved
HOPELESS = 1.15  # how much slower the best of the first draws may be for the search to go on


def rope_key(recipe: Recipe) -> str:
    """The key of a decision, in plans and in the store."""
    return f"{recipe.key} {fp32_products()} rope"


def choose_rotation(recipe: Recipe, ctx: TuningContext) -> ChainPlan | None:
    """Decide about all products with rotations of one recipe.

    Returns:
        The decision; None where no template takes the recipe, or the user's plan says nothing.
    Raises:
        StofPlanError: the user's plan has a config that does not exist here.
    """
    if ctx.plan is not None:
        return _from_plan(recipe, ctx)
    if ctx.forced:
        return None  # the user's scheme is for chains
    held = _held(recipe, ctx)  # asked first: listing candidates takes time
    if held is not None:
        return held
    space = ctx.bench.candidates(recipe)
    if not space:
        return None
    if not ctx.measure:
        return _left("nothing may be measured", "rules")
    if ctx.budget.spent:
        return _left("the time budget was spent", "rules")
    choice = _Choice(recipe, space, ctx)
    try:
        if ctx.store is None:
            return choice.plan()
        key = rope_key(recipe)
        with ctx.store.lock(f"{STORE_KIND}/{key}"):  # another process may be deciding it
            plan = _held(recipe, ctx)
            if plan is None:
                plan = choice.plan()
                if plan.source == "measured":
                    ctx.store.put(STORE_KIND, key, plan.to_dict())
    except KeyboardInterrupt:
        log.warning("tuning interrupted: going on with the best that was measured")
        ctx.budget.stop()
        return _left("interrupted", "rules")
    return plan


def prepare_rotations(recipes: Sequence[Recipe], ctx: TuningContext) -> None:
    """Have the candidates compiled that :func:`choose_rotation` will ask for first."""
    if ctx.plan is not None or ctx.forced or not ctx.measure:
        return
    for recipe in recipes:
        if _held(recipe, ctx) is None:
            space = ctx.bench.candidates(recipe)
            ctx.bench.prepare(recipe, _first_draws(recipe, space, ctx))


def template_of(plan: ChainPlan) -> SegmentPlan | None:
    """The segment that a template computes, None where the operations stay as they are."""
    (segment, *rest) = plan.segments
    return None if rest or segment.template == LIBRARY else segment


@dataclass
class _Choice:
    """The measurements for one recipe."""

    recipe: Recipe
    space: list[Candidate]
    ctx: TuningContext

    def plan(self) -> ChainPlan:
        """Measure, and decide."""
        as_it_was = self._cost(self.recipe, Candidate(LIBRARY))
        saved = self._saved_by_templates()
        ours = self._search(as_it_was - saved)
        best = min(ours, key=lambda c: ours[c], default=None)
        ours_us = math.inf if best is None else ours[best]
        reason = f"{as_it_was - saved:.1f} us with the rotations apart, {ours_us:.1f} us as one"
        taken = ours_us < (as_it_was - saved) * (1 - MIN_GAIN)
        known = math.isfinite(as_it_was) and math.isfinite(ours_us)
        final: tuple[float, float] | None = None
        if best is not None and known and taken and not self.ctx.budget.spent:
            final = self._in_turns(best)
            if final is not None:
                taken = final[1] < (final[0] - saved) * (1 - MIN_GAIN)
                reason += f"; measured in turns {final[0] - saved:.1f} and {final[1]:.1f} us"
        plan = _left(reason, "measured", finite(as_it_was))
        if best is not None and known and taken:
            chosen = SegmentPlan(0, 2, best.template, best.config, ours_us, as_it_was)
            plan = replace(plan, segments=(chosen,))
        initial_us, final_us = final or (None, None)
        unfinished_s = self.ctx.budget_s if self.ctx.budget.spent else 0.0
        if not known and unfinished_s:
            return replace(plan, source="rules", reason="the time budget was spent")
        return replace(plan, initial_us=initial_us, final_us=final_us, unfinished_s=unfinished_s)

    def _saved_by_templates(self) -> float:
        """Microseconds that the best known template saves of the product alone."""
        product = _product_alone(self.recipe)
        costs = [self._cost_if_known(product, c) for c in self.ctx.bench.candidates(product)]
        library = finite(self._cost_if_known(product, Candidate(LIBRARY)))
        best = min((us for us in costs if us is not None), default=math.inf)
        if library is None or not math.isfinite(best):
            return 0.0
        return max(0.0, library - best)

    def _search(self, as_it_was: float) -> dict[Candidate, float]:
        """Times of the candidates: first draws, then a search unless it is hopeless."""
        ctx, recipe = self.ctx, self.recipe
        first = _first_draws(recipe, self.space, ctx)
        ctx.bench.prepare(recipe, first)
        for candidate in first:
            if not ctx.budget.spent:
                self._cost(recipe, candidate)
        best = min(self._times().values(), default=math.inf)
        if best < as_it_was * HOPELESS:
            sample_configs(
                [self.space],
                lambda _, c: self._cost_if_known(recipe, c),
                lambda _, c: self._cost(recipe, c),
                generator=random.Random(ctx.seed),
                budget=ctx.budget,
                near=lambda a, b: a.template == b.template and near(a.settings, b.settings),
                prepare=lambda _, candidates: ctx.bench.prepare(recipe, candidates),
            )
        return self._times()

    def _times(self) -> dict[Candidate, float]:
        timed = {c: finite(self._cost_if_known(self.recipe, c)) for c in self.space}
        return {c: us for c, us in timed.items() if us is not None}

    def _in_turns(self, best: Candidate) -> tuple[float, float] | None:
        pairs = [[(self.recipe, c)] for c in (Candidate(LIBRARY), best)]
        try:
            apart_us, ours_us = self.ctx.bench.compare(pairs)
        except (RuntimeError, StofUnsupportedError) as failure:  # out of memory, mostly
            log.warning("rotations could not be compared in turns: %s", failure)
            return None
        return apart_us, ours_us

    def _cost_if_known(self, recipe: Recipe, candidate: Candidate) -> float | None:
        trial = self.ctx.bench.known(recipe, candidate)
        return None if trial is None else trial.cost_us

    def _cost(self, recipe: Recipe, candidate: Candidate) -> float:
        known = self.ctx.bench.known(recipe, candidate)
        trial = known or self.ctx.bench.trial(recipe, candidate)
        if known is None:
            self.ctx.count(recipe, candidate, "rotations", trial.cost_us)
        return trial.cost_us


def _first_draws(recipe: Recipe, space: Sequence[Candidate], ctx: TuningContext) -> list[Candidate]:
    return draw_candidates(space, SAMPLES, f"{ctx.seed} {recipe.key}", library=False)


def _product_alone(recipe: Recipe) -> Recipe:
    """The recipe of the product without its rotation: that of its packed projections."""
    (linear, _) = recipe.steps
    return Recipe(recipe.operands[: len(linear.inputs)], (linear,))


def _left(reason: str, source: str, library_us: float | None = None) -> ChainPlan:
    """The decision to leave both operations as they are."""
    segment = SegmentPlan(0, 2, LIBRARY, (), library_us, library_us)
    return ChainPlan(KINDS, CODE, CODE, (segment,), source, reason=reason)


def _held(recipe: Recipe, ctx: TuningContext) -> ChainPlan | None:
    value = None if ctx.store is None else ctx.store.get(STORE_KIND, rope_key(recipe))
    if value is None:
        return None
    try:
        plan = ChainPlan.from_dict(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("a stored decision cannot be read (%r) and is made anew", error)
        return None
    if ctx.measure and ctx.budget_s > plan.unfinished_s > 0:
        return None  # there is more time now
    difference = _difference(plan, recipe, ctx)
    if difference:
        log.warning("a stored decision does not fit (%s) and is made anew", difference)
        return None
    return replace(plan, source="store")


def _from_plan(recipe: Recipe, ctx: TuningContext) -> ChainPlan | None:
    assert ctx.plan is not None
    held = ctx.plan.chains.get(rope_key(recipe))
    if held is None:
        return None
    difference = _difference(held, recipe, ctx)
    if difference:
        raise StofPlanError(
            f"the plan's decision about a product and its rotations does not fit: {difference}; "
            "tune again"
        )
    return replace(held, source="plan")


def _difference(plan: ChainPlan, recipe: Recipe, ctx: TuningContext) -> str:
    """Why a decision cannot be followed here; empty when it can."""
    if plan.kinds != KINDS or len(plan.segments) != 1:
        return f"it has the operations {' '.join(plan.kinds)}, here are {' '.join(KINDS)}"
    segment = template_of(plan)
    if segment is None:
        return ""
    if ctx.bench.offers(recipe, candidate_of(segment.template, dict(segment.config))):
        return ""
    return f"template {segment.template} has no config {dict(segment.config)} here"
