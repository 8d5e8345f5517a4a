"""The tuner over fake chains: a clock that moves by one second a trial, times by formula."""

import itertools
from functools import partial

import pytest
import torch
from fake_segment_bench import FakeBench, bound, tuned

from stof_compile.budget import Budget
from stof_compile.fusion.chain import OpChain
from stof_compile.measure import Timing
from stof_compile.search.candidate import LIBRARY, Candidate, candidate_of
from stof_compile.search.chain_search import FINALISTS
from stof_compile.search.context import TuningContext
from stof_compile.search.trial import TrialTable
from stof_compile.search.tuner import ChainTuner, chain_key
from stof_compile.store import Store


def segments_of(graph, chain):
    fake = FakeBench(TrialTable(None), [0.0])
    fake.budget = Budget(1000.0, clock=lambda: 0.0)
    ctx = TuningContext(fake, fake.budget, 1000.0)
    return ChainTuner(graph.gm, chain, lambda a, b: None, ctx)._segments


@pytest.fixture
def mlp(bert):
    """The chain of BERT's feed-forward part, with its graph."""
    graph = bert(1)
    return graph, graph.chain_with("gelu")


def test_it_fuses_what_is_faster_and_names_the_winner(mlp):
    plan, bench, _ = tuned(*mlp)
    assert plan.kinds == ("linear", "gelu", "linear", "residual_add", "layer_norm")
    assert plan.source == "measured" and plan.segments[-1].stop == 5
    assert bound(plan) == [(0, 5, "fake")]
    best = min(
        (bench.time(r, c).median_us, c) for r, c in bench.asked if len(r.steps) == 5
    )[1]  # fmt: skip
    assert candidate_of("fake", dict(plan.segments[0].config)) == best
    assert bench.compared is None or plan.final_us <= plan.initial_us


def test_finals_take_what_is_fastest_within_the_chain(mlp, monkeypatch):
    """Alone the configs differ by noise; in the chain four warps are the best."""

    def compare(self, schemes, long_turns=False):
        self.compared = [
            sum(self.time(r, c).median_us - dict(c.config).get("warps", 0) for r, c in scheme)
            for scheme in schemes
        ]
        return self.compared

    alone, *_ = tuned(*mlp)
    monkeypatch.setattr(FakeBench, "compare", compare)
    plan, bench, _ = tuned(*mlp)
    assert plan.code == alone.code and "faster within the chain" in plan.reason
    known = [bench.known(r, c).cost_us for r, c in bench.asked if len(r.steps) == 5]
    reach = sorted(us for us in known)[:4]
    (segment,) = plan.segments
    assert dict(segment.config)["warps"] > dict(alone.segments[0].config)["warps"]
    assert segment.median_us in reach and "faster within" not in alone.reason


def test_finals_leave_an_illegal_place_alone(capture, monkeypatch):
    """Two layers alike, of which the second may not be replaced, as where its weight is a tensor
    subclass; alone the library is as fast, in the chain the template is.
    """

    def compare(self, schemes, long_turns=False):
        return [sum(5.0 if c.template != LIBRARY else 20.0 for _, c in s) for s in schemes]

    def candidates(self, recipe):
        return [candidate_of("fake", {"warps": w}) for w in (1, 2)] * recipe.contractions

    monkeypatch.setattr(FakeBench, "compare", compare)
    monkeypatch.setattr(FakeBench, "candidates", candidates)
    with torch.device("meta"):
        one, two, x = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.empty(1, 128, 64)
    block = torch.nn.ModuleList([one, two]).eval().requires_grad_(False)
    gelu = torch.nn.functional.gelu
    graph = capture(lambda x: gelu(block[1](gelu(block[0](x)))), x)
    refused = {(2, 3): "a tensor subclass"}
    plan, *_ = tuned(
        graph,
        graph.chain_with("gelu"),
        legality=lambda a, b: "apart" if b - a > 1 else refused.get((a, b)),
    )
    assert plan.kinds == ("linear", "gelu", "linear", "gelu") and "faster within" in plan.reason
    assert [t for _, _, t in bound(plan)] == ["fake", LIBRARY, LIBRARY, LIBRARY]


