"""Stage 2: who is sampled how often, what is found, and when it ends."""

import itertools
import math
import random

import pytest

from stof_compile.budget import Budget
from stof_compile.search.stage2 import sample_configs, shares

BEST = (3, 1, 4)


def toy_cost(candidate):
    return 10.0 + sum(abs(value - best) for value, best in zip(candidate, BEST, strict=True))


def one_dimension_apart(first, second):
    return sum(a != b for a, b in zip(first, second, strict=True)) == 1


def run(spaces, cost, known=None, seed=0, budget=None, **settings):
    """Search with a cost (segment, candidate) -> us; also returns what was measured, in order."""
    table = dict(known or {})
    asked = []

    def measure(index, candidate):
        assert (index, candidate) not in table, "measured twice"
        asked.append((index, candidate))
        table[index, candidate] = cost(index, candidate)
        return table[index, candidate]

    result = sample_configs(
        spaces,
        lambda index, candidate: table.get((index, candidate)),
        measure,
        generator=random.Random(seed),
        budget=budget or Budget(1.0, clock=lambda: 0.0),
        **settings,
    )
    assert result.measured == len(asked)
    return result, asked, table


@pytest.mark.parametrize("seed", range(8))
def test_finds_the_best_of_a_toy_space_without_trying_all(seed):
    space = list(itertools.product(range(6), repeat=3))
    result, asked, _ = run([space], lambda i, c: toy_cost(c), seed=seed, near=one_dimension_apart)
    assert result.best == (BEST,)
    assert result.cost_us == (10.0,)
    assert len(asked) < len(space)


def test_all_is_tried_where_gains_never_end():
    space = list(range(40))
    result, asked, _ = run([space], lambda i, c: float(c), per_iteration=8, patience=100)
    assert sorted(c for _, c in asked) == space
    assert (result.best, result.stopped) == ((0,), "exhausted")


def test_first_iteration_is_equal_and_reward_moves_the_rest():
    drops = [iter(range(1000, 0, -1)), iter(itertools.repeat(5.0)), iter(itertools.repeat(5.0))]
    spaces = [range(60)] * 3
    _, asked, _ = run(spaces, lambda i, c: float(next(drops[i])), per_iteration=12)
    first, second, third = asked[:12], asked[12:24], asked[24:36]
    assert [sum(i == s for i, _ in first) for s in range(3)] == [4, 4, 4]
    assert [sum(i == s for i, _ in second) for s in range(3)] == [6, 3, 3]  # weights 2, 1, 1
    assert [sum(i == s for i, _ in third) for s in range(3)] == [7, 3, 2]  # weights 3, 1, 1


def test_reward_goes_to_the_largest_drop():
    costs = [[9.0, 8.0], [9.0, 2.0]]
    result, _, _ = run([[0, 1], [0, 1]], lambda i, c: costs[i].pop(0), per_iteration=4)
    assert result.weights == (1.0, 2.0)
    costs = [[9.0, 8.0], [9.0, 2.0]]
    result, _, _ = run([[0, 1], [0, 1]], lambda i, c: costs[i].pop(0), per_iteration=4, reward=3.0)
    assert result.weights == (1.0, 4.0)


def test_every_segment_is_sampled_in_every_iteration():
    result, asked, _ = run([range(9)] * 5, lambda i, c: 1.0, per_iteration=2, patience=2)
    # the first iteration gains a first time for each, two more bring nothing
    assert [i for i, _ in asked] == [0, 1, 2, 3, 4] * 3
    assert (result.iterations, result.stopped) == (3, "no gain")


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ([1, 1, 1], 12, [4, 4, 4]),
        ([1, 1, 1], 13, [5, 4, 4]),
        ([2, 1, 1], 12, [6, 3, 3]),
        ([100, 1, 1], 12, [10, 1, 1]),
        ([1, 1, 1], 2, [1, 1, 1]),
        ([5], 7, [7]),
    ],
)
def test_shares(weights, total, expected):
    assert shares(weights, total) == expected


def test_shares_keep_their_sum():
    generator = random.Random(0)
    for _ in range(500):
        weights = [generator.uniform(1, 20) for _ in range(generator.randint(1, 12))]
        total = generator.randint(1, 60)
        counts = shares(weights, total)
        assert min(counts) >= 1
        assert sum(counts) == max(total, len(weights))


def test_three_iterations_without_gain_end_it():
    result, asked, _ = run([range(1000)], lambda i, c: 7.0, per_iteration=4)
    assert (result.iterations, result.stopped, len(asked)) == (4, "no gain", 16)


def test_budget_ends_it_between_two_measurements():
    now = [0.0]

    def cost(index, candidate):
        now[0] += 1.0
        return float(candidate)

    budget = Budget(5.0, clock=lambda: now[0])
    result, asked, _ = run([range(50), range(50)], cost, budget=budget, per_iteration=8)
    assert (result.stopped, len(asked)) == ("budget", 5)
    assert result.cost_us == tuple(float(c) for c in result.best)
    result, asked, _ = run([range(5)], cost, budget=Budget(0.0, clock=lambda: 0.0))
    assert (result.best, result.cost_us, asked) == ((None,), (math.inf,), [])


def test_warm_search_measures_nothing_and_ends_alike():
    space = list(itertools.product(range(6), repeat=3))
    known = {(0, c): toy_cost(c) for c in space[::3]}
    spaces = [space, space[:50]]
    cold, asked, table = run(spaces, lambda i, c: toy_cost(c) + i, known, near=one_dimension_apart)
    assert asked
    spent = Budget(0.0, clock=lambda: 0.0)
    warm, asked, _ = run(spaces, None, table, budget=spent, near=one_dimension_apart)
    assert asked == []
    assert (warm.best, warm.cost_us, warm.weights) == (cold.best, cold.cost_us, cold.weights)


def test_known_candidate_counts_though_it_is_never_drawn():
    known = {(0, 77): 0.5}
    budget = Budget(0.0, clock=lambda: 0.0)
    result, _, _ = run([range(100)], None, known, budget=budget)
    assert (result.best, result.cost_us) == ((77,), (0.5,))


def test_failures_are_never_the_best():
    costs = {0: math.inf, 1: math.nan, 2: 4.0}
    result, _, _ = run([[0, 1, 2], [0, 1]], lambda i, c: costs[c])
    assert (result.best, result.cost_us) == ((2, None), (4.0, math.inf))


def test_seed_decides_the_order():
    def order(seed):
        return run([range(50)], lambda i, c: 1.0, seed=seed)[1]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_no_segments():
    result, _, _ = run([], None)
    assert (result.best, result.stopped) == ((), "exhausted")


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="per_iteration=0"):
        run([[1]], None, per_iteration=0)
    with pytest.raises(ValueError, match="patience=0"):
        run([[1]], None, patience=0)
