"""Fusion end to end on the CPU: chains found, searched, rewritten, compared, replayed.

The templates here are made of torch operations, so that everything but the kernels is real. Where
neither code nor times of Inductor's are the point, graphs run as AOTAutograd leaves them.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured_stacks import BertLayer, Stack
from close import assert_close
from running import without_flex, without_inductor
from stof_compile.templates.base import Call, Slot, Template
from stof_compile.templates.space import ConfigSpace
from torch import nn

from stof_compile import explain, masks
from stof_compile.device import DeviceFacts
from stof_compile.errors import StofOptionError, StofPlanError
from stof_compile.fusion.recipe import Recipe
from stof_compile.measure import Timing
from stof_compile.search import bench
from stof_compile.verdict import FastestForm


@torch.library.custom_op("stof_test::fused_gelu", mutates_args=())
def fused_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, speed: int
) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias))


@fused_gelu.register_fake
def _(x, weight, bias, speed):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class GeluTemplate(Template):
    """Linear and exact GELU in one call."""

    name = "test_gelu"
    device_kinds = ("cpu",)

    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        spine = recipe.spine() or ()
        kinds = [(s.kind, s.attr("name", "")) for s in spine]
        return None if kinds == [("linear", ""), ("activation", "gelu")] else "another form"

    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        return ConfigSpace({"speed": (1, 2, 3)})

    def first(self, recipe: Recipe, device: DeviceFacts) -> dict[str, Any]:
        return {"speed": 1}

    def build(self, recipe: Recipe, config: Mapping[str, Any]) -> Call:
        (linear, *_rest) = recipe.spine() or ()
        x, weight, bias = (Slot(i) for i in linear.operands)
        op = torch.ops.stof_test.fused_gelu.default
        return Call(op, (x, weight, bias, config["speed"]), recipe.result.shape)


class Mlp(nn.Module):
    def __init__(self, layers: int = 3, width: int = 32):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                    "norm": nn.LayerNorm(width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer["norm"](x + layer["down"](F.gelu(layer["up"](x))))
        return x


@pytest.fixture
def templates(monkeypatch):
    monkeypatch.setattr("stof_compile.fuse.TEMPLATES", (GeluTemplate(),))


@pytest.fixture
def quick(monkeypatch):
    """No C++ is compiled."""
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    monkeypatch.setattr("stof_compile.verdict.compile_with_inductor", without_inductor)
    with without_flex():
        yield


@pytest.fixture
def fast_template(templates, monkeypatch):
    """Every candidate has a time by its name: the template wins wherever it stands."""

    def time(call, sets, device, budget_s):
        call(*sets[0])
        us = 5.0 if "DeviceBench._call" in call.__qualname__ else 10.0
        return Timing(us, us, us, 3, "clock")

    monkeypatch.setattr(bench, "time_callable", time)
    monkeypatch.setattr(
        bench.DeviceBench, "compare", lambda self, schemes, long_turns=False: [20.0, 10.0]
    )


def run(model, x, tmp_path, **options):
    torch._dynamo.reset()
    options = {"cache_dir": str(tmp_path / "cache"), "strict": True, **options}
    fast = torch.compile(model, backend="stof", options=options)
    with torch.no_grad():
        return fast(x), fast


def kept(record):
    (chain,) = (c for c in record.chains if len(c.kinds) > 1)
    return chain


def test_equal_layers_are_tuned_once_and_all_rewritten(fast_template, fresh_dynamo, tmp_path):
    model, x = Mlp().eval(), torch.randn(2, 16, 32)
    out, fast = run(model, x, tmp_path, dump_dir=str(tmp_path / "dump"))
    assert_close(out, model.double()(x.double()), torch.float32, scale=4.0)
    record = explain(fast)
    chain = kept(record)
    assert chain.count == 3 and chain.source == "measured"
    assert chain.kinds == ("linear", "gelu", "linear", "residual_add", "layer_norm")
    assert next(s.template for s in chain.segments) == "test_gelu"
    (folder,) = (tmp_path / "dump").glob("graph_*")
    assert (folder / "plan.json").is_file()
    text = (folder / "rewritten.py").read_text()
    form = next(note for note in record.notes if note.startswith("whole graph"))
    assert ("fused_gelu" in text) == ("kept: fused" in form)


def test_a_second_compile_and_a_plan_measure_nothing(fast_template, fresh_dynamo, tmp_path):
    model, x = Mlp().eval(), torch.randn(2, 16, 32)
    run(model, x, tmp_path, dump_dir=str(tmp_path / "dump"))
    _, again = run(model, x, tmp_path)
    assert not any("candidates" in note for note in explain(again).notes)
    assert kept(explain(again)).source == "store"
    (plan,) = (tmp_path / "dump").glob("graph_*/plan.json")
    (choices,) = json.loads(plan.read_text())["graphs"]
    if choices["chains"]:  # the fused form was the faster one
        _, replayed = run(model, x, tmp_path / "elsewhere", plan=str(plan))
        assert not any("candidates" in note for note in explain(replayed).notes)
        assert kept(explain(replayed)).source == "plan"


def test_a_plan_of_another_graph_is_refused(
    quick, fast_template, fresh_dynamo, tmp_path, monkeypatch
):
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *a: FastestForm(None))
    run(Mlp().eval(), torch.randn(2, 16, 32), tmp_path, dump_dir=str(tmp_path / "dump"))
    (plan,) = (tmp_path / "dump").glob("graph_*/plan.json")
    with pytest.raises(StofPlanError, match="another graph"):
        run(Mlp(width=16).eval(), torch.randn(2, 16, 16), tmp_path, plan=str(plan))


def test_no_budget_takes_the_rules(quick, templates, fresh_dynamo, tmp_path):
    model, x = Mlp().eval(), torch.randn(2, 16, 32)
    out, fast = run(model, x, tmp_path, tune_budget_s=0)
    assert_close(out, model.double()(x.double()), torch.float32, scale=4.0)
    assert kept(explain(fast)).source == "rules"


def test_a_forced_scheme(templates, fresh_dynamo, tmp_path):
    model, x = Mlp().eval(), torch.randn(2, 16, 32)
    out, fast = run(model, x, tmp_path, fusion="05")  # 00101: linear+gelu, linear, add, norm
    assert_close(out, model.double()(x.double()), torch.float32, scale=4.0)
    chain = kept(explain(fast))
    assert chain.source == "forced" and chain.code == "05"
    assert chain.segments[0].template == "test_gelu"
    with pytest.raises(StofOptionError, match="no chain"):
        run(model.float(), x, tmp_path, fusion="7fff")


def test_gradients_and_symbolic_sizes_are_left_alone(quick, templates, fresh_dynamo, tmp_path):
    model, x = Mlp(), torch.randn(2, 16, 32)
    options = {"cache_dir": str(tmp_path)}
    fast = torch.compile(model, backend="stof", options=options)
    fast(x).sum().backward()
    assert any("gradients" in note for note in explain(fast).notes)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="stof", options=options, dynamic=True)
    with torch.no_grad():
        fast(x)
    assert any("symbolic" in note for note in explain(fast).notes)


def test_off_runs_no_fusion(quick, templates, fresh_dynamo, tmp_path):
    _, fast = run(Mlp().eval(), torch.randn(2, 16, 32), tmp_path, fusion="off")
    assert explain(fast).chains == ()


def test_where_the_whole_graph_is_faster_without_us_the_record_says_so(
    quick, fast_template, fresh_dynamo, tmp_path, monkeypatch
):
    def time(fns, sets, device, **how):
        return [Timing(us, us, us, 3, "clock") for us in (3.0, 1.0, 2.0)[: len(fns)]]

    monkeypatch.setattr("stof_compile.verdict.time_in_turns", time)
    torch.manual_seed(0)
    model = Stack(BertLayer()).eval()
    x = torch.randn(2, 64, 32)
    options = {"cache_dir": str(tmp_path / "cache"), "mask": masks.sliding_window(4)}
    fast = torch.compile(model, backend="stof", options=options)
    with torch.no_grad():
        out = fast(x, None)
        band = (torch.arange(64)[:, None] - torch.arange(64)).abs() <= 4
        assert_close(out, model.double()(x.double(), band), torch.float32, scale=4.0)
    record = explain(fast).graphs[0]
    assert any("kept: as torch.compile runs it" in note for note in record.notes)
    (site,) = record.sites
    assert (site.choice.kernel, site.choice.source) == ("sdpa", "graph")
    assert "as torch.compile runs it" in site.choice.reason
    assert {c.status for c in site.choice.candidates} == {"measured"}
    assert (record.options["attention"], record.options["fusion"]) == ("auto", "auto")
