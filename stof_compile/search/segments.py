"""Segments of an op chain while it is tuned: what each computes, what may run it, its times."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

from torch.fx import GraphModule

from stof_compile.errors import StofUnsupportedError
from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.fingerprint import fingerprints
from stof_compile.fusion.op_list import ListedOp, span
from stof_compile.fusion.read_recipe import read_recipe
from stof_compile.fusion.recipe import Recipe
from stof_compile.fusion.scheme import Scheme
from stof_compile.search.candidate import LIBRARY, Candidate
from stof_compile.search.context import TuningContext

log = logging.getLogger("stof_compile")

MAX_SEGMENT_OPS = 12  # looked at when a chain is asked whether anything in it can be improved
Span = tuple[int, int]  # of the vertical op list


class ChainSegments:
    """Segments of a chain by their place in its op list.

    Args:
        gm, chain, ops: the chain and its op list. legality: (start, stop) of ops of the chain ->
            why they cannot be one kernel. ctx: what the chains of a compile share.
        claimed: ops of the chain that Inductor joins with what stands beside them.
    """

    def __init__(
        self,
        gm: GraphModule,
        chain: OpChain,
        ops: tuple[ListedOp, ...],
        legality: Callable[[int, int], str | None],
        ctx: TuningContext,
        claimed: Collection[int] = (),
    ) -> None:
        self._claimed = frozenset(claimed)
        self._gm, self._chain, self.ops, self._legality, self.ctx = gm, chain, ops, legality, ctx
        self._bench = ctx.bench
        self._nodes = {node.name: node for node in gm.graph.nodes}
        self._recipes: dict[Span, Recipe | str] = {}
        self._spaces: dict[Span, list[Candidate]] = {}
        self._fingerprints: dict[Span, tuple[int, ...]] = {}

    @property
    def name(self) -> str:
        """The chain in words, its views left out."""
        return " ".join(op.name for op in self.ops if op.kind.family != "view")

    @property
    def can_be_improved(self) -> bool:
        """Whether a template accepts any legal segment of it."""
        count = len(self.ops)
        return any(
            self.space((start, stop))
            for start in range(count)
            for stop in range(start + 1, min(start + MAX_SEGMENT_OPS, count) + 1)
            if sum(op.compute_intensive for op in self.ops[start:stop]) <= 2
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the ops, views included."""
        return tuple(op.name for op in self.ops)

    @property
    def fingerprints(self) -> tuple[int, ...]:
        """Fingerprints of the whole chain."""
        return self.segment_fingerprints((0, len(self.ops)))

    def segment_fingerprints(self, place: Span) -> tuple[int, ...]:
        """Fingerprints of a segment."""
        if place not in self._fingerprints:
            self._fingerprints[place] = fingerprints(self._chain, *span(self.ops, *place))
        return self._fingerprints[place]

    def refusal(self, place: Span) -> str | None:
        """Why a segment of several ops cannot be one kernel, or had better not."""
        reason = self.illegal(place)
        if reason:
            return reason
        recipe = self.recipe(place)
        if isinstance(recipe, str):
            return recipe
        if self._belongs_to_inductor(place):
            return "Inductor joins it with what stands beside it"
        if not self.space(place) and not self.has_library(place):
            return "no template accepts it"
        return None

    def illegal(self, place: Span) -> str:
        """Why a segment cannot be one kernel in this graph; empty when it can."""
        start, stop = span(self.ops, *place)
        return self._legality(start, stop) or ""

    def _belongs_to_inductor(self, place: Span) -> bool:
        """Whether a segment has no product, and an op that Inductor joins with its neighbours."""
        if any(op.compute_intensive for op in self.ops[slice(*place)]):
            return False
        return not self._claimed.isdisjoint(range(*span(self.ops, *place)))

    def has_library(self, place: Span) -> bool:
        """Whether the segment as it is would be one kernel: a single op, or memory-intensive ops
        only. Of all else it is several, which the scheme that leaves them single stands for.
        """
        start, stop = place
        if stop - start == 1:
            return True
        return not any(op.compute_intensive for op in self.ops[start:stop])

    def recipe(self, place: Span) -> Recipe | str:
        """What a segment computes, or why no recipe says it."""
        if place not in self._recipes:
            start, stop = span(self.ops, *place)
            self._recipes[place] = read_recipe(self._gm, self._chain, start, stop, self._nodes)
        return self._recipes[place]

    def space(self, place: Span) -> list[Candidate]:
        """Candidates of the templates that accept a segment."""
        if place not in self._spaces:
            recipe = self.recipe(place)
            usable = isinstance(recipe, Recipe) and not self._belongs_to_inductor(place)
            usable = usable and not self.illegal(place)
            self._spaces[place] = self._bench.candidates(recipe) if usable else []  # type: ignore[arg-type]
        return self._spaces[place]

    def offers(self, place: Span, candidate: Candidate) -> bool:
        """Whether a candidate is in the ``space`` of a legal segment, without listing it."""
        recipe = self.recipe(place)
        return isinstance(recipe, Recipe) and self._bench.offers(recipe, candidate)

    # -- times -------------------------------------------------------------------------------------

    def cost_if_known(self, place: Span, candidate: Candidate) -> float | None:
        """Microseconds of a candidate, None where it was not measured."""
        recipe = self.recipe(place)
        assert isinstance(recipe, Recipe), "a segment without a recipe is never measured"
        trial = self._bench.known(recipe, candidate)
        return None if trial is None else trial.cost_us

    def best_known(self, place: Span) -> Candidate | None:
        """The fastest candidate measured so far; the library where nothing was."""
        recipe = self.recipe(place)
        if not isinstance(recipe, Recipe):
            return Candidate(LIBRARY)
        timed = [(self.cost_if_known(place, c), c) for c in self._candidates(place)]
        finite = [(us, c) for us, c in timed if us is not None and math.isfinite(us)]
        if not finite:
            return Candidate(LIBRARY) if self.has_library(place) else None
        return min(finite, key=lambda pair: pair[0])[1]

    def best_cost(self, place: Span) -> float:
        """Microseconds of the fastest candidate measured so far, infinity where nothing was.

        A segment without a recipe counts 0: it costs the same in every scheme.
        """
        recipe, best = self.recipe(place), self.best_known(place)
        if not isinstance(recipe, Recipe):
            return 0.0
        cost = None if best is None else self.cost_if_known(place, best)
        return math.inf if cost is None else cost

    def known_cost(self, scheme: Scheme) -> float:
        """Sum of the best costs of the segments of a scheme."""
        return sum(self.best_cost(segment) for segment in scheme.segments)

    def library_cost(self, place: Span) -> float | None:
        """Time of the ops as they are, where all of it was measured."""
        if self.has_library(place):
            return finite(self.cost_if_known(place, Candidate(LIBRARY)))
        parts = [self.library_cost((i, i + 1)) for i in range(*place)]
        return None if any(us is None for us in parts) else sum(us or 0.0 for us in parts)

    def measured(self, place: Span, candidate: Candidate) -> float:
        """Measure a candidate; its cost in microseconds, infinity where it failed."""
        recipe = self.recipe(place)
        assert isinstance(recipe, Recipe), "a segment without a recipe is never measured"
        known = self._bench.known(recipe, candidate) is not None
        try:
            trial = self._bench.trial(recipe, candidate)
        except KeyboardInterrupt:
            self.interrupted()
            return math.inf
        if not known:
            self.ctx.count(recipe, candidate, self.name, self.best_cost(place))
        return trial.cost_us

    def contenders(self, place: Span, reach: float, most: int) -> list[Candidate]:
        """The fastest candidate measured so far and the next of its template, then the fastest of
        each other template, then the next fastest of all.

        Args:
            reach: times the fastest that one may take. most: how many, at most.
        """
        best, limit = self.best_known(place), self.best_cost(place) * reach
        if best is None or not isinstance(self.recipe(place), Recipe):
            return []
        if not math.isfinite(limit):  # nothing was measured: what failed would be within reach
            return []
        timed = [
            (us, i, c)
            for i, c in enumerate(self._candidates(place))
            if c != best and (us := self.cost_if_known(place, c)) is not None and us <= limit
        ]
        ranked = [c for _, _, c in sorted(timed, key=lambda t: t[:2])]
        leading = [best, *[c for c in ranked if c.template == best.template][:1]]
        for c in ranked:
            if all(c.template != other.template for other in leading):
                leading.append(c)
        return [*leading, *(c for c in ranked if c not in leading)][:most]

    def _candidates(self, place: Span) -> list[Candidate]:
        library = [Candidate(LIBRARY)] if self.has_library(place) else []
        return [*library, *self.space(place)]

    def compare(
        self, schemes: Sequence[Sequence[tuple[Recipe, Candidate]]], long_turns: bool
    ) -> list[float] | None:
        """Microseconds of whole schemes, taken in turns; None where they could not be taken.

        Args:
            schemes, long_turns: as for ``SegmentBench.compare``.
        """
        try:
            return self._bench.compare(schemes, long_turns)
        except KeyboardInterrupt:
            self.interrupted()
            return None
        except (RuntimeError, StofUnsupportedError) as failure:  # out of memory, mostly
            log.warning("schemes could not be compared as wholes: %s", failure)
            return None

    def prepare(self, recipe: Recipe, candidates: Sequence[Candidate]) -> None:
        """Have candidates compiled that will be measured next."""
        try:
            self._bench.prepare(recipe, candidates)
        except KeyboardInterrupt:
            self.interrupted()

    def interrupted(self) -> None:
        """Ctrl-C ends the tuning, not the compile."""
        log.warning("tuning interrupted: going on with the best that was measured")
        self.ctx.budget.stop()


def finite(value: float | None) -> float | None:
    """A time, None where there is none or the candidate failed."""
    return value if value is not None and math.isfinite(value) else None
