"""Stage 2: which config each segment of a scheme gets, by sampling that follows reward.

An iteration measures a fixed number of configs. The first divides them equally over the segments;
later ones follow weights, and the segment with the largest drop of its time earns reward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from stof_compile.budget import Budget

CONFIGS_PER_ITERATION = 16  # ours: the paper leaves N open
REWARD = 1.0  # specs/01, section 9
SOON = 16  # candidates that a random draw is made from
PATIENCE = 3  # iterations without gain before the end (specs/01, section 9)

C = TypeVar("C")  # a candidate of a segment: template and config


@dataclass(frozen=True)
class Stage2Result(Generic[C]):
    """The best candidate of each segment.

    Args:
        best: per segment, None where no candidate works.
        cost_us: per segment, infinity where no candidate works.
        weights: per segment, 1 and the reward it earned.
        iterations: iterations begun.
        measured: candidates measured, known ones not counted.
        stopped: ``exhausted`` (nothing left to draw) | ``no gain`` | ``budget``.
    """

    best: tuple[C | None, ...]
    cost_us: tuple[float, ...]
    weights: tuple[float, ...]
    iterations: int
    measured: int
    stopped: str


def sample_configs(
    spaces: Sequence[Sequence[C]],
    known: Callable[[int, C], float | None],
    measure: Callable[[int, C], float],
    *,
    generator: random.Random,
    budget: Budget,
    near: Callable[[C, C], bool] | None = None,
    prepare: Callable[[int, Sequence[C]], None] | None = None,
    per_iteration: int = CONFIGS_PER_ITERATION,
    reward: float = REWARD,
    patience: int = PATIENCE,
) -> Stage2Result[C]:
    """Find a fast candidate for every segment.

    Args:
        spaces: candidates of each segment, each listed once, the most promising ones first.
        known: microseconds of a candidate measured before (infinity: it failed), None if it was
            not. A known candidate is not measured again. What is drawn does not depend on what is
            known: a repeated search draws the same, measures nothing, and ends with the same
            result. In the end every known candidate counts, drawn or not.
        measure: microseconds of candidate ``c`` of segment ``i``, infinity when it fails.
        generator: seeded; draws without replacement.
        budget: looked at before every measurement; a known candidate needs none.
        near: whether two candidates differ little, for instance in one dimension. Half of a
            segment's draws are then taken near its best one, as long as there are any.
        prepare: told which candidates of a segment are measured next, to compile them together;
            then which ones the next iteration is likely to draw.
        per_iteration: candidates drawn in an iteration; a segment with candidates left gets at
            least one, so more segments than this make an iteration longer.
        reward: weight earned by the segment with the largest drop, the leftmost of equals. What
            a segment drops from is its best time before the iteration, or its first one in it.
        patience: iterations without any gain after which the search ends.
    Raises:
        ValueError: ``per_iteration`` or ``patience`` < 1.
    Source: STOF paper, stage 2 of the search; specs/01, section 9. ``near`` is ours.
    """
    if per_iteration < 1 or patience < 1:
        raise ValueError(
            f"per_iteration={per_iteration} and patience={patience} have to be at least 1"
        )
    segments = [_Segment(i, space, generator) for i, space in enumerate(spaces)]
    iterations = measured = idle = 0
    stopped = ""
    while not stopped:
        open_segments = [segment for segment in segments if segment.untried]
        if not open_segments:
            stopped = "exhausted"
            break
        iterations += 1
        counts = shares([segment.weight for segment in open_segments], per_iteration)
        gained = False
        drops: list[float] = []
        draws = [s.draw(count, near) for s, count in zip(open_segments, counts, strict=True)]
        if prepare is not None and not budget.spent:
            for segment, drawn in zip(open_segments, draws, strict=True):
                prepare(segment.index, drawn)
            for segment, count in zip(open_segments, counts, strict=True):
                prepare(segment.index, segment.untried[: count // 2])
        for segment, drawn in zip(open_segments, draws, strict=True):
            before = segment.cost_us
            drop = 0.0
            for candidate in drawn:
                cost_us = known(segment.index, candidate)
                if cost_us is None:
                    if budget.spent:
                        stopped = "budget"
                        break
                    cost_us = measure(segment.index, candidate)
                    measured += 1
                saved = segment.take(candidate, cost_us)
                drop += saved if math.isfinite(saved) else 0.0  # the first time is a baseline
            drops.append(drop)
            gained |= segment.cost_us < before
            if stopped:
                break
        if max(drops) > 0:
            open_segments[drops.index(max(drops))].weight += reward
        idle = 0 if gained else idle + 1
        if not stopped and idle >= patience:
            stopped = "no gain"
    for segment, space in zip(segments, spaces, strict=True):
        for candidate in space:
            cost_us = known(segment.index, candidate)
            if cost_us is not None:
                segment.take(candidate, cost_us)
    return Stage2Result(
        tuple(segment.best for segment in segments),
        tuple(segment.cost_us for segment in segments),
        tuple(segment.weight for segment in segments),
        iterations,
        measured,
        stopped,
    )


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` draws in proportion to weights, at least one for each.

    What is left after rounding down goes to the largest remainders, from left to right; the sum
    is ``total``, or the number of weights if that is larger.
    """
    spare = max(0, total - len(weights))
    whole = sum(weights)
    # one each first, then what is missing to the exact share
    wanted = [max(0.0, weight / whole * total - 1) for weight in weights]
    scale = spare / sum(wanted) if sum(wanted) > 0 else 0.0
    exact = [want * scale for want in wanted]
    counts = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for i in order[: spare - sum(counts)] if scale else []:
        counts[i] += 1
    return [1 + count for count in counts]


class _Segment(Generic[C]):
    """What the sampling knows of one segment."""

    def __init__(
        self,
        index: int,
        space: Sequence[C],
        generator: random.Random,
    ) -> None:
        self.index = index
        self.weight = 1.0
        self.best: C | None = None
        self.cost_us = math.inf
        self.untried = list(space)
        self._generator = generator

    def draw(self, count: int, near: Callable[[C, C], bool] | None) -> list[C]:
        """Take candidates out of those not tried: near the best one, then in turns the next one
        and one at random of those that come soon.
        """
        drawn: list[C] = []
        if near is not None and self.best is not None:
            best = self.best
            drawn = [c for c in self.untried if near(best, c)][: (count + 1) // 2]
        rest = [c for c in self.untried if c not in drawn]
        for number in range(count - len(drawn)):
            if rest:
                soon = self._generator.randrange(min(SOON, len(rest))) if number % 2 else 0
                drawn.append(rest.pop(soon))
        self.untried = [c for c in self.untried if c not in drawn]
        return drawn

    def take(self, candidate: C, cost_us: float) -> float:
        """Note a time; returns by how much the best one dropped, infinity for the first."""
        if not cost_us < self.cost_us:  # NaN is no gain either
            return 0.0
        saved = self.cost_us - cost_us
        self.best, self.cost_us = candidate, cost_us
        return saved
