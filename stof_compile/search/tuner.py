"""The tuner: which scheme each op chain of a graph gets, and which template each of its segments.

Every distinct chain is tuned once, whatever its number of occurrences. A choice comes from the
user's plan, from the store, or from the search: stage 1 finds the scheme, stage 2 the configs, and
the result is measured once more against the initial scheme, in turns, before it is taken.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from stof_compile.budget import Budget
from stof_compile.errors import StofPlanError, StofUnsupportedError
from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.fingerprint import fingerprint
from stof_compile.fusion.op_list import ListedOp, op_list, span
from stof_compile.fusion.read_recipe import read_recipe
from stof_compile.fusion.recipe import Recipe, fp32_products
from stof_compile.fusion.scheme import Scheme
from stof_compile.fusion.segment_key import segment_key
from stof_compile.plan import ChainPlan, Plan, SegmentPlan
from stof_compile.search.bench import LIBRARY, Candidate, SegmentBench, candidate_of
from stof_compile.search.initial import InitialLimits, initial_scheme
from stof_compile.search.learned import Learned
from stof_compile.search.stage1 import SAMPLES, search_scheme
from stof_compile.search.stage2 import sample_configs
from stof_compile.store import Store
from stof_compile.templates.space import near

log = logging.getLogger("stof_compile")

STORE_KIND = "chains"
AHEAD_OPS = 3  # ops of a segment that is compiled before stage 1 asks for it
MAX_SEGMENT_OPS = 12  # looked at when a chain is asked whether anything in it can be improved
SINGLE_SAMPLES = (
    3  # of an op left single: the library is among them, and stage 2 tunes it if it stays
)
WARM_SAMPLES = 3  # of a segment, where the scheme of an alike chain was learned on another model
Span = tuple[int, int]  # of the vertical op list

Progress = Callable[[str, float, int], None]
"""(what is tuned, best microseconds so far, trials measured)"""


@dataclass
class TuningContext:
    """What all chains of one compile share.

    Args:
        bench: takes the times. budget: seconds and trials left. budget_s: seconds the user gave
            for the whole graph. store: choices kept on disk.
        plan: choices of the user, which win over everything. seed: of every random draw.
        forced: scheme code of the user in hexadecimal, "" where the search decides.
        measure: whether anything may be measured at all.
        progress: told after every trial. limits: of the rules for the initial scheme.
    """

    bench: SegmentBench
    budget: Budget
    budget_s: float = 0.0
    store: Store | None = None
    plan: Plan | None = None
    seed: int = 0
    forced: str = ""
    measure: bool = True
    progress: Progress = lambda what, best_us, trials: None
    limits: InitialLimits | None = None
    trials: int = 0

    def use(self, budget: Budget) -> None:
        """Go on with another budget: a slice of the whole, for one chain."""
        self.budget = self.bench.budget = budget


def chain_key(chain: OpChain) -> str:
    """The exact key of a whole chain, and of how fp32 matrices are multiplied."""
    return f"{segment_key(chain, 0, len(chain))} {fp32_products()}"


class ChainTuner:
    """Chooses the scheme and the templates of one chain.

    Args:
        legality: (start, stop) of ops of the chain -> why they cannot be one kernel.
    """

    def __init__(
        self,
        gm: GraphModule,
        chain: OpChain,
        legality: Callable[[int, int], str | None],
        ctx: TuningContext,
    ) -> None:
        ops = op_list(chain, {node.name: node for node in gm.graph.nodes})
        self.key = chain_key(chain)
        self._problem = _ChainProblem(gm, chain, ops, legality, ctx)
        self._ctx = ctx

    def compile_ahead(self) -> None:
        """Have the configs compiled that stage 1 will most likely ask for, if it has to run."""
        ctx = self._ctx
        if ctx.plan is not None or ctx.forced or not ctx.measure:
            return
        if self._problem.can_be_improved and _held(ctx.store, self.key, self._problem) is None:
            self._problem.compile_ahead()

    def choose(self) -> ChainPlan | None:
        """The plan of the chain; None where no template accepts anything: it stays as it is.

        Raises:
            StofPlanError: the user's plan has another chain under this key.
        """
        ctx, problem = self._ctx, self._problem
        if ctx.plan is not None:
            return _from_plan(ctx.plan, self.key, problem)
        if not problem.can_be_improved:
            return None
        if ctx.forced:
            return problem.forced(ctx.forced)
        if not ctx.measure:
            return problem.by_rules()
        held = _held(ctx.store, self.key, problem)
        if held is not None or ctx.store is None:
            return held or problem.searched()
        with ctx.store.lock(f"{STORE_KIND}/{self.key}"):  # another process may be tuning the same
            held = _held(ctx.store, self.key, problem)
            if held is not None:
                return held
            plan = problem.searched()
            ctx.store.put(STORE_KIND, self.key, plan.to_dict())
        return plan


def fits(code: str, ops: int) -> bool:
    """Whether a scheme code in hexadecimal is one of a chain with so many ops."""
    try:
        Scheme.from_hex(code, ops)
    except ValueError:
        return False
    return True


def _held(store: Store | None, key: str, problem: _ChainProblem) -> ChainPlan | None:
    value = None if store is None else store.get(STORE_KIND, key)
    if value is None:
        return None
    try:
        plan = ChainPlan.from_dict(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("a stored scheme cannot be read (%r) and is searched anew", error)
        return None
    if problem.ctx.budget_s > plan.unfinished_s > 0:
        return None  # there is more time now: the search goes on with the trials it has
    difference = problem.difference(plan)
    if difference:
        log.warning("a stored scheme does not fit (%s) and is searched anew", difference)
        return None
    return replace(plan, source="store")


def _from_plan(plan: Plan, key: str, problem: _ChainProblem) -> ChainPlan | None:
    held = plan.chains.get(key)
    if held is None:
        return None
    difference = problem.difference(held)
    if difference:
        raise StofPlanError(
            f"the plan's scheme {held.code} of the chain {' '.join(held.kinds)} does not fit: "
            f"{difference}; tune again"
        )
    return replace(held, source="plan")


class _ChainProblem:
    """One chain while it is tuned."""

    def __init__(
        self,
        gm: GraphModule,
        chain: OpChain,
        ops: tuple[ListedOp, ...],
        legality: Callable[[int, int], str | None],
        ctx: TuningContext,
    ) -> None:
        self._gm, self._chain, self._ops, self._legality, self.ctx = gm, chain, ops, legality, ctx
        self._bench = ctx.bench
        self._recipes: dict[Span, Recipe | str] = {}
        self._spaces: dict[Span, list[Candidate]] = {}
        self._drawn: dict[Span, list[Candidate]] = {}
        self._learned = Learned(ctx.store)
        self._samples = SAMPLES

    @property
    def name(self) -> str:
        """The chain in words, its views left out."""
        return " ".join(op.name for op in self._ops if op.kind.family != "view")

    @property
    def can_be_improved(self) -> bool:
        """Whether a template accepts any legal segment of it."""
        count = len(self._ops)
        return any(
            self._space((start, stop))
            for start in range(count)
            for stop in range(start + 1, min(start + MAX_SEGMENT_OPS, count) + 1)
            if sum(op.compute_intensive for op in self._ops[start:stop]) <= 2
        )

    # -- plans -------------------------------------------------------------------------------------

    def by_rules(self) -> ChainPlan:
        """The initial scheme as it is."""
        scheme = self._initial()
        return self._plan(scheme, self._rule_choices(scheme), "rules", "nothing may be measured")

    def forced(self, code: str) -> ChainPlan | None:
        """The user's scheme, with the configs that rules choose."""
        codes = [part.strip() for part in code.split(",")]
        fitting = [part for part in codes if fits(part, len(self._ops))]
        for part in fitting:
            scheme = Scheme.from_hex(part, len(self._ops))
            merged = [s for s in scheme.segments if s[1] - s[0] > 1]
            if all(self.refusal(s) is None for s in merged):
                choices = self._rule_choices(scheme)
                return self._plan(scheme, choices, "forced", f"fusion={code!r} was asked for")
        return None

    def searched(self) -> ChainPlan:
        """The scheme and the configs that the search finds."""
        ctx = self.ctx
        initial = self._initial()
        first = self._stage1(initial)
        best = self._stage2(first)
        choices = [best[segment] for segment in first.segments]
        initial_best = [self._best_known(segment) for segment in initial.segments]
        initial_us = final_us = None
        if None not in (*choices, *initial_best):
            pairs = [
                [(self._recipe(s), c) for s, c in zip(scheme.segments, chosen, strict=True)]
                for scheme, chosen in ((initial, initial_best), (first, choices))
            ]
            timed = [
                [(r, c) for r, c in pair if isinstance(r, Recipe) and c is not None]
                for pair in pairs
            ]
            if timed[0] != timed[1] and all(timed):
                compared = self._compared(timed)
                if compared is not None:
                    initial_us, final_us = compared
                    if final_us > initial_us:
                        first, choices, final_us = initial, initial_best, initial_us
        if not ctx.budget.spent:  # what a search that was cut off ends with teaches nothing
            self._learned.note(self._fingerprint, first.hex, self._kinds)
        reason = f"initial scheme {initial.hex}"
        if initial_us is not None and final_us is not None:
            reason += f", {initial_us:.1f} us against {final_us:.1f} us measured in turns"
        plan = self._plan(first, choices, "measured", reason)
        unfinished_s = ctx.budget_s if ctx.budget.spent else 0.0
        return replace(
            plan, initial=initial.hex, initial_us=initial_us, final_us=final_us,
            unfinished_s=unfinished_s,
        )  # fmt: skip

    def difference(self, plan: ChainPlan) -> str:
        """Why a plan cannot be used here; empty when it can."""
        if plan.kinds != self._kinds:
            return f"it has the ops {' '.join(plan.kinds)}, here are {' '.join(self._kinds)}"
        if not fits(plan.code, len(self._ops)):
            return f"code {plan.code!r} is none of {len(self._ops)} ops"
        spans = tuple((segment.start, segment.stop) for segment in plan.segments)
        if spans != Scheme.from_hex(plan.code, len(self._ops)).segments:
            return f"its segments are not those of code {plan.code}"
        for segment in plan.segments:
            if segment.template == LIBRARY:
                continue
            place = (segment.start, segment.stop)
            reason = self._illegal(place)
            if reason:
                return reason
            wanted = candidate_of(segment.template, dict(segment.config))
            if wanted not in self._space(place):
                return f"template {segment.template} has no config {dict(segment.config)} here"
        return ""

    # -- the search --------------------------------------------------------------------------------

    def compile_ahead(self) -> None:
        """Draw the samples of short segments and have them compiled, the shortest first."""
        self._start()
        for length in range(1, AHEAD_OPS + 1):
            for start in range(len(self._ops) - length + 1):
                place = (start, start + length)
                recipe = self._recipe(place)
                if isinstance(recipe, Recipe) and self._space(place):
                    self._drawn[place] = self._draw(place)
                    self._prepared(recipe, self._drawn[place])

    def _start(self) -> list[Scheme]:
        """Where stage 1 begins: at the initial scheme and at single ops, which no move leads back
        to; where the scheme of an alike chain is known, only there, with fewer samples.
        """
        learned = self._learned.scheme(self._fingerprint, self._kinds)
        if learned is not None and fits(learned, len(self._ops)):
            self._samples = WARM_SAMPLES
            return [Scheme.from_hex(learned, len(self._ops))]
        return [self._initial(), Scheme.singletons(len(self._ops))]

    def _stage1(self, initial: Scheme) -> Scheme:
        """The best of the searches from each start."""
        ctx, found = self.ctx, []
        starts = self._start()
        for start in dict.fromkeys(starts):
            if any(self.refusal(s) is not None for s in start.segments if s[1] - s[0] > 1):
                continue
            result = search_scheme(
                start, self._ops, lambda a, b: self.refusal((a, b)), self._sample,
                budget=ctx.budget, samples=self._samples,
            )  # fmt: skip
            found.append(result.scheme)
        return min(found, key=self._known_cost) if found else initial

    def _stage2(self, scheme: Scheme) -> dict[Span, Candidate | None]:
        """Configs of the segments that have any, by reward-based sampling."""
        ctx = self.ctx
        places = [s for s in scheme.segments if self._space(s)]
        spaces = [self._stage2_space(s) for s in places]
        if places:
            sample_configs(
                spaces,
                lambda i, c: self._cost_if_known(places[i], c),
                lambda i, c: self._measured(places[i], c),
                generator=random.Random(ctx.seed),
                budget=ctx.budget,
                near=lambda a, b: a.template == b.template and near(a.settings, b.settings),
                prepare=self._prepare(places),
            )
        best = {segment: self._best_known(segment) for segment in scheme.segments}
        for segment, choice in best.items():
            recipe = self._recipe(segment)
            taught = choice is not None and choice.template != LIBRARY and not ctx.budget.spent
            if isinstance(recipe, Recipe) and choice is not None and taught:
                self._learned.note_config(self._segment_fingerprint(segment), choice)
        return best

    def _prepare(self, places: Sequence[Span]) -> Callable[[int, Sequence[Candidate]], None]:
        def prepare(index: int, candidates: Sequence[Candidate]) -> None:
            recipe = self._recipe(places[index])
            assert isinstance(recipe, Recipe), "only segments with templates are sampled"
            self._prepared(recipe, candidates)

        return prepare

    def _stage2_space(self, place: Span) -> list[Candidate]:
        """All candidates; where the like was learned elsewhere, those near it."""
        space = self._space(place)
        learned = self._learned.config(self._segment_fingerprint(place), space)
        if learned is None:
            return space
        return [
            c
            for c in space
            if c == learned
            or (c.template == learned.template and near(c.settings, learned.settings))
        ]

    def _sample(self, place: Span) -> float:
        """One sample of a segment for stage 1."""
        recipe = self._recipe(place)
        if not isinstance(recipe, Recipe):
            return 0.0  # no template takes it: it costs the same in every scheme
        if place not in self._drawn:
            drawn = self._draw(place)
            self._prepared(recipe, drawn)
            self._drawn[place] = drawn
        drawn = self._drawn[place]
        if not drawn:
            return self._best_cost(place)
        return self._measured(place, drawn.pop(0))

    def _draw(self, place: Span) -> list[Candidate]:
        """Candidates of a segment for stage 1: what is there without us, the templates' own first
        configs, then random ones.
        """
        space, has_library = self._space(place), self._has_library(place)
        drawn = [Candidate(LIBRARY)] if has_library else []
        learned = self._learned.config(self._segment_fingerprint(place), space)
        if learned is not None:
            return [*drawn, learned]
        leading = list({c.template: c for c in reversed(space)}.values())[::-1]
        rest = [c for c in space if c not in leading]
        generator = random.Random(f"{self.ctx.seed} {place} {len(space)}")
        drawn += leading
        wanted = self._samples if place[1] - place[0] > 1 else min(self._samples, SINGLE_SAMPLES)
        drawn += generator.sample(rest, min(len(rest), max(0, wanted - len(drawn))))
        return drawn[:wanted]

    # -- times -------------------------------------------------------------------------------------

    def _measured(self, place: Span, candidate: Candidate) -> float:
        recipe = self._recipe(place)
        assert isinstance(recipe, Recipe), "a segment without a recipe is never measured"
        known = self._bench.known(recipe, candidate) is not None
        try:
            trial = self._bench.trial(recipe, candidate)
        except KeyboardInterrupt:
            self._interrupted()
            return math.inf
        if not known:
            self.ctx.trials += 1
            self.ctx.progress(self.name, self._best_cost(place), self.ctx.trials)
        return trial.cost_us

    def _compared(
        self, schemes: Sequence[Sequence[tuple[Recipe, Candidate]]]
    ) -> tuple[float, float] | None:
        """Times of the initial and the final scheme; None where they could not be taken."""
        try:
            initial_us, final_us = self._bench.compare(schemes)
        except KeyboardInterrupt:
            self._interrupted()
            return None
        except (RuntimeError, StofUnsupportedError) as failure:  # out of memory, mostly
            log.warning("schemes could not be compared as wholes: %s", failure)
            return None
        return initial_us, final_us

    def _interrupted(self) -> None:
        """Ctrl-C ends the tuning, not the compile."""
        log.warning("tuning interrupted: going on with the best that was measured")
        self.ctx.budget.stop()

    def _prepared(self, recipe: Recipe, candidates: Sequence[Candidate]) -> None:
        try:
            self._bench.prepare(recipe, candidates)
        except KeyboardInterrupt:
            self._interrupted()

    def _cost_if_known(self, place: Span, candidate: Candidate) -> float | None:
        recipe = self._recipe(place)
        assert isinstance(recipe, Recipe), "a segment without a recipe is never measured"
        trial = self._bench.known(recipe, candidate)
        return None if trial is None else trial.cost_us

    def _best_known(self, place: Span) -> Candidate | None:
        """The fastest candidate measured so far; the library where nothing was."""
        recipe = self._recipe(place)
        if not isinstance(recipe, Recipe):
            return Candidate(LIBRARY)
        candidates = [
            *([Candidate(LIBRARY)] if self._has_library(place) else []),
            *self._space(place),
        ]
        timed = [(self._cost_if_known(place, c), c) for c in candidates]
        finite = [(us, c) for us, c in timed if us is not None and math.isfinite(us)]
        if not finite:
            return Candidate(LIBRARY) if self._has_library(place) else None
        return min(finite, key=lambda pair: pair[0])[1]

    def _best_cost(self, place: Span) -> float:
        recipe, best = self._recipe(place), self._best_known(place)
        if not isinstance(recipe, Recipe):
            return 0.0
        cost = None if best is None else self._cost_if_known(place, best)
        return math.inf if cost is None else cost

    def _known_cost(self, scheme: Scheme) -> float:
        return sum(self._best_cost(segment) for segment in scheme.segments)

    # -- facts -------------------------------------------------------------------------------------

    @property
    def _kinds(self) -> tuple[str, ...]:
        return tuple(op.name for op in self._ops)

    @property
    def _fingerprint(self) -> int:
        return fingerprint(self._chain, 0, len(self._chain))

    def _segment_fingerprint(self, place: Span) -> int:
        return fingerprint(self._chain, *span(self._ops, *place))

    def refusal(self, place: Span) -> str | None:
        """Why a segment of several ops cannot be one kernel."""
        reason = self._illegal(place)
        if reason:
            return reason
        recipe = self._recipe(place)
        if isinstance(recipe, str):
            return recipe
        if not self._space(place) and not self._has_library(place):
            return "no template accepts it"
        return None

    def _illegal(self, place: Span) -> str:
        start, stop = span(self._ops, *place)
        return self._legality(start, stop) or ""

    def _has_library(self, place: Span) -> bool:
        """Whether the segment as it is would be one kernel: a single op, or memory-intensive ops
        only. Of all else it is several, which the scheme that leaves them single stands for.
        """
        start, stop = place
        if stop - start == 1:
            return True
        return not any(op.compute_intensive for op in self._ops[start:stop])

    def _recipe(self, place: Span) -> Recipe | str:
        if place not in self._recipes:
            start, stop = span(self._ops, *place)
            self._recipes[place] = read_recipe(self._gm, self._chain, start, stop)
        return self._recipes[place]

    def _space(self, place: Span) -> list[Candidate]:
        if place not in self._spaces:
            recipe = self._recipe(place)
            usable = isinstance(recipe, Recipe) and not self._illegal(place)
            self._spaces[place] = self._bench.candidates(recipe) if usable else []  # type: ignore[arg-type]
        return self._spaces[place]

    def _initial(self) -> Scheme:
        rows = 0
        for i, op in enumerate(self._ops):
            recipe = self._recipe((i, i + 1)) if op.compute_intensive else ""
            if isinstance(recipe, Recipe):
                rows = max(rows, math.prod(recipe.steps[0].shape[:-1]))
        return initial_scheme(
            self._ops, rows, lambda a, b: self.refusal((a, b)), limits=self.ctx.limits
        )

    def _rule_choices(self, scheme: Scheme) -> list[Candidate | None]:
        """Templates for fused segments, what is there for single ops."""
        chosen: list[Candidate | None] = []
        for place in scheme.segments:
            recipe = self._recipe(place)
            fused = place[1] - place[0] > 1 and isinstance(recipe, Recipe)
            first = self._bench.first(recipe) if fused else None  # type: ignore[arg-type]
            chosen.append(first or Candidate(LIBRARY))
        return chosen

    def _plan(
        self, scheme: Scheme, choices: Sequence[Candidate | None], source: str, reason: str
    ) -> ChainPlan:
        segments = []
        for place, choice in zip(scheme.segments, choices, strict=True):
            candidate = choice or Candidate(LIBRARY)
            timed = isinstance(self._recipe(place), Recipe)
            cost = self._cost_if_known(place, candidate) if timed else None
            library = self._library_cost(place) if timed else None
            segments.append(
                SegmentPlan(*place, candidate.template, candidate.config, _finite(cost), library)
            )
        return ChainPlan(
            self._kinds, scheme.hex, scheme.hex, tuple(segments), source, reason=reason
        )

    def _library_cost(self, place: Span) -> float | None:
        """Time of the ops as they are, where all of it was measured."""
        if self._has_library(place):
            return _finite(self._cost_if_known(place, Candidate(LIBRARY)))
        parts = [self._library_cost((i, i + 1)) for i in range(*place)]
        return None if any(us is None for us in parts) else sum(us or 0.0 for us in parts)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
