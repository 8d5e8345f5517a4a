"""Which candidates are worth measuring: samples, and templates that are within reach."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from stof_compile.search.bench import LIBRARY, Candidate
from stof_compile.templates.base import TILELANG

REACH = 1.4
"""A template whose best config so far is this much slower than the segment's best is not sampled
any further; the first configs are the templates' own estimates of their best."""


def draw_candidates(
    space: Sequence[Candidate], count: int, seed: str, *, library: bool
) -> list[Candidate]:
    """Draw from a segment's candidates, of TileLang's templates the first config only.

    Args:
        space: as ``SegmentBench.candidates`` gives them; the first of each template is its own
            choice. count: most candidates drawn, but the library and every template's first
            config always fit. seed: the same one draws the same. library: whether the segment as
            it is without us leads.
    """
    leading = list({c.template: c for c in reversed(space)}.values())[::-1]
    drawn = [*([Candidate(LIBRARY)] if library else []), *leading]
    rest = [c for c in space if c not in leading and not c.template.startswith(TILELANG)]
    more = max(0, count - len(drawn))
    return drawn + random.Random(seed).sample(rest, min(len(rest), more))


def within_reach(
    space: Sequence[Candidate], best_us: float | None, cost: Callable[[Candidate], float | None]
) -> list[Candidate]:
    """Candidates of the templates that may still win.

    Args:
        best_us: time of the fastest candidate so far, of whatever template; None = none is known.
        cost: time of a candidate, infinity where it failed, None where it was not measured.
    """
    if best_us is None:
        return list(space)
    fastest: dict[str, float] = {}
    for candidate in space:
        us = cost(candidate)
        if us is not None:
            fastest[candidate.template] = min(us, fastest.get(candidate.template, us))
    return [c for c in space if fastest.get(c.template, 0.0) <= REACH * best_us]
