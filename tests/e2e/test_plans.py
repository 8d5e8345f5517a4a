"""Plan files: one for all graphs of a model, followed in another process, refused elsewhere."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import hf_gpt2
from running import assert_same, without_flex, without_inductor
from torch import nn
from torch_templates import templates_win

from stof_compile import explain, masks
from stof_compile.errors import StofPlanError
from stof_compile.plan import PLAN_VERSION, PlanFile
from stof_compile.verdict import FastestForm

TESTS = Path(__file__).parent


class Block(nn.Module):
    """Two feed-forward parts of different widths, with or without a graph break between them."""

    def __init__(self, width: int = 32, breaks: bool = True, factor: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.breaks = nn.LayerNorm(width), breaks

    def forward(self, x):
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.norm(x + self.narrow(F.silu(self.wide(x))))


@pytest.fixture
def measured(monkeypatch, fresh_dynamo):
    """Templates that win, no compiler; the list gets an entry for every measurement."""
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *given: FastestForm(None))
    with templates_win() as timed, without_flex():
        yield timed


@torch.no_grad()
def run(model, x, folder, **options):
    torch._dynamo.reset()
    options = {"cache_dir": folder, "strict": True, **options}
    fast = torch.compile(model, backend="stof", dynamic=False, options=options)
    return fast(x), fast


def joined(dump: Path, out: Path) -> Path:
    """One file of the plans of all graphs of a dump."""
    files = [PlanFile.from_json(p.read_text()) for p in sorted(dump.glob("graph_*/plan.json"))]
    out.write_text(PlanFile.of([plan for file in files for plan in file.plans]).to_json())
    return out


def test_two_graphs_follow_one_file(measured, tmp_path):
    model, x = Block().eval(), torch.randn(2, 16, 32)
    out, fast = run(model, x, tmp_path / "a", dump_dir=tmp_path / "dump")
    assert len(explain(fast).graphs) == 2 and measured
    path = joined(tmp_path / "dump", tmp_path / "plan.json")
    body = json.loads(path.read_text())
    assert body["version"] == PLAN_VERSION and len(body["graphs"]) == 2
    assert len({graph["graph"] for graph in body["graphs"]}) == 2
    assert "float32 [2, 16, 32]" in body["graphs"][0]["about"]
    del measured[:]
    again, replayed = run(model, x, tmp_path / "b", plan=path)
    assert measured == []
    assert torch.equal(again, out)
    for graph in explain(replayed).graphs:
        assert {chain.source for chain in graph.chains} == {"plan"}


def test_prefill_and_decode_follow_one_file(measured, tmp_path):
    model, _ = hf_gpt2("sdpa", False, layers=1)
    prompt, token = torch.randint(2, 90, (1, 8)), torch.randint(2, 90, (1, 1))

    @torch.no_grad()
    def generate(**options):
        from transformers import DynamicCache

        torch._dynamo.reset()
        fast = torch.compile(model, backend="stof", dynamic=False, options=options)
        cache = DynamicCache(config=model.config)
        outs = [
            fast(ids.clone(), past_key_values=cache, use_cache=True).last_hidden_state
            for ids in (prompt, token)
        ]
        return outs, explain(fast)

    outs, tuned = generate(cache_dir=tmp_path / "a", dump_dir=tmp_path / "dump")
    assert len(tuned.graphs) == 2 and measured
    path = joined(tmp_path / "dump", tmp_path / "plan.json")
    del measured[:]
    again, followed = generate(cache_dir=tmp_path / "b", plan=path)
    assert measured == []
    assert_same(again, outs, 0.0)
    assert all(chain.source == "plan" for graph in followed.graphs for chain in graph.chains)
    assert all(graph.chains for graph in followed.graphs)


def test_a_graph_of_another_model_is_refused_with_what_is_there(measured, tmp_path):
    x = torch.randn(2, 16, 32)
    run(Block().eval(), x, tmp_path / "a", dump_dir=tmp_path / "dump")
    path = joined(tmp_path / "dump", tmp_path / "plan.json")
    with pytest.raises(StofPlanError, match="another graph") as raised:
        run(Block(24).eval(), torch.randn(2, 16, 24), tmp_path / "b", plan=path)
    text = str(raised.value)
    assert "It has 2:" in text and "linear gelu linear residual_add layer_norm (1 times)" in text
    assert "linear silu linear residual_add layer_norm" in text and "tune this model" in text


def test_a_graph_that_grew_keeps_its_chains(measured, tmp_path):
    """No graph of the file is this one, and one of them is in it."""

    class Headed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            y = self.body(x)
            return y, y.mean(1).tanh()

    model, x = Block(breaks=False).eval(), torch.randn(2, 16, 32)
    run(model, x, tmp_path / "a", dump_dir=tmp_path / "dump")
    path = joined(tmp_path / "dump", tmp_path / "plan.json")
    del measured[:]
    _, fast = run(Headed(model).eval(), x, tmp_path / "b", plan=path)
    assert measured == []
    assert {chain.source for chain in explain(fast).chains} == {"plan"}
    assert len(explain(fast).chains) == 2


def test_a_graph_without_choices_needs_no_plan(measured, tmp_path):
    model, x = Block(breaks=False).eval(), torch.randn(2, 16, 32)
    run(model, x, tmp_path / "a", dump_dir=tmp_path / "dump")
    path = joined(tmp_path / "dump", tmp_path / "plan.json")
    out, _ = run(nn.Tanh(), x, tmp_path / "b", plan=path)
    assert_same(out, x.tanh())


def test_the_plan_of_this_graph_must_fit(measured, tmp_path):
    model, x = Block(breaks=False).eval(), torch.randn(2, 16, 32)
    run(model, x, tmp_path / "a", dump_dir=tmp_path / "dump")
    path = joined(tmp_path / "dump", tmp_path / "plan.json")
    body = json.loads(path.read_text())
    (graph,) = body["graphs"]
    graph["chains"]["0" * 64] = next(iter(graph["chains"].values()))
    path.write_text(json.dumps(body))
    with pytest.raises(StofPlanError, match=r"made for this graph .* no longer fits"):
        run(model, x, tmp_path / "b", plan=path)


class Attends(nn.Module):
    """Two layers of attention and a body with chains; with ``own`` they read a mask's buffer."""

    def __init__(self, own: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.body = Block(breaks=False)
        self.register_buffer("mask", torch.zeros(1, 1, 64, 64) if own else None)
        if own:
            self.mask[..., 20:] = -1e4

    def forward(self, x):
        for linear in self.qkv:
            q, k, v = linear(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
            x = x + y.transpose(1, 2).reshape(x.shape)
        return self.body(x)


WIDE = torch.randn(2, 64, 32)
WINDOW = masks.sliding_window(8)


def tuned(tmp_path, model, **options):
    run(model, WIDE, tmp_path / "a", dump_dir=tmp_path / "dump", **options)
    return joined(tmp_path / "dump", tmp_path / "plan.json")


@pytest.mark.parametrize("there", ["mask", "none", "nothing"])
def test_attention_that_the_plan_does_not_have_is_refused(measured, tmp_path, there):
    model = Attends().eval()
    path = tuned(tmp_path, model, mask=WINDOW if there == "mask" else None)
    if there == "nothing":
        body = json.loads(path.read_text())
        body["graphs"][0]["attention"] = {}
        path.write_text(json.dumps(body))
    with pytest.raises(StofPlanError, match=r"made for this graph .* no longer fits") as raised:
        run(model, WIDE, tmp_path / "b", plan=path, mask=None if there == "mask" else WINDOW)
    text = str(raised.value)
    assert "1 of the 1 attention problems" in text and "fp8 and TF32 are part" in text
    with pytest.raises(StofPlanError, match=r"1 of the 1 attention problems"):
        run(
            model, WIDE, tmp_path / "c", plan=path, fusion="off",
            mask=None if there == "mask" else WINDOW,
        )  # fmt: skip
    assert f"has {0 if there == 'nothing' else 1} others" in text and "tune again" in text


@pytest.mark.parametrize("attention", ["auto", "sdpa", "gather", "off"])
def test_the_same_options_follow_the_plan(measured, tmp_path, attention):
    model, options = Attends().eval(), {"mask": WINDOW, "attention": attention}
    path = tuned(tmp_path, model, **options)
    del measured[:]
    _, fast = run(model, WIDE, tmp_path / "b", plan=path, **options)
    assert measured == []
    chosen = [site.choice for site in explain(fast).sites]
    assert all(choice is None or choice.source == "plan" for choice in chosen)


def test_graphs_alike_under_masks_by_path_follow_one_file(measured, tmp_path):
    """Both graphs have one key; each asks for one of the two choices of the file."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Attends() for _ in range(2))

        def forward(self, x):
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            return self.layers[1](x)

    model = Twice().eval()
    by_path = {"layers.0": WINDOW, "layers.1": masks.sliding_window(20)}
    path = tuned(tmp_path, model, mask=by_path)
    (graph,) = json.loads(path.read_text())["graphs"]
    assert len(graph["attention"]) == 2
    del measured[:]
    run(model, WIDE, tmp_path / "b", plan=path, mask=by_path)
    assert measured == []


@pytest.mark.parametrize("how", ["training", "dynamic"])
def test_graphs_whose_operators_are_left_alone_follow_a_plan(measured, tmp_path, how):
    model = Attends().eval()

    def compiled(**options):
        torch._dynamo.reset()
        options |= {"cache_dir": tmp_path / "cache", "mask": WINDOW}
        return torch.compile(model, backend="stof", dynamic=how == "dynamic", options=options)

    with torch.set_grad_enabled(how == "training"):
        expected = compiled(dump_dir=tmp_path / "dump")(WIDE)
        path = joined(tmp_path / "dump", tmp_path / "plan.json")
        fast = compiled(plan=path)
        assert_same(fast(WIDE), expected)
        for x in (WIDE[:, :48], WIDE[:1]):
            assert fast(x).shape == x.shape


def test_a_mask_buffer_that_changes_leaves_the_plan(measured, tmp_path):
    """At the call its values are no longer known, and the attention is another problem."""
    model = Attends(own=True).eval()
    path = tuned(tmp_path, model)
    del measured[:]
    _, fast = run(model, WIDE, tmp_path / "b", plan=path)
    with torch.no_grad():
        model.mask[..., 10:] = -1e4
        assert_same(fast(WIDE), model(WIDE))
    assert measured == []


@pytest.mark.parametrize("version", [1, 2, PLAN_VERSION + 1])
def test_other_versions_say_so(measured, tmp_path, version):
    body = {"version": version, "environment": "here", "attention": {}, "chains": {}, "packs": {}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(body))
    with pytest.raises(
        StofPlanError, match=f"^[^(]*plan version {version}.*reads version {PLAN_VERSION}"
    ):
        run(Block().eval(), torch.randn(2, 16, 32), tmp_path / "b", plan=path)


KEYS = """
import torch
from test_plans import Block
from stof_compile.graph_key import graph_key

def show(gm, inputs):
    print("KEY", graph_key(gm, grad_enabled=False), flush=True)
    return gm.forward

with torch.no_grad():
    for dynamic in (False, True):
        torch._dynamo.reset()
        torch.compile(Block().eval(), backend=show, dynamic=dynamic)(torch.randn(2, 16, 32))
"""


def test_keys_of_graphs_are_the_same_in_every_process(tmp_path, capsys, fresh_dynamo):
    ours = os.environ.get("PYTHONHASHSEED")  # a random number of this process, where it is unset
    script = tmp_path / "there" / "keys.py"  # neither file nor line of the program is in a key
    script.parent.mkdir()
    script.write_text("\n" + KEYS)
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    seed = "2" if ours == "1" else "1"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    capsys.readouterr()
    (tmp_path / "keys.py").write_text(KEYS)
    runpy.run_path(str(tmp_path / "keys.py"))
    found = [
        [line for line in text.splitlines() if line.startswith("KEY")]
        for text in (done.stdout, capsys.readouterr().out)
    ]
    assert len(found[0]) == 4, done.stderr[-2000:]
    assert found[0] == found[1]
    assert len(set(found[0])) == 4
