"""Whether one pipeline is faster than another: Welch's test on interleaved rounds.

    t   = (m1 - m2) / sqrt(s1^2 / n1 + s2^2 / n2)
    dof = (s1^2/n1 + s2^2/n2)^2 / ((s1^2/n1)^2 / (n1 - 1) + (s2^2/n2)^2 / (n2 - 1))
    p   = P(|T| >= |t|) = I(dof / (dof + t^2); dof / 2, 1/2)

I is the regularised incomplete beta function, summed here as a continued fraction. Single times
follow each other and are alike, which makes p too small; clocks drift, which moves whole rounds. So
the differences of round means have to say the same, in a test of their own.
Source: B. L. Welch, 1947; S. Holm, 1979; the fraction is 8.17.22 of the NIST Digital Library of
Mathematical Functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev
from typing import Literal

MIN_EFFECT = 0.005
ALPHA = 0.01
ROUND_ALPHA = 0.05
"""Significance of the test on round means: ten rounds are few, and the first test stands too."""


@dataclass(frozen=True)
class TTest:
    """Result of a t-test: ``p`` is two-sided; ``t`` is infinite where nothing varies."""

    t: float
    dof: float
    p: float


@dataclass(frozen=True)
class Verdict:
    """What a comparison says of a new pipeline.

    Args:
        verdict: "win": faster beyond chance and by more than ``min_effect``; "loss": slower in the
            same sense; "neutral": neither, keep the simpler one.
        speedup: mean of the base over mean of the new one.
        p, t, dof: Welch's test of all times; t > 0 where the new one is faster.
        n: number of times of both.
        round_p: p of the test on the differences of round means.
    """

    verdict: Literal["win", "loss", "neutral"]
    speedup: float
    p: float
    t: float
    dof: float
    n: tuple[int, int]
    round_p: float


def compare(
    base_us: Sequence[Sequence[float]],
    new_us: Sequence[Sequence[float]],
    min_effect: float = MIN_EFFECT,
    alpha: float = ALPHA,
    round_alpha: float = ROUND_ALPHA,
) -> Verdict:
    """Compare two pipelines that were timed in turns.

    Args:
        base_us, new_us: times in microseconds of each round; round i of both was taken together
            (in the order base, new, new, base or the like). At least two rounds and, over all
            rounds, two times each.
        min_effect: smallest speedup that counts, less one.
        alpha: significance of Welch's test over all times; divide it by the number of passes
            compared, or see :func:`holm`.
        round_alpha: significance of the test on round means, which has to agree in sign.
    Raises:
        ValueError: rounds are missing, empty or not as many, or a time is not above zero.
    """
    _check(base_us, new_us)
    base, new = list(chain.from_iterable(base_us)), list(chain.from_iterable(new_us))
    test = welch(fmean(base), stdev(base), len(base), fmean(new), stdev(new), len(new))
    rounds = paired([fmean(b) - fmean(n) for b, n in zip(base_us, new_us, strict=True)])
    speedup = fmean(base) / fmean(new)
    agree = test.t * rounds.t > 0 and rounds.p < round_alpha
    verdict: Literal["win", "loss", "neutral"] = "neutral"
    if agree and test.p < alpha and test.t > 0 and speedup > 1 + min_effect:
        verdict = "win"
    elif agree and test.p < alpha and test.t < 0 and 1 / speedup > 1 + min_effect:
        verdict = "loss"
    return Verdict(verdict, speedup, test.p, test.t, test.dof, (len(base), len(new)), rounds.p)


def _check(base_us: Sequence[Sequence[float]], new_us: Sequence[Sequence[float]]) -> None:
    if len(base_us) != len(new_us) or len(base_us) < 2:
        raise ValueError(
            f"{len(base_us)} rounds of the base and {len(new_us)} of the new pipeline: both need "
            "the same number, at least 2; time them in turns"
        )
    if not all(len(times) for times in (*base_us, *new_us)):
        raise ValueError("a round has no times; drop it from both pipelines")
    worst = min(chain.from_iterable((*base_us, *new_us)))
    if not worst > 0 or not math.isfinite(sum(chain.from_iterable((*base_us, *new_us)))):
        raise ValueError(f"times are finite and above zero, the smallest here is {worst} us")


def welch(m1: float, s1: float, n1: int, m2: float, s2: float, n2: int) -> TTest:
    """Welch's test of two means with unequal variances.

    Args:
        m1, s1, n1: mean, standard deviation (of n - 1) and size of the first sample; likewise the
            second. Sizes are at least 2.
    Returns:
        t > 0 where the first mean is larger. Without any variance p is 1 for equal means, else 0.
    """
    if min(n1, n2) < 2:
        raise ValueError(f"samples of {n1} and {n2}: a variance needs at least 2")
    v1, v2 = s1 * s1 / n1, s2 * s2 / n2
    if v1 + v2 == 0.0:
        return _without_variance(m1 - m2, n1 + n2 - 2)
    t = (m1 - m2) / math.sqrt(v1 + v2)
    share = v1 / (v1 + v2)  # of the variance: squares of small variances would underflow
    dof = 1.0 / (share**2 / (n1 - 1) + (1.0 - share) ** 2 / (n2 - 1))
    return TTest(t, dof, two_sided(t, dof))


def paired(differences: Sequence[float]) -> TTest:
    """Test whether the mean of at least two differences is zero."""
    n = len(differences)
    mean, deviation = fmean(differences), stdev(differences)
    if deviation == 0.0:
        return _without_variance(mean, n - 1)
    t = mean / deviation * math.sqrt(n)
    return TTest(t, n - 1, two_sided(t, n - 1))


def _without_variance(difference: float, dof: float) -> TTest:
    if difference == 0.0:
        return TTest(0.0, dof, 1.0)
    return TTest(math.copysign(math.inf, difference), dof, 0.0)


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Which of several hypotheses to reject, so that one false rejection has probability alpha.

    The smallest p is compared with alpha / k, the next with alpha / (k - 1), and so on up to the
    first that fails.

    Args:
        p_values: one of each test, in any order.
    Returns:
        In the same order, whether the test is significant.
    """
    rejected = [False] * len(p_values)
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if not p_values[place] < alpha / (len(p_values) - rank):
            break
        rejected[place] = True
    return rejected


def two_sided(t: float, dof: float) -> float:
    """P(|T| >= |t|) of Student's distribution; ``dof`` > 0 need not be whole."""
    if math.isinf(t):
        return 0.0
    square = t * t
    # of both forms of the argument the one that is not 1 less a small number
    return _beta_ratio(dof / (dof + square), square / (dof + square), dof / 2.0, 0.5)


def _beta_ratio(x: float, rest: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I(x; a, b); ``rest`` is 1 - x."""
    if x <= 0.0 or rest <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges on the other side
        return 1.0 - _beta_ratio(rest, x, b, a)
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    )
    return math.exp(log_front) / a * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d1 / (1 + d2 / ...)) by Lentz's method."""
    tiny = 1e-300
    numerator, denominator, value = 1.0, 0.0, 1.0
    for step in range(1000):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        denominator = 1.0 / (1.0 + term * denominator or tiny)
        numerator = 1.0 + term / numerator or tiny
        value *= numerator * denominator
        if step and abs(1.0 - numerator * denominator) < 1e-14:
            break
    return value - 1.0