def test_an_op_without_neighbours_is_compared_with_the_library(capture, monkeypatch):
    """No move of stage 1 looks at it, and stage 2 asks for templates only."""

    def candidates(self, recipe):  # each slower than the library
        return [candidate_of("fake", {"warps": w}) for w in (1, 2)]

    monkeypatch.setattr(FakeBench, "candidates", candidates)
    with torch.device("meta"):
        head, x = torch.nn.Linear(64, 64), torch.empty(1, 128, 64)
    graph = capture(head.eval().requires_grad_(False), x)
    plan, bench, _ = tuned(graph, graph.chain_with("linear"))
    assert bound(plan) == [(0, 1, LIBRARY)]
    (segment,) = plan.segments
    assert segment.library_us == segment.median_us == 20.0 and len(bench.asked) == 3
    _, none, _ = tuned(graph, graph.chain_with("linear"), seconds=0.0)
    assert none.asked == []


def test_contenders_are_the_best_two_and_then_of_every_template(mlp, monkeypatch):
    kinds = [candidate_of(name, {"warps": w}) for name in ("one", "two") for w in (1, 2, 4)]
    times = {c: 9.0 + i / 10 for i, c in enumerate(kinds)}
    monkeypatch.setattr(FakeBench, "candidates", lambda self, recipe: kinds)

    def time(self, recipe, candidate):
        us = times.get(candidate, 10.2)
        return Timing(us, us, us, 3, "clock")

    monkeypatch.setattr(FakeBench, "time", time)
    segments = segments_of(*mlp)
    place = (0, 1)
    for candidate in segments._candidates(place):
        segments.measured(place, candidate)
    library = Candidate(LIBRARY)
    assert segments.contenders(place, 1.15, 5) == [*kinds[:2], kinds[3], library, kinds[2]]
    assert segments.contenders(place, 1.15, 3) == [*kinds[:2], kinds[3]]
    assert segments.contenders(place, 1.12, 9) == [*kinds[:2], kinds[3], kinds[2], *kinds[4:]]


def test_what_failed_is_no_contender(mlp, monkeypatch):
    def time(self, recipe, candidate):
        raise RuntimeError("does not fit")

    monkeypatch.setattr(FakeBench, "time", time)
    segments = segments_of(*mlp)
    place = (3, 5)
    assert {segments.measured(place, c) for c in segments._candidates(place)} == {float("inf")}
    assert segments.contenders(place, 1.15, 4) == []


def test_what_inductor_joins_with_its_neighbours_is_ours_with_a_product_only(mlp):
    graph, chain = mlp  # linear gelu linear residual_add layer_norm
    fake = FakeBench(TrialTable(None), [0.0])
    fake.budget = Budget(1000.0, clock=lambda: 0.0)
    ctx = TuningContext(fake, fake.budget, 1000.0)
    tuners = [ChainTuner(graph.gm, chain, lambda a, b: None, ctx, ops) for ops in ((), (4,))]
    assert tuners[0].key == chain_key(chain) != tuners[1].key == chain_key(chain, [4])
    free, claimed = (tuner._segments for tuner in tuners)
    assert free.space((3, 5)) and not claimed.space((3, 5)) and claimed.has_library((3, 5))
    assert free.refusal((3, 5)) is None and "Inductor" in claimed.refusal((3, 5))
    assert claimed.space((2, 5)) == free.space((2, 5)) and claimed.refusal((2, 5)) is None
    ctx.forced = "07"  # 00111: linear gelu | linear residual_add layer_norm
    assert bound(tuners[1].choose())[1] == (2, 5, "fake")
    ctx.forced = "04"  # 00100: linear gelu | linear | residual_add layer_norm
    assert bound(tuners[1].choose())[-1] == (3, 5, "fake"), "what was asked for is done"


