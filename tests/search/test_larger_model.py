"""BERT-large after BERT-base, as whole graphs: packs, scheme and configs start from what was found.

Real templates list their configs for an H100; times are made up: each config is worth the same on
either model, give or take 3 %.
"""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from captured_stacks import BertLayer, Stack
from norm_recipes import machine

from stof_compile import fuse
from stof_compile.budget import Budget
from stof_compile.capture import read_capture
from stof_compile.fuse import Fusion
from stof_compile.measure import ErrorReport, Timing
from stof_compile.normalize import normalize
from stof_compile.options import StofOptions
from stof_compile.search.bench import DeviceBench
from stof_compile.search.candidate import LIBRARY
from stof_compile.store import Store

BASE, LARGE = (768, 12), (1024, 16)  # width, heads
SECONDS = 1e6
CLOSE = 1.03  # how much slower the larger model may end than after a search of its own


class ModelBench(DeviceBench):
    """Times by formula; ``library_gain`` is what the library takes of a product's."""

    def __init__(self, *given, library_gain):
        super().__init__(*given)
        self.device, self.library_gain = torch.device("cuda"), library_gain
        self.asked = []

    def _runs(self, template, recipe):  # graphs are captured without a GPU
        return template.accepts(on_gpu(recipe), self.facts)

    def candidates(self, recipe):
        return super().candidates(on_gpu(recipe))

    def prepare(self, recipe, candidates):
        pass

    def trial(self, recipe, candidate):
        def run():
            self.asked.append(recipe)
            return ErrorReport(0.0, 0.0, True), self.time(recipe, candidate)

        return self.table.measure(recipe.key, candidate.template, candidate.settings, run)

    def time(self, recipe, candidate):
        us = 2.0 + recipe.flops / 6e8 + recipe.nbytes / 4e6
        if candidate.template != LIBRARY:
            us *= 0.85 + 0.5 * random.Random(f"{recipe.contractions} {candidate}").random()
            us *= 1.0 + 0.03 * random.Random(f"{recipe.key} {candidate}").random()
        elif recipe.contractions:
            us *= self.library_gain
        return Timing(us, us, us, 3, "clock")

    def compare(self, schemes, long_turns=False):
        return [sum(self.time(r, c).median_us for r, c in scheme) for scheme in schemes]


def on_gpu(recipe):
    operands = (replace(operand, device="cuda") for operand in recipe.operands)
    return replace(recipe, operands=tuple(operands))


@pytest.fixture
def tune(monkeypatch, fresh_dynamo):
    """Fuse the graph of a BERT as on a GPU; tells what was asked for and what came out."""

    def run(size, store, batch=1, length=128, library_gain=1.0):
        width, heads = size
        made = []

        def bench(*given):
            made.append(ModelBench(*given, library_gain=library_gain))
            return made[-1]

        monkeypatch.setattr(fuse, "DeviceBench", bench)
        monkeypatch.setattr(fuse, "device_facts", lambda device: machine(90))
        gm, facts = captured(width, heads, batch, length)
        options = StofOptions(tune_budget_s=SECONDS)
        result = Fusion(gm, facts, options, store, Budget(SECONDS), None).run()
        return SimpleNamespace(result=result, asked=Counter(kinds(r) for r in made[0].asked))

    return run


def captured(width, heads, batch, length):
    graphs = []

    def record(gm, inputs):
        facts = read_capture(gm, inputs)
        normalize(gm, facts)
        graphs.append((gm, facts))
        return lambda *given: (inputs[0],)  # products of fp16 take seconds on a CPU

    torch._dynamo.reset()
    with torch.no_grad():
        layers = (BertLayer(width, count=heads) for _ in range(2))
        model = Stack(*layers).half().eval()
        x = torch.zeros(batch, length, width, dtype=torch.float16)
        mask = torch.ones(length, length, dtype=torch.bool)
        torch.compile(model, backend=record)(x, mask)
    return graphs[0]


def kinds(recipe):
    return " ".join(step.kind for step in recipe.steps)


def time_of(tuned):
    """Microseconds of all segments of a graph together."""
    chains = tuned.result.chains.values()
    return sum(s.median_us or 0.0 for chain in chains for s in chain.segments)


@pytest.mark.parametrize("shape", [(1, 128), (8, 512)], ids=["1x128", "8x512"])
@pytest.mark.parametrize("library_gain", [1.0, 0.8], ids=["templates_win", "library_wins"])
def test_a_larger_model_takes_half_of_the_trials(tune, tmp_path, shape, library_gain):
    cold = tune(LARGE, Store(tmp_path / "cold", "here"), *shape, library_gain)
    store = Store(tmp_path / "warm", "here")
    base = tune(BASE, store, *shape, library_gain)
    warm = tune(LARGE, store, *shape, library_gain)
    assert len(cold.result.chains) == len(base.result.chains) == 2, "attention's and the MLP's"
    assert cold.result.trials == cold.asked.total() and warm.result.trials == warm.asked.total()
    assert min(cold.result.trials, base.result.trials) > 100
    assert 0 < warm.result.trials <= cold.result.trials / 2, (cold.asked, warm.asked)
    found = [
        ([(c.kinds, c.code) for c in t.result.chains.values()],
         [p.packed for p in t.result.packs.values()])
        for t in (cold, warm)
    ]  # fmt: skip
    assert found[0] == found[1]
    assert time_of(warm) < CLOSE * time_of(cold)
