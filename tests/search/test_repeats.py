"""What a graph repeats: its last layer begins at what was found for the others."""

from types import SimpleNamespace

import pytest
import torch
from fake_segment_bench import FakeBench, bound
from torch import nn

from stof_compile import fuse
from stof_compile.budget import Budget
from stof_compile.dump import Record
from stof_compile.fuse import Fusion, FusionResult
from stof_compile.options import StofOptions
from stof_compile.record_fusion import record_fusion
from stof_compile.search.tuner import ChainTuner
from stof_compile.store import Store

WIDTH, HIDDEN = 64, 256
LAYER = "linear gelu linear residual_add"


class Layer(nn.Module):
    """A norm in front of its half: the sum goes on into the next layer's norm, and the last."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture
def fused(capture, monkeypatch):
    """Fuse three layers and a last norm with the fake bench."""

    def run(begin=True, saving=0.3, store=None):
        now, made = [0.0], []

        def bench(templates, facts, device, table, budget, seed):
            made.append(FakeBench(table, now, saving=saving))
            made[0].release = lambda: None
            made[0].measuring_s = made[0].compiling_s = 0.0
            made[0].first_calls_s = made[0].timing_s = 0.0
            made[0].first_calls = {}
            return made[0]

        refuses = SimpleNamespace(
            name="fake", device_kinds=("cpu",), refusal=lambda recipe, device: "only timed"
        )
        monkeypatch.setattr(fuse, "DeviceBench", bench)
        monkeypatch.setattr(fuse, "TEMPLATES", (refuses,))
        if not begin:
            monkeypatch.setattr(ChainTuner, "begin_with", lambda *given: None)
        with torch.device("meta"):
            model = nn.Sequential(Layer(), Layer(), Layer(), nn.LayerNorm(WIDTH))
            x = torch.empty(1, 128, WIDTH)
        graph = capture(model.eval().requires_grad_(False), x)
        budget = Budget(1e6, clock=lambda: now[0])
        options = StofOptions(tune_budget_s=1e6)
        result = Fusion(graph.gm, graph.facts, options, store, budget, None).run()
        return result, made[0]

    return run


def last_layer(result):
    return next(c for c in result.chains.values() if c.count == 1 and "gelu" in c.kinds)


def test_the_last_layer_counts_as_one_of_the_repeated(fused):
    result, _ = fused()
    (words, times, within), *_ = result.repeats
    assert words.endswith(LAYER) and (times, within) == (3, 1), "one with the norm behind all"


def test_the_last_layer_begins_at_the_scheme_of_the_others(fused):
    result, bench = fused()
    alone, searched = fused(begin=False)
    assert len(bench.asked) < 0.8 * len(searched.asked)
    assert bound(last_layer(result)) == bound(last_layer(alone))


def test_a_plan_whose_trials_were_lost_is_measured_again(fused, tmp_path):
    """The others' scheme comes from the store; the last layer measures its candidates once."""
    store = Store(tmp_path, "here")
    first, _ = fused(store=store)
    last = next(key for key, chain in first.chains.items() if chain is last_layer(first))
    kept = {key: chain.to_dict() for key, chain in first.chains.items() if key != last}
    other = Store(tmp_path / "other", "here")
    for key, value in kept.items():
        other.put("chains", key, value)
    again, bench = fused(store=other)
    assert bound(last_layer(again)) == bound(last_layer(first)) and bench.asked
    sources = {chain.source for chain in again.chains.values() if chain is not last_layer(again)}
    assert sources == {"store"}


def test_what_gains_nothing_is_left_alone_there_too(fused):
    result, _ = fused(saving=-0.5)
    assert {s.template for c in result.chains.values() for s in c.segments} == {"inductor"}


def test_the_record_tells_what_repeats():
    record = Record()
    record_fusion(FusionResult(repeats=[(LAYER, 12, 1), ("linear tanh", 2, 0)]), record)
    assert record.notes == [
        f"the graph repeats 12 times: {LAYER}, 1 of them within a longer chain",
        "the graph repeats 2 times: linear tanh",
    ]


def test_the_templates_that_took_longest_to_begin_are_told():
    record = Record()
    calls = {"a": [0.1] * 3, "b": [2.0], "c": [0.5, 0.6], "d": [0.2]}
    result = FusionResult(trials=7, measuring_s=9.0, first_calls_s=3.6, first_calls=calls)
    record_fusion(result, record)
    (note,) = [note for note in record.notes if note.startswith("fusion measured")]
    assert "3.6 s in first calls (1 of b 2.0, 2 of c 1.1, 3 of a 0.3), 0.0 s timing" in note
