"""``stof tune``: what it tunes, what it refuses, and a plan that is followed without a search."""

import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from rich.console import Console
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.space import ConfigSpace
from torch import nn

from stof_compile import explain, masks
from stof_compile.device import DeviceFacts
from stof_compile.dump import Record
from stof_compile.errors import StofOptionError, StofPlaceError, StofPlanError
from stof_compile.explanation import Explanation
from stof_compile.fusion.recipe import Recipe, run_recipe
from stof_compile.measure import Timing
from stof_compile.plan import PlanFile
from stof_compile.search import bench
from stof_compile.tune import TuneResult, fusion_trials, mask_rule, plans_of, run_tune, save
from stof_compile.tune_subject import MASKS, TuneSettings, make_subject
from stof_compile.verdict import FastestForm, Verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MODULE = """
import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 128), nn.Linear(128, 32), nn.LayerNorm(32)
        self.breaks = breaks

    def forward(self, x):
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.norm(x + self.down(F.gelu(self.up(x))))


def model(breaks=False):
    torch.manual_seed(0)
    return Block(breaks).eval(), {"x": torch.randn(2, 16, 32)}


def broken():
    return model(True)


def alone():
    return model()[0]


def wants(size):
    return model()


number = 3
"""


class SlowStart(Template):
    """Linear and GELU in one call; its first config is the slowest."""

    name = "slow_start"
    device_kinds = ("cpu",)

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        kinds = [(step.kind, step.attr("name", "")) for step in recipe.spine() or ()]
        return None if kinds == [("linear", ""), ("activation", "gelu")] else "another form"

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        return ConfigSpace({"speed": (1, 2, 3)})

    def first(self, recipe: Recipe, device: DeviceFacts) -> dict[str, Any]:
        return {"speed": 1}

    def build(self, recipe: Recipe, config: Mapping[str, Any]) -> Call:
        (linear, *_) = recipe.spine() or ()
        x, weight, bias = (Slot(i) for i in linear.operands)
        return Call(linear_gelu, (x, weight, bias, config["speed"]), recipe.result.shape)


def linear_gelu(x, weight, bias, speed):
    return F.gelu(F.linear(x, weight, bias))


