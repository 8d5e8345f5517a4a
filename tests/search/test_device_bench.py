"""The bench itself, on the CPU, where the only candidate is what Inductor makes of a recipe."""

import math
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from recipes import H200, linear_recipe

from stof_compile.budget import Budget
from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec
from stof_compile.measure import Timing
from stof_compile.search.bench import LONG_TURNS, TURNS, DeviceBench
from stof_compile.search.candidate import LIBRARY, Candidate
from stof_compile.search.operands import random_operand
from stof_compile.search.segment_workers import SegmentWorkers
from stof_compile.search.trial import TrialTable


@pytest.fixture
def bench():
    """Candidates on the CPU, operands as many as an H200's cache asks for."""
    return DeviceBench((), H200, torch.device("cpu"), TrialTable(None), Budget(60.0))


def test_weights_rotate_until_the_cache_has_lost_them(bench):
    small, large = (linear_recipe(m=m, n=256, k=512) for m in (64, 1 << 17))
    sets = bench._sets(small)
    weight = sets[0][1].nbytes
    assert len(sets) == 64 and len({s[1].data_ptr() for s in sets}) == 64
    assert len({s[0].data_ptr() for s in sets}) == 1  # x is what the op before has written
    # what passes between two uses of a weight is three times the cache, activations included
    assert len(bench._sets(large)) == 3 and 60 * weight + large.nbytes > 3 * H200.l2_bytes


def test_one_set_is_drawn_on_a_cpu(bench):
    """Packing compares forms of the same weights there, which are large."""
    bench.facts = replace(H200, kind="cpu")
    assert len(bench._sets(linear_recipe())) == 1


def test_a_trial_and_chains_in_turns(bench):
    recipe, library = linear_recipe(activation="gelu"), Candidate(LIBRARY)
    trial = bench.trial(recipe, library)
    assert trial.status == "measured" and bench.known(recipe, library) == trial
    one, two = bench.compare([[(recipe, library)], [(recipe, library)] * 2])
    assert 0 < one < two


def test_alike_segments_of_a_chain_read_weights_of_their_own(bench, monkeypatch):
    seen = []
    monkeypatch.setattr(DeviceBench, "_call", lambda *a: lambda *operands: seen.append(operands[1]))
    recipe = linear_recipe()
    bench.compare([[(recipe, Candidate(LIBRARY))] * 3])
    first = [weight.data_ptr() for weight in seen[:3]]
    assert len(set(first)) == 3


def test_operands_of_a_comparison_are_drawn_once(bench, monkeypatch):
    """More recipes than the bench holds operands of, in several schemes."""
    made = []

    def draw(recipe, index, *rest, real=random_operand):
        made.append((recipe.key, index))
        return real(recipe, index, *rest)

    monkeypatch.setattr("stof_compile.search.bench.random_operand", draw)
    monkeypatch.setattr(DeviceBench, "_call", lambda *a: lambda *operands: None)
    recipes = [linear_recipe(n=8 * i) for i in range(1, 7)]
    scheme = [(recipe, Candidate(LIBRARY)) for recipe in recipes]
    bench.compare([scheme] * 4)
    weights = [key for key, index in made if index == 1]
    assert weights.count(recipes[0].key) == len(weights) / 6 == 64


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_long_turns_are_a_gpus(bench, monkeypatch, kind):
    lengths = []

    def played(fns, input_sets, device, *, turn_s, rounds):
        lengths.append((device.type, turn_s, rounds))
        return [SimpleNamespace(median_us=1.0)] * len(fns)

    monkeypatch.setattr("stof_compile.search.bench.time_as_in_use", played)
    recipe = linear_recipe()
    monkeypatch.setattr(bench, "_sets", lambda recipe: [()])
    bench.device = torch.device(kind)
    for long_turns in (False, True):
        assert bench.compare([[(recipe, Candidate(LIBRARY))]] * 2, long_turns) == [1.0, 1.0]
    short, long = lengths
    assert short == (kind, *TURNS) and long == (kind, *(LONG_TURNS if kind == "cuda" else TURNS))


@pytest.mark.parametrize(
    "timer, ask",
    [
        ("time_callable", lambda bench, pair: bench.trial(*pair)),
        ("time_as_in_use", lambda bench, pair: bench.compare([[pair], [pair]])),
        ("sample_us", lambda bench, pair: bench.rounds([len, len], (), 2)),
    ],
    ids=["alone", "in-turns", "in-rounds"],
)
def test_seconds_of_timing_are_counted_however_it_is_timed(bench, monkeypatch, timer, ask):
    now = [0.0]

    def takes_a_second(*given, **named):
        now[0] += 1.0
        timing = Timing(1.0, 1.0, 1.0, 3, "clock")
        return {"time_callable": timing, "time_as_in_use": [timing] * 2, "sample_us": [1.0]}[timer]

    monkeypatch.setattr(f"{DeviceBench.__module__}.{timer}", takes_a_second)
    monkeypatch.setattr(f"{DeviceBench.__module__}.time", SimpleNamespace(monotonic=lambda: now[0]))
    ask(bench, (linear_recipe(), Candidate(LIBRARY)))
    assert bench.timing_s == bench.measuring_s == now[0] > 0


