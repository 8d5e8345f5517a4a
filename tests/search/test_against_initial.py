"""The result of a search against the initial scheme, in turns: the slower one is never taken."""

import pytest
from fake_segment_bench import FakeBench, bound, tuned

from stof_compile.fusion.fingerprint import fingerprints
from stof_compile.search.learned import Learned
from stof_compile.search.tuner import chain_key
from stof_compile.store import Store

WHOLE = 5  # ops of the chain, which the search joins into one segment
BEHIND = 100.0  # microseconds that the joined segment takes longer among other kernels
INITIAL = [(0, 3, "fake"), (3, 5, "fake")]


@pytest.fixture
def mlp(bert):
    """The chain of BERT's feed-forward part, with its graph."""
    graph = bert(1)
    return graph, graph.chain_with("gelu")


@pytest.fixture
def slow_in_turns(monkeypatch):
    """A segment of the whole chain is fast alone, and slow where it runs in turns with others."""
    alone = FakeBench.compare
    asked = []

    def compare(self, schemes, long_turns=False):
        times = alone(self, schemes, long_turns)
        asked.append([len(scheme) for scheme in schemes])
        joined = [any(len(recipe.steps) == WHOLE for recipe, _ in scheme) for scheme in schemes]
        return [us + BEHIND * late for us, late in zip(times, joined, strict=True)]

    monkeypatch.setattr(FakeBench, "compare", compare)
    return asked


def test_a_result_that_is_faster_in_turns_is_taken(mlp):
    plan, bench, _ = tuned(*mlp)
    assert bound(plan) == [(0, WHOLE, "fake")] and plan.code != plan.initial
    initial_us, final_us = bench.compared
    assert (plan.initial_us, plan.final_us) == (initial_us, final_us) and final_us < initial_us
    assert plan.reason.startswith(f"initial scheme {plan.initial}, {initial_us:.1f} us against ")


def test_a_result_that_is_slower_in_turns_is_not_taken(mlp, slow_in_turns):
    plan, bench, _ = tuned(*mlp)
    assert bound(plan) == INITIAL and plan.code == plan.initial
    assert slow_in_turns[-1] == [2, 1], "the initial scheme and the result, in the same turns"
    initial_us, alone_us = bench.compared
    assert alone_us < initial_us, "by the times of segments the joined one wins"
    assert plan.initial_us == plan.final_us == initial_us
    found = f"{initial_us:.1f} us against {alone_us + BEHIND:.1f} us of what the search found (00)"
    assert plan.reason == f"initial scheme {plan.initial} kept, {found} measured in turns"


def test_what_is_stored_and_learned_is_what_was_kept(mlp, slow_in_turns, tmp_path):
    graph, chain = mlp
    store = Store(tmp_path, "here")
    first, _, _ = tuned(graph, chain, store=store)
    stored = store.get("chains", chain_key(chain))
    assert stored["code"] == stored["initial"] == first.initial and "kept" in stored["reason"]
    again, bench, _ = tuned(graph, chain, store=store)
    assert again.source == "store" and bench.asked == [] and bound(again) == INITIAL
    learned = Learned(store).scheme(fingerprints(chain, 0, len(chain)), first.kinds)
    assert learned == first.initial, "alike chains begin at what was kept"


def test_equal_times_take_what_the_search_found(mlp, monkeypatch):
    monkeypatch.setattr(
        FakeBench, "compare", lambda self, schemes, long=False: [7.0] * len(schemes)
    )
    plan, _, _ = tuned(*mlp)
    assert bound(plan) == [(0, WHOLE, "fake")] and plan.final_us == 7.0


def test_a_learned_scheme_is_measured_against_the_initial_one(mlp, tmp_path):
    """The search begins at the learned scheme and meets no segment of the initial one."""
    graph, chain = mlp
    store = Store(tmp_path, "here")
    whole, _, _ = tuned(graph, chain)
    Learned(store).note(fingerprints(chain, 0, len(chain)), whole.code, whole.kinds)
    plan, bench, _ = tuned(graph, chain, store=store)
    assert bound(plan) == [(0, WHOLE, "fake")] and plan.final_us < plan.initial_us
    met = [len(recipe.steps) for recipe, _ in bench.asked]
    assert met.count(3) == met.count(2) == 1, "one config of each segment of the initial scheme"


def test_a_search_does_not_begin_at_what_is_illegal_here(mlp, tmp_path):
    """Values that are read from outside are no part of a fingerprint."""
    graph, chain = mlp

    def legality(start, stop):
        return "read from outside" if start == 0 and stop > 3 else None

    whole, _, _ = tuned(graph, chain)
    cold, _, _ = tuned(graph, chain, legality=legality)
    store = Store(tmp_path, "here")
    Learned(store).note(fingerprints(chain, 0, len(chain)), whole.code, whole.kinds)
    plan, _, _ = tuned(graph, chain, store=store, legality=legality)
    assert plan.code == cold.code != whole.code
    assert [(s.template, s.config) for s in plan.segments] == [
        (s.template, s.config) for s in cold.segments
    ]
