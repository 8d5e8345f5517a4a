"""Whether projections are packed: by the best of each form, whatever was learned meanwhile."""

from types import SimpleNamespace

import pytest
from fake_segment_bench import FakeBench
from recipes import linear_recipe

from stof_compile.budget import Budget
from stof_compile.measure import Timing
from stof_compile.search import pack_choice
from stof_compile.search.candidate import LIBRARY, candidate_of
from stof_compile.search.context import TuningContext
from stof_compile.search.trial import TrialTable
from stof_compile.store import Store

SIZES = (3584, 512, 512)
"""Alone and packed the first is of one size to a fingerprint."""
BEST_APART, BEST_PACKED = {"warps": 9}, {"warps": 2}


class PackBench(FakeBench):
    """The library takes 1.3, a config 1.2 of a product's time; each form has a good one."""

    def __init__(self, store, seconds):
        super().__init__(TrialTable(store), [0.0])
        self.budget = Budget(seconds, clock=lambda: self.now[0])

    def candidates(self, recipe):
        return [candidate_of("fake", {"warps": w}) for w in range(12)]

    def time(self, recipe, candidate):
        columns = recipe.result.shape[-1]
        share = 1.3 if candidate.template == LIBRARY else 1.2
        if columns != sum(SIZES) and candidate.settings == BEST_APART:
            share = 0.8
        if columns == sum(SIZES) and candidate.settings == BEST_PACKED:
            share = 1.0
        us = columns / 100 * share
        return Timing(us, us, us, 3, "clock")


@pytest.fixture
def decide(monkeypatch):
    def product(gm, pack, which):
        return linear_recipe(2048, sum(SIZES[i] for i in which), 3584, bias=False)

    def draw(recipe, ctx):  # in a first search; what was learned meanwhile gives fewer
        learned = pack_choice._learned(ctx).config(
            pack_choice._fingerprints(recipe), ctx.bench.candidates(recipe)
        )
        every = [candidate_of(LIBRARY, {}), *ctx.bench.candidates(recipe)]
        return every if learned is None else [every[0], learned]

    monkeypatch.setattr(pack_choice, "_product", product)
    monkeypatch.setattr(pack_choice, "_drawn", draw)

    def run(store=None, seconds=1000.0):
        bench = PackBench(store, seconds)
        ctx = TuningContext(bench, bench.budget, seconds, store)
        return pack_choice._by_trials(None, SimpleNamespace(sizes=SIZES), ctx), bench, ctx

    return run


def test_each_form_keeps_what_was_measured(decide, tmp_path):
    wanted = sum(SIZES) / 100
    for store in (None, Store(tmp_path, "here")):
        plan, bench, ctx = decide(store)
        assert not plan.packed, plan.reason
        assert plan.separate_us == pytest.approx(0.8 * wanted)
        assert plan.packed_us == pytest.approx(wanted)
        assert ctx.trials == bench.table.measured


def test_times_that_are_known_count_when_the_budget_is_spent(decide):
    _, bench, _ = decide()
    plan, *_ = decide(seconds=bench.now[0] - 0.5)
    assert plan.separate_us == pytest.approx(0.8 * sum(SIZES) / 100)
