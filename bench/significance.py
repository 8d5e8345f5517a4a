"""Whether pipelines differ: Welch's t-test and a test on round means by scipy, Holm, effect size.

    d = (m1 - m2) / sqrt((s1^2 + s2^2) / 2)                                     (Cohen)

scipy belongs to the extra ``bench``; STOF itself does without it (``stof_compile/compare.py``).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from stof_compile.compare import ALPHA, MIN_EFFECT, ROUND_ALPHA

MISSING = "scipy is not installed, so nothing is tested: pip install 'stof-compile[bench]'"
Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Difference:
    """A pipeline against the base.

    Args:
        speedup: mean of the base over its mean. t, dof, p: Welch's test of all samples, two-sided;
            t > 0 where it is faster. round_t, round_p: paired test on the means of rounds.
        effect_d: Cohen's d; positive where it is faster, infinite where nothing varies.
    """

    speedup: float
    t: float
    dof: float
    p: float
    round_t: float
    round_p: float
    effect_d: float


def scipy_stats() -> Any | None:
    """The module ``scipy.stats``, None where scipy is not installed."""
    try:
        return importlib.import_module("scipy.stats")
    except ModuleNotFoundError:
        return None


def difference(base: Rounds, new: Rounds, stats: Any) -> Difference:
    """Test two pipelines that were timed in turns; round i of both was taken together.

    Args:
        stats: :func:`scipy_stats`.
    """
    a, b = list(chain.from_iterable(base)), list(chain.from_iterable(new))
    a_means, b_means = [fmean(r) for r in base], [fmean(r) for r in new]
    t, dof, p = _tested(stats.ttest_ind, a, b, equal_var=False)
    round_t, _, round_p = _tested(stats.ttest_rel, a_means, b_means)
    return Difference(fmean(a) / fmean(b), t, dof, p, round_t, round_p, effect_size(a, b))


def _tested(
    test: Any, a: Sequence[float], b: Sequence[float], **given: Any
) -> tuple[float, float, float]:
    """t, degrees of freedom and p; without any variance p is 1 for equal means, else 0."""
    differences = [x - y for x, y in zip(a, b, strict=True)] if not given else [*a, *b]
    constant = len(set(differences)) == 1 or (given and len(set(a)) == len(set(b)) == 1)
    if constant:
        gap = fmean(a) - fmean(b)
        dof = len(a) - 1 + (len(b) - 1 if given else 0)
        return (0.0, dof, 1.0) if gap == 0 else (math.copysign(math.inf, gap), dof, 0.0)
    found = test(a, b, **given)
    return float(found.statistic), float(found.df), float(found.pvalue)


def effect_size(a: Sequence[float], b: Sequence[float]) -> float:
    """Cohen's d of two samples: the difference of means in standard deviations."""
    gap, spread = fmean(a) - fmean(b), math.sqrt((stdev(a) ** 2 + stdev(b) ** 2) / 2)
    if spread == 0:
        return 0.0 if gap == 0 else math.copysign(math.inf, gap)
    return gap / spread


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in the same order: each may be compared with alpha.

    Source: S. Holm, 1979.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = least
    return corrected


def verdict(found: Difference, p_corrected: float) -> str:
    """``win``, ``loss`` or ``neutral``: both tests, and more than the least effect (specs/02)."""
    agree = found.t * found.round_t > 0 and found.round_p < ROUND_ALPHA and p_corrected < ALPHA
    if agree and found.speedup > 1 + MIN_EFFECT:
        return "win"
    if agree and 1 / found.speedup > 1 + MIN_EFFECT:
        return "loss"
    return "neutral"
