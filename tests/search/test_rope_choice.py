"""The decision about products with rotations, on a bench with invented times and a fake clock."""

import pytest
from rope_recipes import sized

from stof_compile.budget import Budget
from stof_compile.errors import StofPlanError
from stof_compile.measure import ErrorReport, Timing
from stof_compile.plan import ChainPlan, Plan
from stof_compile.search.candidate import LIBRARY, candidate_of
from stof_compile.search.context import TuningContext
from stof_compile.search.rope_choice import (
    choose_rotation,
    prepare_rotations,
    rope_key,
    template_of,
)
from stof_compile.search.trial import TrialTable
from stof_compile.store import Store

RECIPE = sized((2, 64), (4, 2), 2, 64, 256)
SPACE = [candidate_of("fake", {"warps": w, "tile": t}) for w in (1, 2, 4, 8) for t in (16, 32, 64)]


class FakeBench:
    """Every trial takes a second; a template's time is ``ours`` and a little for its config."""

    def __init__(self, store, seconds, ours, apart=10.0, product=(8.0, 8.0), space=SPACE):
        self.now = [0.0]
        self.budget = Budget(seconds, clock=lambda: self.now[0])
        self.table, self.ours, self.apart, self.product = TrialTable(store), ours, apart, product
        self.space, self.asked, self.compared, self.prepared = space, [], [], []

    def candidates(self, recipe):
        return self.space if len(recipe.steps) == 2 else SPACE[:2]

    def offers(self, recipe, candidate):
        return candidate in self.candidates(recipe)

    def first(self, recipe):
        return next(iter(self.candidates(recipe)), None)

    def prepare(self, recipe, candidates):
        self.prepared += candidates

    def known(self, recipe, candidate):
        return self.table.known(recipe.key, candidate.template, candidate.settings)

    def us(self, recipe, candidate):
        if len(recipe.steps) == 1:
            return self.product[candidate.template != LIBRARY]
        if candidate.template == LIBRARY:
            return self.apart
        return self.ours * (1 + 0.01 * candidate.settings["warps"])

    def trial(self, recipe, candidate):
        def run():
            self.now[0] += 1.0
            self.asked.append(candidate)
            us = self.us(recipe, candidate)
            return ErrorReport(0.0, 0.0, True), Timing(us, us, us, 3, "clock")

        return self.table.measure(recipe.key, candidate.template, candidate.settings, run)

    def compare(self, schemes):
        self.compared = [sum(self.us(r, c) for r, c in scheme) for scheme in schemes]
        return self.compared


def chosen(ours=7.0, store=None, seconds=1000.0, products=False, bench=None, **context):
    bench = bench or FakeBench(store, seconds, ours)
    ctx = TuningContext(bench, bench.budget, seconds, store, **context)
    if products:  # as packing has measured them
        product = type(RECIPE)(RECIPE.operands[:2], RECIPE.steps[:1])
        for candidate in (candidate_of(LIBRARY, {}), *SPACE[:2]):
            bench.trial(product, candidate)
        bench.asked.clear()
    prepare_rotations([RECIPE], ctx)
    return choose_rotation(RECIPE, ctx), bench, ctx


def test_the_fastest_config_is_taken_after_a_comparison_in_turns():
    plan, bench, ctx = chosen()
    segment = template_of(plan)
    assert segment.template == "fake" and dict(segment.config)["warps"] == 1
    assert (plan.source, plan.initial_us) == ("measured", 10.0)
    assert plan.final_us == pytest.approx(7.07) and bench.compared
    assert ctx.trials == len(bench.asked) and bench.prepared


def test_what_is_slower_stays_as_it_was_and_is_not_searched_long():
    plan, bench, _ = chosen(ours=20.0)
    assert template_of(plan) is None and "20.2 us as one" in plan.reason
    assert len(bench.asked) <= 9 and not bench.compared
    plan, _, _ = chosen(ours=9.85)  # less than 1 % faster
    assert template_of(plan) is None


def test_a_template_of_the_product_alone_counts_for_what_it_was():
    bench = FakeBench(None, 1000.0, 7.0, product=(8.0, 4.0))
    plan, _, _ = chosen(bench=bench, products=True)
    assert template_of(plan) is None and "6.0 us with the rotations apart" in plan.reason


def test_the_store_answers_the_second_time_even_without_a_budget(tmp_path):
    store = Store(tmp_path, "here")
    first, _, _ = chosen(store=store)
    for measure in (True, False):
        again, bench, ctx = chosen(store=store, measure=measure)
        assert again.source == "store" and template_of(again) == template_of(first)
        assert bench.asked == [] and bench.prepared == [] and ctx.trials == 0
    none, bench, _ = chosen(measure=False)
    assert none.source == "rules" and template_of(none) is None and bench.asked == []


def test_an_unfinished_search_goes_on_when_there_is_more_time(tmp_path):
    store = Store(tmp_path, "here")
    first, bench, _ = chosen(store=store, seconds=4.0)
    assert first.unfinished_s == 4.0 and len(bench.asked) <= 5
    same, none, _ = chosen(store=store, seconds=4.0)
    assert same.source == "store" and none.asked == []
    again, rest, _ = chosen(store=store, seconds=1000.0)
    assert again.unfinished_s == 0 and rest.asked and not set(rest.asked) & set(bench.asked)


def test_a_spent_budget_decides_nothing_for_later(tmp_path):
    store = Store(tmp_path, "here")
    plan, bench, _ = chosen(store=store, seconds=0.0)
    assert (plan.source, bench.asked) == ("rules", []) and template_of(plan) is None
    assert chosen(store=store)[0].source == "measured"


def test_a_plan_is_followed_without_a_trial():
    made, _, _ = chosen()
    held = ChainPlan.from_dict(made.to_dict())
    plan = Plan("here", chains={rope_key(RECIPE): held})
    again, bench, ctx = chosen(plan=plan)
    assert again.source == "plan" and template_of(again) == template_of(made)
    assert bench.asked == [] and bench.prepared == [] and ctx.trials == 0
    assert chosen(plan=Plan("here"))[0] is None
    small = FakeBench(None, 10.0, 7.0, space=SPACE[3:5])
    with pytest.raises(StofPlanError, match="has no config"):
        chosen(plan=plan, bench=small)


def test_stored_nonsense_is_measured_anew(tmp_path, caplog):
    store = Store(tmp_path, "here")
    store.put("rotations", rope_key(RECIPE), {"kinds": 3})
    assert chosen(store=store)[0].source == "measured" and "cannot be read" in caplog.text
    chosen(store=store)
    small = FakeBench(store, 1000.0, 7.0, space=SPACE[3:5])
    plan, bench, _ = chosen(bench=small, store=store)
    assert plan.source == "measured" and "does not fit" in caplog.text
    assert bench.asked == [], "their trials are known"


def test_interrupting_goes_on_with_the_graph_as_it_was(monkeypatch, tmp_path):
    def interrupted(self, recipe, candidate):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeBench, "trial", interrupted)
    store = Store(tmp_path, "here")
    plan, _, ctx = chosen(store=store)
    assert template_of(plan) is None and ctx.budget.spent
    assert store.get("rotations", rope_key(RECIPE)) is None


def test_nothing_is_said_where_no_template_runs_or_a_scheme_is_forced():
    assert chosen(bench=FakeBench(None, 10.0, 7.0, space=[]))[0] is None
    assert chosen(forced="06")[0] is None
