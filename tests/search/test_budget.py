"""Budgets: seconds of an injected clock, and trials."""

from stof_compile.budget import Budget


def test_seconds():
    now = [100.0]
    budget = Budget(5.0, clock=lambda: now[0])
    assert (budget.left, budget.spent) == (5.0, False)
    now[0] = 104.0
    assert (budget.left, budget.spent) == (1.0, False)
    now[0] = 106.0
    assert (budget.left, budget.spent) == (0.0, True)


def test_trials():
    budget = Budget(5.0, clock=lambda: 0.0, trials=2)
    budget.count_trial()
    assert not budget.spent
    budget.count_trial()
    assert budget.spent
    assert budget.left == 5.0


def test_no_seconds_no_trials_allowed():
    assert Budget(0.0, clock=lambda: 0.0).spent
    assert Budget(1.0, clock=lambda: 0.0, trials=0).spent