def test_finals_that_would_take_too_long_are_left_out(mlp, monkeypatch):
    """Nothing looks at the clock inside of a comparison."""
    monkeypatch.setattr("stof_compile.search.chain_search.FEW_ROWS", 0)
    asked = []
    compare = FakeBench.compare
    monkeypatch.setattr(FakeBench, "compare", lambda *a: asked.append(len(a[1])) or compare(*a))
    tuned(*mlp)
    assert FINALISTS in asked
    asked.clear()
    monkeypatch.setattr("stof_compile.search.chain_search.COMPARE_LONG_S", 1000.0 / 2.5)
    tuned(*mlp)
    assert FINALISTS not in asked and asked.count(2) == 2, "the two that fit, and the last one"
    asked.clear()
    monkeypatch.setattr("stof_compile.search.chain_search.COMPARE_LONG_S", 1000.0)
    tuned(*mlp)
    assert asked == [2], "no finals: only the result against the initial scheme"


def test_products_are_compared_in_long_turns(bert, monkeypatch):
    """A norm behind a product that stays the library's: its finals take short turns."""
    asked = []

    def compare(self, schemes, long_turns=False):
        if len({len(scheme) for scheme in schemes}) == 1:  # the finals of a segment
            places = zip(*schemes, strict=True)
            apart = [pairs[0][0] for pairs in places if len({c for _, c in pairs}) > 1]
            asked.append(({recipe.contractions for recipe in apart}, long_turns))
        return [1.0] * len(schemes)

    def candidates(self, recipe):
        many = recipe.contractions < 2 and len(recipe.steps) < 3
        return [candidate_of("fake", {"warps": w}) for w in (1, 2)] * many

    monkeypatch.setattr(FakeBench, "compare", compare)
    monkeypatch.setattr(FakeBench, "candidates", candidates)
    graph = bert(1)
    tuned(graph, graph.chain_with("gelu"))
    assert asked and not any(long for _, long in asked), "so few rows draw little power"
    asked.clear()
    monkeypatch.setattr("stof_compile.search.chain_search.FEW_ROWS", 0)
    tuned(graph, graph.chain_with("gelu"))
    assert ({0}, False) in asked and ({1}, True) in asked
    assert all(long == (max(apart) > 0) for apart, long in asked)


def test_what_is_slower_is_left_as_it_is(mlp):
    plan, _, _ = tuned(*mlp, saving=-0.5)
    assert all(template == LIBRARY for _, _, template in bound(plan))


def test_never_three_contractions(llama):
    graph = llama(1)
    chain = max(graph.chains, key=lambda c: sum(o.kind.compute_intensive for o in c.ops))
    assert sum(op.kind.compute_intensive for op in chain.ops) > 2
    plan, bench, _ = tuned(graph, chain, max_contractions=9)
    assert bench.seen_contractions <= 2
    for segment in [] if plan is None else plan.segments:
        kinds = plan.kinds[segment.start : segment.stop]
        assert sum(kind in ("linear", "matmul", "attention") for kind in kinds) <= 2


def test_illegal_segments_are_not_measured(mlp):
    graph, chain = mlp
    plan, bench, _ = tuned(graph, chain, legality=lambda a, b: "crossed" if b - a > 2 else None)
    assert all(stop - start <= 2 for start, stop, _ in bound(plan))
    assert all(len(recipe.steps) <= 2 for recipe, _ in bench.asked)


def test_a_spent_budget_ends_with_the_best_so_far(mlp):
    plan, bench, ctx = tuned(*mlp, seconds=12.0)
    assert len(bench.asked) <= 13 and ctx.trials == len(bench.asked)
    assert plan is not None and plan.segments[-1].stop == 5


def test_no_time_at_all_takes_the_rules(mlp):
    plan, bench, _ = tuned(*mlp, seconds=0.0)
    assert bench.asked == [] and plan is not None