def test_a_librarys_kernel_is_not_called_ahead(bench, monkeypatch):
    """The processes that compile would launch it beside what is timed."""
    from stof_compile.templates.cublas_linear import CublasLinear
    from stof_compile.templates.triton_linear import TritonLinear

    recipe, jobs = linear_recipe(activation="relu"), []

    class Pool:
        alive = True

        def submit(self, job):
            jobs.append(job.template)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(f"{SegmentWorkers.__module__}.TritonEnvironment", MagicMock())
    bench.templates, bench.device = (TritonLinear(), CublasLinear()), torch.device("cuda")
    bench.workers.pool = Pool()
    bench.prepare(recipe, bench.candidates(recipe))
    assert jobs and set(jobs) == {"triton_linear"}


def test_what_inductor_makes_of_a_segment_is_sent_and_not_waited_for_in_the_queue(
    bench, monkeypatch
):
    from stof_compile.templates.triton_linear import TritonLinear

    product, jobs, futures = linear_recipe(activation="relu"), [], []
    spec = TensorSpec((4, 4), (4, 1), torch.float16, "cuda")
    recipe = Recipe((spec,), (Step("exp", (Ref("operand", 0),), (4, 4), torch.float16),))

    class Pool:
        alive = ready = True

        def submit(self, job):
            jobs.append(job)
            futures.append(Future())
            return futures[-1]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(f"{SegmentWorkers.__module__}.TritonEnvironment", MagicMock())
    bench.templates, bench.device = (TritonLinear(),), torch.device("cuda")
    bench.workers.pool = Pool()
    library = Candidate(LIBRARY)
    bench.prepare(linear_recipe(), [library])  # cuBLAS: nothing to compile
    bench.prepare(product, [library])  # Inductor may time products
    assert jobs == []
    bench.prepare(recipe, [library])
    bench.prepare(product, [bench.candidates(product)[0]])
    assert [job.template for job in jobs] == [LIBRARY, "triton_linear"]
    assert [bool(job.inductor) for job in jobs] == [True, False]
    assert jobs[0].turn < jobs[1].turn
    assert bench.workers.wait(recipe, library, bench.budget)  # it waits for its turn: compiled here
    assert futures[0].cancelled()


def test_what_is_not_compiled_when_the_time_ends_is_not_measured(bench, monkeypatch):
    """Compiling it in this process would take longer than what is left."""
    from stof_compile.templates.triton_linear import TritonLinear

    recipe, hurried = linear_recipe(activation="relu"), []

    class Pool:
        alive = ready = True

        def submit(self, job):
            return Future()

        def hurry(self, job, future):
            hurried.append(job.config)
            now[0] += 1.0

    now = [0.0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(f"{SegmentWorkers.__module__}.TritonEnvironment", MagicMock())
    bench.templates, bench.device = (TritonLinear(),), torch.device("cuda")
    bench.workers.pool = Pool()
    bench.budget = Budget(0.5, clock=lambda: now[0])
    first, second, third = bench.candidates(recipe)[:3]
    bench.prepare(recipe, [first, second])
    trial = bench.trial(recipe, first)
    assert trial.cost_us == math.inf and "time ended" in trial.reason
    assert bench.known(recipe, first) is None and bench.table.measured == 0
    assert hurried == [second.config, first.config, first.config], "the last one goes first"
    hurried.clear()
    for asked, sent in ((second, []), (first, [third])):
        bench.budget = Budget(0.5, clock=lambda: now[0])
        bench.prepare(recipe, sent)
        bench.trial(recipe, asked)
    alone, *again = hurried  # where there are new ones, all go to the front once more
    assert alone == second.config
    assert again == [third.config, second.config, first.config, first.config]
    assert bench.trial(recipe, second).cost_us == math.inf  # asked for when the time has ended:
    assert bench.known(recipe, second) is not None, "it is compiled here, and fails without a GPU"


def test_a_librarys_kernel_that_drops_nan_fails_its_trial(bench, monkeypatch):
    from stof_compile.templates.cublas_linear import CublasLinear

    recipe = linear_recipe(activation="relu")
    candidate = Candidate("cublas_linear", (("activation", "relu"),))
    bench.templates = (CublasLinear(),)
    calls = {"kept": torch.relu, "dropped": lambda t: t.clamp(0).nan_to_num(0.0)}
    for name, activation in calls.items():
        bench.table = TrialTable(None)
        monkeypatch.setattr(
            DeviceBench,
            "_call",
            lambda *a, activation=activation: (
                lambda x, w, *b: activation(torch.nn.functional.linear(x, w, *b))
            ),
        )
        assert bench.trial(recipe, candidate).status == ("measured" if name == "kept" else "nan")


def test_templates_take_turns_and_what_compiles_slowly_comes_late(bench):
    from stof_compile.templates.hopper_linear import HopperLinear
    from stof_compile.templates.tilelang_linear import TileLangLinear
    from stof_compile.templates.triton_linear import TritonLinear

    templates = TritonLinear(), HopperLinear(), TileLangLinear()
    recipe = linear_recipe(4096, 3072, 768)
    bench.templates, bench.device = templates, torch.device("cuda")
    found = bench.candidates(recipe)
    names = [candidate.template for candidate in found]
    triton, hopper, tilelang = (template.name for template in templates)
    assert names[:10] == [triton, hopper] * 5 and names[10] == tilelang
    assert names[11] == triton and names[-1] == tilelang and len({*found}) == len(found)
    for template in templates:
        own = [dict(c.config) for c in found if c.template == template.name]
        space = template.space(recipe, bench.facts)
        assert own[0] == template.first(recipe, bench.facts)
        assert {str(sorted(c.items())) for c in own} == {
            str(sorted(c.items())) for c in [own[0], *space.configs()]
        }
        if space.kept is None:  # not ranked: what is close to the first comes first
            apart = [sum(config[name] != own[0][name] for name in config) for config in own]
            assert apart == sorted(apart)
