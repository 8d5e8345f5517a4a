"""Which candidates are worth measuring: samples, and templates that are within reach."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from stof_compile.search.candidate import LIBRARY, Candidate, closest_to
from stof_compile.templates.base import TILELANG

REACH = 1.4
"""A template whose best config so far is this much slower than the segment's best is not sampled
any further; the first configs are the templates' own estimates of their best."""

WARM_SAMPLES = 3  # of a segment, where the like was learned on another model
CLOSEST = 12  # configs to a learned one that are worth measuring; a search from nothing takes 40-70


def draw_candidates(
    space: Sequence[Candidate], count: int, seed: str, *, library: bool, slow: bool = False
) -> list[Candidate]:
    """Draw from a segment's candidates: what is there without us, each template's first config,
    then half of what is estimated to be fastest and half at random. Estimates are good (of matrix
    products with 128 rows the best of the first eight is 5 % from the best of all, on an H100:
    docs/fusion.md), and wrong in places.

    TileLang's templates are not drawn where another takes the segment: loading one of their
    kernels takes as long as twenty trials. Stage 2 comes to them where it follows.

    Args:
        space: as ``SegmentBench.candidates`` gives them; the first of each template is its own
            choice. count: most candidates drawn, but the library and the first configs always
            fit. seed: the same one draws the same. library: whether the segment as it is without
            us leads. slow: draw the first configs of TileLang's templates in any case.
    """
    quick = [c for c in space if not c.template.startswith(TILELANG)]
    leading = _first_of_each(space if slow or not quick else quick)
    drawn = [*([Candidate(LIBRARY)] if library else []), *leading]
    rest = [c for c in quick if c not in leading]
    more = min(len(rest), max(0, count - len(drawn)))
    ranked = rest[: (more + 1) // 2]
    return [*drawn, *ranked, *random.Random(seed).sample(rest[len(ranked) :], more - len(ranked))]


def draw_learned(
    learned: Candidate, space: Sequence[Candidate], seed: str, *, library: bool
) -> list[Candidate]:
    """Draw where an alike segment was tuned before: what is there without us, what that one got,
    and what its template estimates to be fastest here. If that one got the library, first configs
    of some templates have to lose once more.

    Args:
        learned: of the alike segment. space, seed, library: as for :func:`draw_candidates`.
    """
    if learned.template != LIBRARY:
        first = next((c for c in space if c.template == learned.template), learned)
        as_it_is = [Candidate(LIBRARY)] if library else []
        return [*as_it_is, *dict.fromkeys((learned, first))]
    return draw_candidates(space, WARM_SAMPLES, seed, library=library)[:WARM_SAMPLES]


def around(learned: Candidate, space: Sequence[Candidate]) -> list[Candidate]:
    """What is worth measuring where an alike segment got ``learned``: what is closest to it, and
    the first config of each template, which may be a better one for these sizes.
    """
    wanted = {*_first_of_each(space), *closest_to(learned, space)[:CLOSEST]}
    return [c for c in space if c in wanted]


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


def _first_of_each(space: Sequence[Candidate]) -> list[Candidate]:
    """The first candidate of each template, in the order in which they come."""
    first: dict[str, Candidate] = {}
    for candidate in space:
        first.setdefault(candidate.template, candidate)
    return list(first.values())
