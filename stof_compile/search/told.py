"""What the plan of a chain tells of its search: moves of stage 1, and timed candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stof_compile.fusion.recipe import Recipe
from stof_compile.plan import MovePlan, SegmentPlan
from stof_compile.search.candidate import Candidate
from stof_compile.search.segments import ChainSegments, finite
from stof_compile.search.stage1 import MoveRecord

MAX_MOVES = 64  # told in the plan of a chain
MAX_TRIALS = 6  # told of each segment


def told_moves(moves: Sequence[MoveRecord], most: int = MAX_MOVES) -> tuple[MovePlan, ...]:
    """Moves as a plan tells them: all kept ones, then measured ones, then others, in their order.

    Args:
        moves: of the searches from all starts. most: moves told, unless more were kept.
    """
    rank = {"kept": 0, "rolled back": 1}
    order = sorted(range(len(moves)), key=lambda i: (rank.get(moves[i].outcome, 2), i))
    kept = sum(move.outcome == "kept" for move in moves)
    told = sorted(order[: max(most, kept)])
    return tuple(
        MovePlan(
            move.name,
            move.before,
            move.after,
            finite(move.before_us),
            finite(move.after_us),
            move.outcome,
            move.reason,
        )
        for move in (moves[i] for i in told)
    )


def with_trials(segments: ChainSegments, plan: SegmentPlan) -> SegmentPlan:
    """The plan of a segment with the fastest of the candidates that were measured for it."""
    place = (plan.start, plan.stop)
    if not isinstance(segments.recipe(place), Recipe):
        return plan
    timed = [(c, segments.cost_if_known(place, c)) for c in segments.space(place)]
    known = sorted(((us, c) for c, us in timed if us is not None), key=lambda pair: pair[0])
    trials = tuple((words(c), finite(us)) for us, c in known[:MAX_TRIALS])
    return replace(plan, trials=trials, measured=len(known))


def words(candidate: Candidate) -> str:
    """A template and its config, for people."""
    config = ", ".join(f"{name}={value}" for name, value in candidate.config)
    return f"{candidate.template} {config}".strip()
