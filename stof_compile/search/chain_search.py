"""The search of one op chain: stage 1 finds its scheme, stage 2 the configs of its segments."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from stof_compile.fusion.recipe import Recipe
from stof_compile.fusion.scheme import Scheme, fits
from stof_compile.plan import ChainPlan, SegmentPlan
from stof_compile.search.candidate import LIBRARY, Candidate, candidate_of
from stof_compile.search.draw import (
    around,
    draw_candidates,
    draw_learned,
    within_reach,
)
from stof_compile.search.learned import Learned
from stof_compile.search.segments import ChainSegments, Span, finite
from stof_compile.search.stage1 import MoveRecord, search_scheme
from stof_compile.search.stage2 import sample_configs
from stof_compile.search.start import ChainStart
from stof_compile.search.told import told_moves, with_trials, words
from stof_compile.templates.space import near

AHEAD_OPS = 3  # ops of a segment that is compiled before stage 1 asks for it
SINGLE_SAMPLES = (
    3  # of an op left single: the library is among them, and stage 2 tunes it if it stays
)
FINALS_SHARE, FINALS_S = 0.25, 6.0  # of the budget, and seconds at most: kept for the finals
# what a comparison takes of each chain: seconds (in short turns, in long ones), or replays
COMPARE_S, COMPARE_LONG_S, COMPARE_RUNS = 0.25, 0.5, 70
FEW_ROWS = 512  # of a product that is bound by memory
FINALISTS = 5  # candidates of a segment that are timed within the whole chain
FINAL_REACH = 1.15  # of the fastest alone; bursts and a lasting load rank forms up to 17 % apart
FINAL_GAIN = 0.006  # of the chain; less is surely noise, some more can be


@dataclass(frozen=True)
class _Against:
    """What came of measuring the result against the initial scheme.

    Args:
        reason: one sentence for people. initial_us, final_us: time of the initial scheme and of
            the one taken, None where they were not compared.
        kept: candidates of the initial scheme where it is the faster one.
    """

    reason: str
    initial_us: float | None = None
    final_us: float | None = None
    kept: dict[Span, Candidate | None] | None = None


class ChainSearch:
    """Finds the plan of one chain.

    Args:
        segments: of the chain.
    """

    def __init__(self, segments: ChainSegments) -> None:
        self._at, self.ctx = segments, segments.ctx
        self._bench = segments.ctx.bench
        self._drawn: dict[Span, list[Candidate]] = {}
        self._learned = Learned(self.ctx.store)
        self.start = ChainStart(segments, self._learned)
        self._moves: list[MoveRecord] = []
        self._switched: list[str] = []

    def by_rules(self) -> ChainPlan:
        """The initial scheme as it is."""
        scheme = self.start.initial(searched=False)
        return self._plan(scheme, self._rule_choices(scheme), "rules", "nothing may be measured")

    def forced(self, code: str) -> ChainPlan | None:
        """The user's scheme, with the configs that rules choose."""
        codes = [part.strip() for part in code.split(",")]
        fitting = [part for part in codes if fits(part, len(self._at.ops))]
        for part in fitting:
            scheme = Scheme.from_hex(part, len(self._at.ops))
            merged = [s for s in scheme.segments if s[1] - s[0] > 1]
            if all(self._can_be_forced(s) for s in merged):
                choices = self._rule_choices(scheme)
                return self._plan(scheme, choices, "forced", f"fusion={code!r} was asked for")
        return None

    def _can_be_forced(self, place: Span) -> bool:
        """Whether a segment can be one kernel, be it that Inductor would do better."""
        recipe = self._at.recipe(place)
        if self._at.illegal(place) or not isinstance(recipe, Recipe):
            return False
        return self._at.has_library(place) or self._bench.first(recipe) is not None

    def searched(self) -> ChainPlan:
        """The scheme and the configs that the search finds."""
        ctx = self.ctx
        initial = self.start.initial()
        whole, left = ctx.budget, ctx.budget.left
        ctx.use(whole.slice(1 - min(FINALS_SHARE, FINALS_S / left) if left else 0.0))
        first = self._stage1(initial)
        best = self._stage2(first)
        cut_off = ctx.budget.spent
        ctx.use(whole)
        self._final(first, best)
        against = self._against_initial(initial, first, best)
        if against.kept is not None:
            first, best = initial, against.kept
            self._switched.clear()
        if not cut_off:  # what a search that was cut off ends with teaches nothing
            self._teach(first, best)
        reason = against.reason
        if self._switched:
            reason += "; faster within the chain than what was faster alone: "
            reason += ", ".join(self._switched)
        choices = [best[segment] for segment in first.segments]
        plan = self._plan(first, choices, "measured", reason)
        unfinished_s = ctx.budget_s if cut_off else 0.0
        moves = told_moves(self._moves)
        return replace(
            plan, initial=initial.hex, initial_us=against.initial_us, final_us=against.final_us,
            unfinished_s=unfinished_s, moves=moves, moves_left_out=len(self._moves) - len(moves),
            segments=tuple(with_trials(self._at, segment) for segment in plan.segments),
        )  # fmt: skip

    def difference(self, plan: ChainPlan) -> str:
        """Why a plan cannot be used here; empty when it can."""
        if plan.kinds != self._at.kinds:
            return f"it has the ops {' '.join(plan.kinds)}, here are {' '.join(self._at.kinds)}"
        if not fits(plan.code, len(self._at.ops)):
            return f"code {plan.code!r} is none of {len(self._at.ops)} ops"
        spans = tuple((segment.start, segment.stop) for segment in plan.segments)
        if spans != Scheme.from_hex(plan.code, len(self._at.ops)).segments:
            return f"its segments are not those of code {plan.code}"
        for segment in plan.segments:
            if segment.template == LIBRARY:
                continue
            place = (segment.start, segment.stop)
            reason = self._at.illegal(place)
            if reason:
                return reason
            wanted = candidate_of(segment.template, dict(segment.config))
            if not self._at.offers(place, wanted):
                return f"template {segment.template} has no config {dict(segment.config)} here"
        return ""

    def compile_ahead(self) -> None:
        """Draw the samples of short segments and have them compiled, the shortest first."""
        self.start.schemes()
        for length in range(1, AHEAD_OPS + 1):
            for start in range(len(self._at.ops) - length + 1):
                place = (start, start + length)
                recipe = self._at.recipe(place)
                if isinstance(recipe, Recipe) and self._at.space(place):
                    self._drawn[place] = self._draw(place)
                    self._at.prepare(recipe, self._drawn[place])

    def _stage1(self, initial: Scheme) -> Scheme:
        """The best of the searches from each start."""
        ctx, found = self.ctx, []
        starts = self.start.schemes()
        for start in dict.fromkeys(starts):
            if any(self._at.refusal(s) is not None for s in start.segments if s[1] - s[0] > 1):
                continue
            result = search_scheme(
                start, self._at.ops, lambda a, b: self._at.refusal((a, b)), self._sample,
                budget=ctx.budget, samples=self.start.samples,
            )  # fmt: skip
            found.append(result.scheme)
            self._moves += result.moves
        return min(found, key=self._at.known_cost) if found else initial

    def _stage2(self, scheme: Scheme) -> dict[Span, Candidate | None]:
        """Configs of the segments that have any, by reward-based sampling."""
        ctx = self.ctx
        places = [s for s in scheme.segments if self._at.space(s)]
        library = Candidate(LIBRARY)
        for place in places:  # no move of stage 1 may have looked at it
            unknown = self._at.has_library(place) and self._at.cost_if_known(place, library) is None
            if unknown and not ctx.budget.spent:
                self._at.measured(place, library)
        spaces = [self._stage2_space(s) for s in places]
        if places:
            sample_configs(
                spaces,
                lambda i, c: self._at.cost_if_known(places[i], c),
                lambda i, c: self._at.measured(places[i], c),
                generator=random.Random(ctx.seed),
                budget=ctx.budget,
                near=lambda a, b: a.template == b.template and near(a.settings, b.settings),
                prepare=self._prepare(places),
            )
        return {segment: self._at.best_known(segment) for segment in scheme.segments}

    def _runnable(
        self, scheme: Scheme, choices: Mapping[Span, Candidate | None]
    ) -> list[tuple[Recipe, Candidate]]:
        """The segments of a scheme that can be run from their recipes, each with its choice."""
        pairs = [(self._at.recipe(segment), choices[segment]) for segment in scheme.segments]
        return [(r, c) for r, c in pairs if isinstance(r, Recipe) and c is not None]

    def _final(self, scheme: Scheme, best: dict[Span, Candidate | None]) -> None:
        """Choose among the fastest candidates of each segment by the time of the whole chain.

        A trial replays one kernel for a moment. In the model it follows other kernels, on a GPU
        that has been busy for a while. The segments with the most time choose first, alike ones
        together; ``best`` is changed where another candidate makes the chain faster.
        """
        if any(choice is None for choice in best.values()):
            return
        alike: dict[str, list[Span]] = {}
        for place in scheme.segments:
            recipe = self._at.recipe(place)
            if isinstance(recipe, Recipe) and not self._at.illegal(place):
                alike.setdefault(recipe.key, []).append(place)
        chain_us = sum(filter(math.isfinite, map(self._at.best_cost, scheme.segments)))
        groups = alike.values()
        for group in sorted(groups, key=lambda g: len(g) * self._at.best_cost(g[0]), reverse=True):
            if self.ctx.budget.spent:
                return
            recipe = self._at.recipe(group[0])
            products = isinstance(recipe, Recipe) and _draws_power(recipe)
            each_s = max(COMPARE_LONG_S if products else COMPARE_S, COMPARE_RUNS * chain_us * 1e-6)
            most = int(min(FINALISTS, self.ctx.budget.left / each_s))
            contenders = self._at.contenders(group[0], FINAL_REACH, most)
            if len(contenders) < 2:
                continue
            chains = [best | dict.fromkeys(group, contender) for contender in contenders]
            times = self._at.compare([self._runnable(scheme, chain) for chain in chains], products)
            if times is None:
                return
            fastest = min(range(len(times)), key=times.__getitem__)
            if times[fastest] < times[0] * (1 - FINAL_GAIN):  # contenders[0] was fastest alone
                best.update(dict.fromkeys(group, contenders[fastest]))
                self._switched.append(
                    f"{words(contenders[fastest])} ({times[fastest]:.1f} us) than "
                    f"{words(contenders[0])} ({times[0]:.1f} us)"
                )

    def _against_initial(
        self, initial: Scheme, scheme: Scheme, best: Mapping[Span, Candidate | None]
    ) -> _Against:
        """Measure what the search ends with against the initial scheme, in turns."""
        reason = f"initial scheme {initial.hex}"
        choices = self._initial_choices(initial)
        if None in (*best.values(), *choices.values()):
            return _Against(reason)
        timed = [self._runnable(initial, choices), self._runnable(scheme, best)]
        if timed[0] == timed[1] or not all(timed):
            return _Against(reason)
        products = any(_draws_power(recipe) for recipe, _ in timed[1])
        times = self._at.compare(timed, long_turns=products)
        if times is None:
            return _Against(reason)
        initial_us, final_us = times
        if final_us > initial_us:
            reason += f" kept, {initial_us:.1f} us against {final_us:.1f} us of what the search "
            reason += f"found ({scheme.hex}) measured in turns"
            return _Against(reason, initial_us, initial_us, choices)
        reason += f", {initial_us:.1f} us against {final_us:.1f} us measured in turns"
        return _Against(reason, initial_us, final_us)

    def _initial_choices(self, initial: Scheme) -> dict[Span, Candidate | None]:
        """The fastest candidates of the initial scheme. A search that began at a learned one may
        have met none of a segment: the first of the templates' is measured then.
        """
        for place in initial.segments:
            fused = place[1] - place[0] > 1
            if fused and math.isinf(self._at.best_cost(place)) and not self.ctx.budget.spent:
                ours = (c for c in self._draw(place) if c.template != LIBRARY)
                for candidate in islice(ours, 1):
                    self._at.measured(place, candidate)
        return {place: self._at.best_known(place) for place in initial.segments}

    def _teach(self, scheme: Scheme, best: Mapping[Span, Candidate | None]) -> None:
        """Remember the scheme and its configs for chains of other models that are alike."""
        self._learned.note(self._at.fingerprints, scheme.hex, self._at.kinds)
        for place, choice in best.items():
            if choice is not None and self._at.space(place):
                self._learned.note_config(self._at.segment_fingerprints(place), choice)

    def _learned_config(self, place: Span) -> Candidate | None:
        """What an alike segment of another chain got."""
        space = self._at.space(place)
        found = self._learned.config(self._at.segment_fingerprints(place), space)
        if found is not None and found.template == LIBRARY and not self._at.has_library(place):
            return None
        return found

    def _prepare(self, places: Sequence[Span]) -> Callable[[int, Sequence[Candidate]], None]:
        def prepare(index: int, candidates: Sequence[Candidate]) -> None:
            recipe = self._at.recipe(places[index])
            assert isinstance(recipe, Recipe), "only segments with templates are sampled"
            self._at.prepare(recipe, candidates)

        return prepare

    def _stage2_space(self, place: Span) -> list[Candidate]:
        """Candidates of templates within reach; where the like was learned, few of them."""
        tuned = self.start.tuned.get(place)
        if tuned is not None:  # its trials are known, or lost with the chain's plan kept
            return [c for c in self._at.space(place) if c == tuned]
        best = self._at.best_cost(place)
        space = within_reach(
            self._at.space(place),
            best if math.isfinite(best) else None,
            lambda c: self._at.cost_if_known(place, c),
        )
        learned, drawn = self._learned_config(place), self._draw(place)
        if learned is not None and learned.template != LIBRARY:
            return around(learned, space)
        # of what stage 1 drew: what is known by now may come from this stage, in an earlier search
        costs = {c: finite(self._at.cost_if_known(place, c)) for c in drawn}
        timed = {c: us for c, us in costs.items() if us is not None}
        found = min(timed, key=lambda c: timed[c], default=Candidate(LIBRARY))
        if found.template != LIBRARY and (learned is not None or self.start.is_known):
            return around(found, space)  # the like was left to the library, or is no such segment
        if learned is None:
            return space
        return [c for c in self._draw(place) if c != learned]

    def _sample(self, place: Span) -> float:
        """One sample of a segment for stage 1."""
        recipe = self._at.recipe(place)
        if not isinstance(recipe, Recipe):
            return 0.0  # no template takes it: it costs the same in every scheme
        if place not in self._drawn:
            drawn = self._draw(place)
            self._at.prepare(recipe, drawn)
            self._drawn[place] = drawn
        drawn = self._drawn[place]
        if not drawn:
            return self._at.best_cost(place)
        return self._at.measured(place, drawn.pop(0))

    def _draw(self, place: Span) -> list[Candidate]:
        """Candidates of a segment for stage 1 (``draw_candidates``)."""
        space, has_library = self._at.space(place), self._at.has_library(place)
        seed = f"{self.ctx.seed} {place} {len(space)}"
        learned = self._learned_config(place)
        if learned is not None:
            return draw_learned(learned, space, seed, library=has_library)
        wanted = (
            self.start.samples
            if place[1] - place[0] > 1
            else min(self.start.samples, SINGLE_SAMPLES)
        )
        return draw_candidates(space, wanted, seed, library=has_library)[:wanted]

    def _rule_choices(self, scheme: Scheme) -> list[Candidate | None]:
        """Templates for fused segments, what is there for single ops."""
        chosen: list[Candidate | None] = []
        for place in scheme.segments:
            recipe = self._at.recipe(place)
            fused = place[1] - place[0] > 1 and isinstance(recipe, Recipe)
            first = self._bench.first(recipe) if fused else None  # type: ignore[arg-type]
            chosen.append(first or Candidate(LIBRARY))
        return chosen

    def _plan(
        self, scheme: Scheme, choices: Sequence[Candidate | None], source: str, reason: str
    ) -> ChainPlan:
        segments = []
        for place, choice in zip(scheme.segments, choices, strict=True):
            candidate, recipe = choice or Candidate(LIBRARY), self._at.recipe(place)
            cost = library = None
            flops = nbytes = 0
            if isinstance(recipe, Recipe):
                cost = finite(self._at.cost_if_known(place, candidate))
                library = self._at.library_cost(place)
                flops, nbytes = recipe.flops, recipe.nbytes
            segments.append(
                SegmentPlan(
                    *place, candidate.template, candidate.config, cost, library, flops, nbytes
                )
            )
        return ChainPlan(
            self._at.kinds, scheme.hex, scheme.hex, tuple(segments), source, reason=reason
        )


def _draws_power(recipe: Recipe) -> bool:
    """Whether a segment has a product that may take a GPU to its limit of power: one with few
    rows waits for its weights.
    """
    return recipe.contractions > 0 and math.prod(recipe.result.shape[:-1]) > FEW_ROWS