def run_as_it_is(gm, inputs, options):
    return gm.forward


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Segments with invented times, no compiler; the list gets an entry for every measurement."""
    calls: list[str] = []

    def time(call, sets, device, budget_s):
        call(*sets[0])
        calls.append(call.__qualname__)
        us = 5.0 if "DeviceBench._call" in call.__qualname__ else 10.0
        return Timing(us, us, us, 3, "clock")

    monkeypatch.setattr("stof_compile.fuse.TEMPLATES", (SlowStart(),))
    monkeypatch.setattr(bench, "time_callable", time)
    monkeypatch.setattr(
        bench.DeviceBench, "compare", lambda self, schemes, long_turns=False: [20.0, 10.0]
    )
    monkeypatch.setattr(
        bench, "library_call", lambda recipe, _: lambda *given: run_recipe(recipe, given)
    )
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *given: FastestForm(None))
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", run_as_it_is)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=140)


@pytest.fixture
def module(tmp_path):
    """Name of a module in the working directory, another one in each test."""
    name = f"tuned_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    return name


def test_a_function_is_tuned_and_its_plan_replayed(measured, console, module, tmp_path):
    result = run_tune(TuneSettings(f"{module}:model", budget_s=20.0), console)
    assert result.trials == len(measured) > 0
    assert result.plan.name == "model.plan.json"
    printed = console.file.getvalue()
    for words in ("slow_start", "linear gelu", "2.00x", "measured", f"{result.trials} candidates"):
        assert words in printed
    (plan,) = json.loads((tmp_path / "model.plan.json").read_text())["graphs"]
    assert [c["segments"][0]["template"] for c in plan["chains"].values()] == ["slow_start"]

    del measured[:]
    torch._dynamo.reset()
    subject = make_subject(TuneSettings(f"{module}:model"))
    options = {"plan": "model.plan.json", "cache_dir": str(tmp_path / "empty")}
    fast = torch.compile(subject.model, backend="stof", dynamic=False, options=options)
    with torch.no_grad():
        out = fast(**subject.kwargs)
        expected = subject.model.double()(subject.kwargs["x"].double())
    assert measured == []
    assert [chain.source for chain in explain(fast).chains] == ["plan"]
    # a call of a template ends in a reshape, and the model has none
    assert explain(fast).graphs[0].graphs["rewritten"].count(".reshape(") == 2
    assert_close(out, expected, torch.float32, scale=4.0)


def test_a_plan_of_the_graph_without_fusion(measured, console, module, tmp_path, monkeypatch):
    verdict = Verdict("attention only", {"fused": 2.0, "attention only": 1.0})
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *given: FastestForm(verdict))
    run_tune(TuneSettings(f"{module}:model", budget_s=20.0), console)
    assert "kept: attention only" in console.file.getvalue()
    assert "slow_start" in console.file.getvalue()  # what was found is shown all the same
    assert measured
    del measured[:]
    torch._dynamo.reset()
    subject = make_subject(TuneSettings(f"{module}:model"))
    options = {"plan": "model.plan.json", "cache_dir": str(tmp_path / "empty")}
    fast = torch.compile(subject.model, backend="stof", dynamic=False, options=options)
    with torch.no_grad():
        fast(**subject.kwargs)
    assert measured == [] and explain(fast).chains == ()


def test_a_model_of_the_zoo_with_a_mask(measured, console, tmp_path):
    settings = TuneSettings("bert-tiny", 2, 32, "causal", budget_s=0.0, dump_dir=tmp_path / "dump")
    result = run_tune(settings, console)
    assert result.plan.name == "bert-tiny-2x32.plan.json"
    assert result.trials == 0 and measured == []
    assert len(list((tmp_path / "dump").glob("graph_*/plan.json"))) == 1
    printed = console.file.getvalue()
    assert "attention: 2x" in printed
    (plan,) = json.loads(result.plan.read_text())["graphs"]
    assert len(plan["attention"]) == 1
    assert [chain["source"] for chain in plan["chains"].values()] == ["rules"]


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_printed_follows_the_plan(measured, console, tmp_path, monkeypatch, mask):
    settings = TuneSettings("bert-tiny", 1, 32, mask, mode="reduce-overhead", budget_s=0.0)
    run_tune(settings, console)
    printed = console.file.getvalue()
    scope = {"model": (subject := make_subject(settings)).model}
    exec(printed[printed.index("import torch\n") :], scope)
    assert scope["options"]["mode"] == "reduce-overhead"
    assert scope["options"].get("mask") == mask_rule(mask, 32)
    torch._dynamo.reset()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with torch.no_grad():
        scope["fast"](**subject.kwargs)
    assert [chain.source for chain in explain(scope["fast"]).chains] == ["plan"]


def test_all_graphs_are_in_one_plan(measured, console, module, tmp_path):
    result = run_tune(TuneSettings(f"{module}:broken", out=tmp_path / "two.json"), console)
    assert result.plan == tmp_path / "two.json"
    body = json.loads(result.plan.read_text())
    (graph,) = body["graphs"]  # both halves of the model are the same graph
    assert graph["chains"]
    assert "plan for all 2 graphs" in console.file.getvalue()
    del measured[:]
    torch._dynamo.reset()
    subject = make_subject(TuneSettings(f"{module}:broken"))
    options = {"plan": str(result.plan), "cache_dir": str(tmp_path / "empty")}
    fast = torch.compile(subject.model, backend="stof", dynamic=False, options=options)
    with torch.no_grad():
        fast(**subject.kwargs)
    assert measured == []
    assert [chain.source for chain in explain(fast).chains] == ["plan", "plan"]


def test_a_plan_of_another_model_is_refused(measured, console, module, tmp_path):
    run_tune(TuneSettings(f"{module}:model"), console)
    torch._dynamo.reset()
    fast = torch.compile(
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        backend="stof",
        options={"plan": "model.plan.json"},
    )
    with torch.no_grad(), pytest.raises(StofPlanError, match="another graph"):
        fast(torch.ones(4, 8))


def test_a_directory_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=99,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=48,
        bos_token_id=1,
        eos_token_id=1,
    )
    transformers.GPT2Model(config).save_pretrained(tmp_path / "small")
    settings = TuneSettings(str(tmp_path / "small"), 3, 48, dtype="bfloat16", device="cpu")
    subject = make_subject(settings)
    assert subject.name == "small-3x48" and subject.tokens == 48
    with torch.no_grad():
        out = subject.model(**subject.kwargs).last_hidden_state
    assert out.shape == (3, 48, 32) and out.dtype == torch.bfloat16
    with pytest.raises(StofOptionError, match=r"49.*48 positions"):
        make_subject(TuneSettings(str(tmp_path / "small"), 1, 49))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StofOptionError, match="cannot be loaded"):
        make_subject(TuneSettings(str(tmp_path / "empty")))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nothing", "no function 'nothing'"),
        ("number", "no function 'number'"),
        ("alone", r"must return \(model, inputs\)"),
        ("wants", "takes? no arguments, it wants size"),
    ],
)
def test_functions_that_cannot_be_used(module, tmp_path, monkeypatch, function, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StofOptionError, match=words):
        make_subject(TuneSettings(f"{module}:{function}"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (TuneSettings("bert-bass"), "no such model; give a model of the zoo"),
        (TuneSettings(""), "--model is empty"),
        (TuneSettings(":make"), "a module as in `import`"),
        (TuneSettings("a..b:make"), "a module as in `import`"),
        (TuneSettings("builtins:type"), "a function of yours"),
        (TuneSettings("no_such_module:f"), "cannot be imported"),
        (TuneSettings("bert-tiny", batch=0), "--batch must be at least 1"),
        (TuneSettings("bert-tiny", mask="diagonal"), "--mask diagonal: choose one of none, causal"),
        (TuneSettings("bert-tiny", dtype="int8"), "--dtype int8"),
        (TuneSettings("bert-tiny", device="tpu"), "cpu or cuda"),
        (TuneSettings("anything:f", batch=2), "the function decides"),
        *(
            (TuneSettings("bert-tiny", budget_s=float(s)), rf"--budget must be .* got {s}")
            for s in ("-1", "nan", "inf")
        ),
        (TuneSettings("bert-tiny", seed=-1), "--seed must be in 0"),
        (TuneSettings("bert-tiny", seed=10**23), "--seed must be in 0"),
    ],
)
def test_bad_settings(settings, words, console, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StofOptionError, match=words):
        run_tune(settings, console)


def test_masks_are_as_wide_as_the_benchmarks():
    assert mask_rule("none", None) is None
    assert str(mask_rule("causal", None)) == str(masks.causal())
    expected = masks.bigbird(window=45, global_tokens=45, random_fill=0.1, seed=0)
    assert str(mask_rule("bigbird", 2048)) == str(expected)
    assert str(mask_rule("sliding", 100)) == str(masks.sliding_window(16))
    with pytest.raises(StofOptionError, match="give --seq"):
        mask_rule("longformer", None)


def test_nothing_compiled_and_nowhere_to_write(tmp_path, monkeypatch):
    with pytest.raises(StofOptionError, match="nothing to tune"):
        plans_of([])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StofPlaceError, match="TMPDIR"):
        plans_of([Record()])  # its dump was not written: the disk was full
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "plan.json").write_text(PlanFile().to_json())
    (tmp_path / "file").write_text("")
    record = Record(folder=str(tmp_path / "dump"), notes=["fusion measured 12 candidates"])
    result = TuneResult(Explanation((record,)), tmp_path / "file" / "plan.json", 1.0)
    with pytest.raises(StofOptionError, match="cannot be written"):
        save(result, plans_of([record]), None)
    assert fusion_trials(record) == 12