def test_time_that_ends_between_two_looks_at_the_clock(mlp):
    graph, chain = mlp
    for seconds in range(1, 12):
        fake = FakeBench(TrialTable(None), [0.0])
        fake.budget = Budget(seconds - 0.5, clock=partial(next, itertools.count()))
        ctx = TuningContext(fake, fake.budget, seconds - 0.5)
        assert ChainTuner(graph.gm, chain, lambda a, b: None, ctx).choose() is not None


def test_failures_are_recorded_and_lose(mlp):
    plan, bench, _ = tuned(*mlp, broken=(1, 2, 3))
    assert dict(plan.segments[0].config)["warps"] == 4
    failed = [bench.known(r, c).status for r, c in bench.asked if c.settings.get("warps") == 1]
    assert set(failed) == {"failed"}


def test_the_store_answers_the_second_time(mlp, tmp_path):
    store = Store(tmp_path, "here")
    first, _, _ = tuned(*mlp, store=store)
    again, bench, ctx = tuned(*mlp, store=store)
    assert bench.asked == [] and ctx.trials == 0 and again.source == "store"
    assert bound(again) == bound(first) and again.code == first.code


def test_an_unfinished_search_goes_on_when_there_is_more_time(mlp, tmp_path):
    store = Store(tmp_path, "here")
    first, bench, _ = tuned(*mlp, store=store, seconds=12.0)
    assert first.unfinished_s == 12.0
    same, none, _ = tuned(*mlp, store=store, seconds=12.0)
    assert same.source == "store" and none.asked == []
    again, rest, _ = tuned(*mlp, store=store, seconds=1000.0)
    assert again.source == "measured" and again.unfinished_s == 0
    done = {(r.key, c) for r, c in bench.asked}
    assert rest.asked and not done & {(r.key, c) for r, c in rest.asked}


def test_interrupting_compiles_with_what_was_measured(mlp, monkeypatch):
    calls = [0]

    def trial(self, recipe, candidate, real=FakeBench.trial):
        calls[0] += 1
        if calls[0] == 20:
            raise KeyboardInterrupt
        return real(self, recipe, candidate)

    monkeypatch.setattr(FakeBench, "trial", trial)
    plan, bench, _ = tuned(*mlp)
    assert plan is not None and len(bench.asked) < 20


def test_a_stored_plan_that_does_not_fit_is_searched_anew(mlp, tmp_path, caplog):
    graph, chain = mlp
    store = Store(tmp_path, "here")
    plan, _, _ = tuned(graph, chain, store=store)
    broken = {**plan.to_dict(), "kinds": ["linear"]}
    store.put("chains", chain_key(chain), broken)
    again, _, _ = tuned(graph, chain, store=store)
    assert again.code == plan.code and "searched anew" in caplog.text


def test_a_larger_model_starts_from_what_was_learned(capture, tmp_path):
    """BERT-large needs at most half of the trials that it needs alone."""
    base, large = mlp_graph(capture, 768, 3072), mlp_graph(capture, 1024, 4096)
    _, cold, _ = tuned(*large, store=Store(tmp_path / "cold", "here"))
    store = Store(tmp_path / "warm", "here")
    tuned(*base, store=store)
    plan, warm, _ = tuned(*large, store=store)
    assert len(warm.asked) <= len(cold.asked) / 2
    assert bound(plan) == [(0, 5, "fake")]


def mlp_graph(capture, width, hidden) -> tuple[object, OpChain]:
    with torch.device("meta"):
        up, down = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width)
        norm = torch.nn.LayerNorm(width)
        x = torch.empty(1, 128, width)
    block = torch.nn.ModuleList([up, down, norm]).eval().requires_grad_(False)

    def run(x):
        return block[2](x + block[1](torch.nn.functional.gelu(block[0](x))))

    graph = capture(run, x)
    return graph, graph.chain_with("gelu")


def test_candidates_compare_by_value():
    assert candidate_of("a", {"x": 1, "y": 2}) == Candidate("a", (("x", 1), ("y", 2)))
