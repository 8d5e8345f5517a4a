"""Stage 1: which scheme a chain gets, by expand, seize and compete.

The search goes depth first from the initial scheme. A move is measured on the segments it touches
and kept when they get faster, otherwise rolled back and the next one is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from stof_compile.budget import Budget
from stof_compile.fusion.scheme import MAX_COMPUTE_INTENSIVE, Scheme
from stof_compile.search.kinds import Kind, Segment, compute_intensive_ops

SAMPLES = 8  # configs drawn for each segment (specs/01, section 8)
EPS = 0.01  # a gain below this share is noise (specs/01, section 8)
MAX_SCHEMES = 256
"""Schemes looked at in one chain; a layer of 14 ops has far fewer within reach of its moves."""

Legality = Callable[[int, int], str | None]
"""(start, stop) of a segment of two or more ops -> why it cannot be one kernel, None if it can."""

SegmentCost = Callable[[Segment], float]
"""Microseconds of a segment with one config of those drawn; infinity if it failed."""


@dataclass(frozen=True)
class Move:
    """A scheme one step away.

    Args:
        name: ``expand`` | ``seize`` | ``compete``.
        scheme: the scheme after the move.
    """

    name: str
    scheme: Scheme


@dataclass(frozen=True)
class MoveRecord:
    """What became of a move.

    Args:
        name: ``expand`` | ``seize`` | ``compete``.
        before, after: codes of the schemes in hexadecimal.
        before_us, after_us: time of the touched segments in either scheme, infinity where a
            segment has no kernel; None for an illegal move, which is not measured.
        outcome: ``kept`` | ``rolled back`` | ``illegal``.
        reason: why it is illegal; empty otherwise.
    """

    name: str
    before: str
    after: str
    before_us: float | None
    after_us: float | None
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Stage1Result:
    """The best scheme found.

    Args:
        scheme: never slower than the initial one, by the samples drawn.
        moves: every move looked at, in order.
        stopped: ``no gain`` (no move helps) | ``budget`` | ``schemes`` (:data:`MAX_SCHEMES`).
    """

    scheme: Scheme
    moves: tuple[MoveRecord, ...]
    stopped: str


def neighbours(
    scheme: Scheme, kinds: Sequence[Kind], gain: Callable[[Scheme], float] | None = None
) -> Iterator[Move]:
    """All schemes one move away, in the order in which stage 1 tries them, each once.

    * expand joins two adjacent segments; pairs with a compute-intensive op come first.
    * seize: a segment with a compute-intensive op takes the boundary op of an adjacent
      memory-intensive segment, first on its left, then on its right.
    * compete: a single memory-intensive op between two segments with compute-intensive ops goes
      first to the one with exactly one of them; a tie goes to the larger gain, then to the left.
      Such an op is left out of expand and seize, which would ignore that order.

    Within a move the order is left to right. No segment has more than two compute-intensive ops.
    Args:
        kinds: one for each op of the scheme.
        gain: microseconds that a scheme saves, asked for ties of compete only and as late as
            possible; None = nothing is known.
    Raises:
        ValueError: ``kinds`` and the scheme differ in length.
    Source: STOF paper (moves); specs/01, section 8 (order). That only a memory-intensive op is
        contested is our reading: a compute-intensive one takes, it is not taken.
    """
    if len(kinds) != scheme.ops:
        raise ValueError(f"a scheme of {scheme.ops} ops with {len(kinds)} kinds")
    counts = [compute_intensive_ops(kinds, segment) for segment in scheme.segments]
    contested = {
        i
        for i in range(1, len(counts) - 1)
        if scheme.lengths[i] == 1 and not counts[i] and counts[i - 1] and counts[i + 1]
    }
    seen = {scheme.lengths}
    for move in chain(
        _expansions(scheme, counts, contested),
        _seizures(scheme, counts, contested),
        _competitions(scheme, counts, contested, gain),
    ):
        if move.scheme.lengths not in seen:
            seen.add(move.scheme.lengths)
            yield move


def search_scheme(
    initial: Scheme,
    kinds: Sequence[Kind],
    legality: Legality,
    cost: SegmentCost,
    *,
    budget: Budget,
    samples: int = SAMPLES,
    eps: float = EPS,
    max_schemes: int = MAX_SCHEMES,
) -> Stage1Result:
    """Search the scheme with the least time.

    A segment is sampled once in a search: its time is the best of its samples wherever it occurs,
    so times of schemes can be added and a kept move never makes the sum larger.
    Args:
        initial: where the search begins; returned when no move helps.
        kinds: one for each op.
        legality: asked before a new segment of two or more ops is measured.
        cost: one sample of a segment; called ``samples`` times for each segment looked at.
        budget: looked at before every sample. A move whose samples are not complete is dropped.
        samples: configs drawn for each segment.
        eps: share that a move must save to be kept.
        max_schemes: moves looked at.
    Raises:
        ValueError: a segment of ``initial`` has more than two compute-intensive ops, ``kinds`` has
            another length, or ``samples`` < 1.
    Source: STOF paper, stage 1 of the search; specs/01, section 8.
    """
    if samples < 1:
        raise ValueError(f"stage 1 needs at least one sample a segment, got samples={samples}")
    if len(kinds) != initial.ops:
        raise ValueError(f"a scheme of {initial.ops} ops with {len(kinds)} kinds")
    for segment in initial.segments:
        count = compute_intensive_ops(kinds, segment)
        if count > MAX_COMPUTE_INTENSIVE:
            raise ValueError(
                f"segment {segment} of the initial scheme has {count} compute-intensive ops; "
                f"at most {MAX_COMPUTE_INTENSIVE} fit"
            )
    costs = _Costs(legality, cost, samples, budget)
    visited = {initial.code}
    records: list[MoveRecord] = []
    scheme, stopped = initial, ""
    while not stopped:  # each turn is one level of the depth-first search
        stopped = "no gain"
        current = scheme
        for move in neighbours(current, kinds, partial(costs.gain, current)):
            if budget.spent:
                stopped = "budget"
                break
            if move.scheme.code in visited:
                continue
            if len(records) >= max_schemes:
                stopped = "schemes"
                break
            visited.add(move.scheme.code)
            record = _tried(move, current, costs)
            if record is None:
                stopped = "budget"
                break
            if record.after_us is not None and record.before_us is not None:
                kept = record.after_us < record.before_us * (1 - eps)
                record = replace(record, outcome="kept" if kept else "rolled back")
            records.append(record)
            if record.outcome == "kept":
                scheme, stopped = move.scheme, ""
                break
    return Stage1Result(scheme, tuple(records), stopped)


# -- moves ----------------------------------------------------------------------------------------


def _expansions(scheme: Scheme, counts: Sequence[int], contested: set[int]) -> Iterator[Move]:
    pairs = [
        i
        for i in range(len(counts) - 1)
        if counts[i] + counts[i + 1] <= MAX_COMPUTE_INTENSIVE and not {i, i + 1} & contested
    ]
    for i in sorted(pairs, key=lambda i: counts[i] + counts[i + 1] == 0):  # stable: left to right
        yield Move("expand", scheme.merge(i, i + 1))


def _seizures(scheme: Scheme, counts: Sequence[int], contested: set[int]) -> Iterator[Move]:
    for i, count in enumerate(counts):
        if not count:
            continue
        if i > 0 and not counts[i - 1] and i - 1 not in contested:
            yield Move("seize", scheme.move_boundary(i - 1, -1))
        if i + 1 < len(counts) and not counts[i + 1] and i + 1 not in contested:
            yield Move("seize", scheme.move_boundary(i, 1))


def _competitions(
    scheme: Scheme,
    counts: Sequence[int],
    contested: set[int],
    gain: Callable[[Scheme], float] | None,
) -> Iterator[Move]:
    for i in sorted(contested):
        to_left, to_right = scheme.merge(i - 1, i), scheme.merge(i, i + 1)
        left_single, right_single = counts[i - 1] == 1, counts[i + 1] == 1
        if left_single != right_single:
            right_first = right_single
        else:
            right_first = gain is not None and gain(to_right) > gain(to_left)
        for wanted in (to_right, to_left) if right_first else (to_left, to_right):
            yield Move("compete", wanted)


# -- measuring ------------------------------------------------------------------------------------


class _Costs:
    """Best of a fixed number of samples for each segment, drawn once."""

    def __init__(self, legality: Legality, cost: SegmentCost, samples: int, budget: Budget) -> None:
        self._legality = legality
        self._cost = cost
        self._samples = samples
        self._budget = budget
        self._reasons: dict[Segment, str | None] = {}
        self._best: dict[Segment, float] = {}

    def reason(self, segment: Segment) -> str | None:
        """Why a segment is illegal; a single op is left as it is and always legal."""
        if segment not in self._reasons:
            start, stop = segment
            self._reasons[segment] = None if stop - start == 1 else self._legality(start, stop)
        return self._reasons[segment]

    def of(self, segments: Sequence[Segment]) -> float | None:
        """Time of segments together; None when the budget ends before all samples are drawn."""
        total = 0.0
        for segment in segments:
            if segment not in self._best:
                best = math.inf
                for _ in range(self._samples if self.reason(segment) is None else 0):
                    if self._budget.spent:
                        return None
                    sample = self._cost(segment)
                    if math.isinf(sample) and self._budget.spent:  # it may have had no time
                        return None
                    best = best if math.isnan(sample) else min(best, sample)
                self._best[segment] = best
            total += self._best[segment]
        return total

    def gain(self, before: Scheme, after: Scheme) -> float:
        """Microseconds saved; minus infinity when the scheme is illegal or cannot be measured."""
        left, entered = _touched(before, after)
        if any(self.reason(segment) is not None for segment in entered):
            return -math.inf
        before_us, after_us = self.of(left), self.of(entered)
        if before_us is None or after_us is None or math.isinf(after_us):
            return -math.inf
        return before_us - after_us


def _tried(move: Move, current: Scheme, costs: _Costs) -> MoveRecord | None:
    """A move measured, its outcome still open unless illegal; None when the budget ended."""
    left, entered = _touched(current, move.scheme)
    names = (move.name, current.hex, move.scheme.hex)
    for segment in entered:
        reason = costs.reason(segment)
        if reason is not None:
            return MoveRecord(*names, None, None, "illegal", reason)
    before_us = costs.of(left)
    after_us = None if before_us is None else costs.of(entered)
    if after_us is None:
        return None
    return MoveRecord(*names, before_us, after_us, "")


def _touched(before: Scheme, after: Scheme) -> tuple[list[Segment], list[Segment]]:
    """The segments that a move takes away, and those it brings."""
    old, new = set(before.segments), set(after.segments)
    return sorted(old - new), sorted(new - old)
