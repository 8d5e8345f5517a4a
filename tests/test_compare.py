"""The statistics of measured passes: known values, and verdicts on drawn times."""

import math
import random

import pytest

from stof_compile.compare import compare, holm, paired, two_sided, welch


def test_the_known_value():
    found = welch(10.0, 1.0, 200, 10.5, 1.2, 200)
    assert found.t == pytest.approx(-4.527, abs=5e-4)
    assert found.dof == pytest.approx(385, abs=1)
    assert found.p == pytest.approx(7.9914e-6, rel=1e-4)


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.1, 1.0, 3.0, 12.706, 1e3, 1e6])
def test_closed_forms_of_students_distribution(t):
    one = 2.0 / math.pi * math.atan2(1.0, t)
    two = 1.0 - t / math.sqrt(2.0 + t * t)
    three = 1 - 2 / math.pi * (math.atan(t / 3**0.5) + t / 3**0.5 / (1 + t * t / 3))
    assert two_sided(t, 1) == pytest.approx(one, rel=1e-9)
    assert two_sided(t, 2) == pytest.approx(two, rel=1e-9, abs=1e-12)
    assert two_sided(t, 3) == pytest.approx(three, rel=1e-9, abs=1e-12)
    assert two_sided(-t, 7.5) == two_sided(t, 7.5)


@pytest.mark.parametrize(
    ("t", "dof", "p"),
    [(2.228139, 10, 0.05), (2.63869, 80, 0.01), (1.959964, 1e6, 0.05), (3.290527, 1e6, 0.001)],
)
def test_tabulated_quantiles(t, dof, p):
    assert two_sided(t, dof) == pytest.approx(p, rel=1e-4)


def test_samples_without_variance():
    assert welch(5.0, 0.0, 10, 5.0, 0.0, 10).p == 1.0
    apart = welch(5.0, 0.0, 10, 6.0, 0.0, 10)
    assert (apart.p, apart.t, apart.dof) == (0.0, -math.inf, 18)
    one = welch(5.0, 0.0, 10, 6.0, 1.0, 20)  # only one of them varies
    assert one.dof == pytest.approx(19) and 0.0 < one.p < 1e-3
    assert welch(5.0, 1e-200, 10, 5.0, 1e-200, 10).p == 1.0  # whose square is zero
    assert paired([0.0, 0.0]).p == 1.0 and paired([1.0, 1.0]).p == 0.0


def times(mean, rounds=10, size=20, noise=0.01, drift=0.0, seed=0):
    """Times in microseconds; ``drift`` moves whole rounds, alike for equal seeds."""
    draw, moved = random.Random(seed), random.Random(99)
    moves = [1 + drift * moved.gauss(0, 1) for _ in range(rounds)]
    return [[mean * move * (1 + noise * draw.gauss(0, 1)) for _ in range(size)] for move in moves]


def test_identical_samples():
    base = times(100.0)
    found = compare(base, base)
    assert (found.verdict, found.speedup, found.p, found.t) == ("neutral", 1.0, 1.0, 0.0)
    assert found.n == (200, 200)


def test_win_and_loss_are_symmetric():
    base, fast = times(100.0), times(95.0, seed=1)
    win, loss = compare(base, fast), compare(fast, base)
    assert (win.verdict, loss.verdict) == ("win", "loss")
    assert win.speedup == pytest.approx(1 / loss.speedup) and win.t == pytest.approx(-loss.t)
    assert win.p == pytest.approx(loss.p) and win.p < 1e-6 and win.t > 0


def test_a_slow_pass_loses_and_no_change_is_neutral():
    verdicts = [compare(times(100.0, seed=s), times(103.0, seed=50 + s)).verdict for s in range(20)]
    assert set(verdicts) == {"loss"}
    same = [compare(times(100.0, seed=s), times(100.0, seed=50 + s)).verdict for s in range(50)]
    assert same.count("neutral") >= 49


def test_a_real_but_small_effect_is_neutral():
    found = compare(times(100.0, noise=0.001), times(99.7, noise=0.001, seed=1))
    assert found.p < 1e-6 and found.verdict == "neutral"
    assert compare(times(100.0, noise=0.001), times(99.3, noise=0.001, seed=1)).verdict == "win"


def test_drift_common_to_both_hides_nothing():
    base, fast = times(100.0, drift=0.02), times(95.0, drift=0.02, seed=1)
    assert compare(base, fast).verdict == "win"


def test_one_bad_round_is_no_win():
    """Clocks were low while the base went first: far apart over all times, not over the rounds."""
    base, new = times(100.0), times(100.0, seed=1)
    base[0] = [t * 1.4 for t in base[0]]
    found = compare(base, new)
    assert found.p < 0.01 and found.speedup > 1.02
    assert found.verdict == "neutral" and found.round_p > 0.05


def test_rounds_that_disagree_in_sign():
    """Rounds of unequal size: the mean of all times and that of the rounds point apart."""
    base = [[10.0, 10.1] * 50, *[[8.0, 8.1]] * 4]
    new = [[9.0, 9.1] * 50, *[[9.0, 9.1]] * 4]
    assert compare(base, new).verdict == "neutral"
    assert compare(new, base).verdict == "neutral"


def test_constant_times():
    constant = [[10.0] * 5] * 4
    assert compare(constant, constant).verdict == "neutral"
    assert compare(constant, [[9.0] * 5] * 4).verdict == "win"
    assert compare([[9.0] * 5] * 4, constant).verdict == "loss"


@pytest.mark.parametrize(
    ("base", "new", "words"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], "at least 2"),
        ([[1.0], [2.0]], [[1.0]], "the same number"),
        ([[1.0], []], [[1.0], [2.0]], "no times"),
        ([[1.0], [0.0]], [[1.0], [2.0]], "above zero"),
        ([[1.0], [math.nan]], [[1.0], [2.0]], "finite"),
        ([[1.0], [math.inf]], [[1.0], [2.0]], "finite"),
    ],
)
def test_wrong_times(base, new, words):
    with pytest.raises(ValueError, match=words):
        compare(base, new)


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005], alpha=0.05) == [True, False, False, True]
    assert holm([0.04, 0.6, 0.9], alpha=0.05) == [False, False, False]  # 0.05 / 3 decides
    assert holm([0.02, 0.001, 0.03], alpha=0.05) == [True, True, True]
    assert holm([0.2, 0.001], alpha=0.05) == [False, True]
    assert holm([]) == []
    assert holm([0.009]) == [True] and holm([0.01]) == [False]
