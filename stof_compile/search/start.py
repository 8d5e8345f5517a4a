"""Where the search of a chain begins: at the scheme of rules, or at what was found before."""

from __future__ import annotations

import math

from stof_compile.fusion.recipe import Recipe
from stof_compile.fusion.scheme import Scheme, fits
from stof_compile.plan import ChainPlan
from stof_compile.search.candidate import Candidate, candidate_of
from stof_compile.search.draw import WARM_SAMPLES
from stof_compile.search.initial import initial_scheme
from stof_compile.search.learned import Learned
from stof_compile.search.segments import ChainSegments, Span
from stof_compile.search.stage1 import SAMPLES


class ChainStart:
    """Where the search of one chain begins.

    Args:
        segments: of the chain. learned: what chains of other models taught.
    Attributes:
        samples: configs that stage 1 draws of each segment; fewer where something is known.
        tuned: segments of other chains that are runs of this one, with what they got.
    """

    def __init__(self, segments: ChainSegments, learned: Learned) -> None:
        self._at, self._learned = segments, learned
        self.samples = SAMPLES
        self.tuned: dict[Span, Candidate] = {}

    @property
    def is_known(self) -> bool:
        """Whether stage 1 begins at what was found for the like of the chain."""
        return self.samples == WARM_SAMPLES

    def begin_with(self, first: int, run: ChainPlan) -> None:
        """Begin at what another chain got that is a run of this one; its segments are tuned.

        Args:
            first: op of this chain at which the run begins. run: the plan of the other chain.
        """
        at = next((i for i, op in enumerate(self._at.ops) if op.start == first), None)
        if at is None or self._at.kinds[at : at + len(run.kinds)] != run.kinds:
            return  # a view that is free there is none here
        found = {
            (at + s.start, at + s.stop): candidate_of(s.template, dict(s.config))
            for s in run.segments
        }
        legal = all(self._at.refusal(place) is None for place in found if _fused(place))
        stop = at + len(run.kinds)
        if legal and not any(a < stop and at < b for a, b in self.tuned):
            self.tuned |= found

    def schemes(self) -> list[Scheme]:
        """Where stage 1 begins: at the initial scheme and at single ops, which no move leads back
        to; where the scheme of an alike chain or of a run of this one is known, only there, with
        fewer samples.
        """
        learned = self._learned.scheme(self._at.fingerprints, self._at.kinds)
        if learned is not None and fits(learned, len(self._at.ops)):
            scheme = Scheme.from_hex(learned, len(self._at.ops))
            # what reads from outside, or is claimed there, is no part of a fingerprint
            if all(self._at.refusal(place) is None for place in scheme.segments if _fused(place)):
                self.samples = WARM_SAMPLES
                return [scheme]
        if self.tuned:
            self.samples = WARM_SAMPLES
            inside = {i for a, b in self.tuned for i in range(a, b)}
            rest = [(i, i + 1) for i in range(len(self._at.ops)) if i not in inside]
            return [Scheme(tuple(b - a for a, b in sorted([*self.tuned, *rest])))]
        return [self.initial(), Scheme.singletons(len(self._at.ops))]

    def initial(self, searched: bool = True) -> Scheme:
        """The scheme that rules choose.

        Args:
            searched: whether a search begins there, and it is not what is taken unmeasured.
        """
        rows = 0
        for i, op in enumerate(self._at.ops):
            recipe = self._at.recipe((i, i + 1)) if op.compute_intensive else ""
            if isinstance(recipe, Recipe):
                rows = max(rows, math.prod(recipe.steps[0].shape[:-1]))
        return initial_scheme(
            self._at.ops, rows, lambda a, b: self._at.refusal((a, b)),
            limits=self._at.ctx.limits, searched=searched,
        )  # fmt: skip


def _fused(place: Span) -> bool:
    return place[1] - place[0] > 1
