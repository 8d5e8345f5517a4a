"""Whether pipelines differ: Welch's t-test and a test on round means by scipy, Holm, effect size.

    d = (m1 - m2) / sqrt((s1^2 + s2^2) / 2)                                     (Cohen)

scipy belongs to the extra ``bench``. Where it is missing, the tests are those of
``stof_compile/compare.py``, which has the same formulas; the rows say by which they were tested.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from stof_compile.compare import ALPHA, MIN_EFFECT, ROUND_ALPHA, TTest, paired, welch

OWN = "stof_compile.compare"
MISSING = f"scipy is not installed, tested by {OWN}: pip install 'stof-compile[bench]'"
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


def difference(base: Rounds, new: Rounds, stats: Any | None) -> Difference:
    """Test two pipelines that were timed in turns; round i of both was taken together.

    Args:
        stats: :func:`scipy_stats`; None = the tests of ``stof_compile/compare.py``.
    """
    a, b = list(chain.from_iterable(base)), list(chain.from_iterable(new))
    all_of_it = _welch(a, b, stats)
    rounds = _paired([fmean(r) for r in base], [fmean(r) for r in new], stats)
    return Difference(
        fmean(a) / fmean(b), all_of_it.t, all_of_it.dof, all_of_it.p, rounds.t, rounds.p,
        effect_size(a, b),
    )  # fmt: skip


def _welch(a: Sequence[float], b: Sequence[float], stats: Any | None) -> TTest:
    if stats is None or len(set(a)) == len(set(b)) == 1:  # scipy has no p without any variance
        return welch(fmean(a), stdev(a), len(a), fmean(b), stdev(b), len(b))
    found = stats.ttest_ind(a, b, equal_var=False)
    return TTest(float(found.statistic), float(found.df), float(found.pvalue))


def _paired(a: Sequence[float], b: Sequence[float], stats: Any | None) -> TTest:
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if stats is None or len(set(differences)) == 1:
        return paired(differences)
    found = stats.ttest_rel(a, b)
    return TTest(float(found.statistic), float(found.df), float(found.pvalue))


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
