"""Option ``pack_memory``: gate and up projections of a LLaMA are packed where it is asked for and
measured to be faster, and everything that holds for packed Q/K/V holds for them.
"""

import copy
import re

import pytest
import torch
from close import assert_close
from models import hf_llama
from running import without_flex, without_inductor
from torch import nn
from torch_templates import templates_win

from stof_compile import explain, fuse
from stof_compile.errors import StofPlanError
from stof_compile.fuse import Fusion
from stof_compile.plan import PackPlan
from stof_compile.search import bench
from stof_compile.verdict import FastestForm

pytest.importorskip("transformers")

QKV, GATED = (64, 32, 32), (128, 128)
LAYERS = 2
GATED_BYTES = LAYERS * 2 * 128 * 64 * 4
ERRORS_ADD_UP = 4.0  # over two layers of attention and MLP


class Clock:
    """Samples of both forms of each pack, wherever the machine is busy.

    Attributes:
        faster: rows of the products that are faster when packed. measured: rows of those asked for.
    """

    def __init__(self):
        self.faster, self.measured = {sum(QKV), sum(GATED)}, []

    def rounds(self, _, fns, operands, rounds):
        rows = [sum(part.shape[-1] for part in fn(*operands)) for fn in fns]
        assert rows[0] == rows[1]
        self.measured.append(rows[0])
        us = 5.0 if rows[0] in self.faster else 20.0
        return [[[10.0, 10.1]] * rounds, [[us, us + 0.1]] * rounds]


@pytest.fixture
def clock(monkeypatch, fresh_dynamo):
    found = Clock()
    monkeypatch.setattr(bench.DeviceBench, "rounds", lambda *given: found.rounds(*given))
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *given: FastestForm(None))
    with without_flex():
        yield found


def run(folder, model=None, **options):
    """(compiled model, its result, pack sizes -> decision), after a check against fp64."""
    if model is None:
        model = hf_llama("sdpa", False, LAYERS)[0]
    torch._dynamo.reset()
    options = {"cache_dir": folder, "strict": True, "tune_budget_s": 30, **options}
    fast = torch.compile(model, backend="stof", dynamic=False, options=options)
    check(fast, model)
    return fast, {pack.sizes: pack for pack in explain(fast).packs}


@torch.no_grad()
def check(fast, model):
    inputs = hf_llama("sdpa", False, LAYERS)[1]
    wanted = copy.deepcopy(model).double()(**inputs).last_hidden_state
    found = fast(**inputs).last_hidden_state
    assert_close(found, wanted, torch.float32, scale=ERRORS_ADD_UP)


def test_gate_and_up_stay_apart_unless_asked_for(clock, tmp_path):
    fast, packs = run(tmp_path)
    assert packs[QKV].packed and not packs[GATED].packed
    assert clock.measured == [sum(QKV)]
    assert (packs[GATED].count, packs[GATED].nbytes) == (LAYERS, 0)
    reason = packs[GATED].reason
    assert "above 30% of the model's" in reason and reason in str(explain(fast))
    enough = float(re.search(r"option pack_memory=([\d.]+)", reason).group(1))
    assert not run(tmp_path, pack_memory=enough - 0.02)[1][GATED].packed
    assert run(tmp_path, pack_memory=enough)[1][GATED].packed


def test_gate_and_up_are_packed_and_their_bytes_told(clock, tmp_path):
    fast, packs = run(tmp_path, pack_memory=1)
    assert packs[QKV].packed and packs[GATED].packed
    assert packs[GATED].source == "measured" and "Welch's test: win" in packs[GATED].reason
    assert (packs[GATED].count, packs[GATED].nbytes) == (LAYERS, GATED_BYTES)
    (graph,) = explain(fast).graphs
    assert graph.options["pack_memory"] == 1.0
    line = f"2x projections 128 + 128: packed (measured), {GATED_BYTES / 1e6:.1f} MB of copies"
    assert line in graph.summary()
    text = graph.graphs["rewritten"]
    assert len(set(re.findall(r"stof_packed_weight_\d+", text))) == 2 * LAYERS


def test_templates_stand_beside_packed_products(clock, tmp_path):
    """A template takes whatever it can get; no segment holds a packed product and its slices."""
    with templates_win():
        fast, packs = run(tmp_path, pack_memory=1.0)
    assert packs[QKV].packed and packs[GATED].packed
    text = explain(fast).graphs[0].graphs["rewritten"]
    assert "stof_test.recipe" in text
    assert len(set(re.findall(r"stof_packed_weight_\d+", text))) == 2 * LAYERS


def test_what_is_slower_stays_apart(clock, tmp_path):
    clock.faster = {sum(QKV)}
    _, packs = run(tmp_path, pack_memory=1.0)
    assert packs[QKV].packed and not packs[GATED].packed
    assert "Welch's test: loss" in packs[GATED].reason and packs[GATED].nbytes == 0


def test_nothing_is_packed(clock, tmp_path):
    fast, packs = run(tmp_path, pack_memory=0)
    assert clock.measured == [] and not any(pack.packed for pack in packs.values())
    assert "stof_packed" not in explain(fast).graphs[0].graphs["rewritten"]


@torch.no_grad()
def test_new_weights_take_effect(clock, tmp_path):
    model = hf_llama("sdpa", False, LAYERS)[0]
    fast, packs = run(tmp_path, model, pack_memory=1.0)
    assert packs[GATED].packed
    model.layers[0].mlp.gate_proj.weight.mul_(-1.5)
    check(fast, model)
    state = {name: value.flip(0) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    check(fast, model)
    up = model.layers[1].mlp.up_proj
    up.weight = nn.Parameter(torch.randn_like(up.weight) / 8)
    check(fast, model)
    up.weight.data = torch.randn_like(up.weight) / 8
    check(fast, model)


def plan_of(dump):
    (path,) = dump.glob("graph_*/plan.json")
    return path


def test_a_plan_packs_what_it_says(clock, tmp_path):
    run(tmp_path / "a", pack_memory=1.0, dump_dir=tmp_path / "dump")
    plan, measured = plan_of(tmp_path / "dump"), list(clock.measured)
    _, packs = run(tmp_path / "b", pack_memory=1.0, plan=plan)
    assert clock.measured == measured
    assert all(pack.packed and pack.source == "plan" for pack in packs.values())
    assert packs[GATED].nbytes == GATED_BYTES
    with pytest.raises(StofPlanError, match=r"packs projections of 128 \+ 128 rows") as refused:
        run(tmp_path / "c", plan=plan)
    assert "above 30% of the model's" in str(refused.value)
    assert "give the option pack_memory that the plan was made with" in str(refused.value)


def test_a_plan_of_another_graph_does_not_lose_a_pack(clock, tmp_path):
    class Headed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, **inputs):
            out = self.body(**inputs)
            out.last_hidden_state = out.last_hidden_state * 2.0
            return out

    model = hf_llama("sdpa", False, LAYERS)[0]
    run(tmp_path / "a", model, pack_memory=1.0, dump_dir=tmp_path / "dump")
    plan = plan_of(tmp_path / "dump")
    assert run(tmp_path / "b", Headed(model), pack_memory=1.0, plan=plan)[1][GATED].packed
    with pytest.raises(StofPlanError, match="packs projections"):
        run(tmp_path / "c", Headed(model), plan=plan)


def test_a_plan_without_them_leaves_them_apart(clock, tmp_path):
    run(tmp_path / "a", dump_dir=tmp_path / "dump")
    plan, measured = plan_of(tmp_path / "dump"), list(clock.measured)
    _, packs = run(tmp_path / "b", pack_memory=1.0, plan=plan)
    assert packs[QKV].packed and not packs[GATED].packed
    assert packs[GATED].reason == "not in the plan" and clock.measured == measured
    # measured to be slower under another share: the plan holds, whatever there is room for here
    clock.faster = {sum(QKV)}
    run(tmp_path / "d", pack_memory=1.0, dump_dir=tmp_path / "slower")
    _, packs = run(tmp_path / "e", plan=plan_of(tmp_path / "slower"))
    assert packs[QKV].packed and not packs[GATED].packed


def test_a_graph_tuned_before_under_another_share(clock, tmp_path, monkeypatch):
    will_measure, enter = [], Fusion.__enter__

    def entered(self):
        will_measure.append(self._will_measure)
        return enter(self)

    monkeypatch.setattr(Fusion, "__enter__", entered)
    seen = []
    for share in (0.3, 0.25, 1.0, 1.0, 0.3):
        del clock.measured[:], will_measure[:]
        _, packs = run(tmp_path, pack_memory=share)
        assert packs[QKV].packed and packs[GATED].packed == (share == 1.0)
        seen.append((share, list(clock.measured), list(will_measure), packs[GATED].source))
    assert seen == [
        (0.3, [sum(QKV)], [True], "rules"),
        (0.25, [], [False], "rules"),  # the same packs have room: the same search
        (1.0, [sum(GATED)], [True], "measured"),
        (1.0, [], [False], "store"),
        (0.3, [], [False], "rules"),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("forced", [True, False], ids=["packed", "searched"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_gpu_llama(dtype, forced, fresh_dynamo, tmp_path, monkeypatch):
    """Templates run beside packed gate and up projections; the search takes either form."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = LlamaModel(config).eval().to("cuda", dtype)
    ids = torch.randint(0, 256, (1, 128), device="cuda")

    def all_packed(gm, found, ctx, *, on_gpu, gated):
        assert {p.key for p in found if p.role == "gate_up"} == set(gated)
        return {p.key: PackPlan(True, p.sizes, "forced") for p in found}

    if forced:
        monkeypatch.setattr(fuse, "choose_packs", all_packed)
    budget = 0 if forced else 120  # of a busy host; the search ends before
    options = {"cache_dir": tmp_path, "strict": True, "tune_budget_s": budget, "pack_memory": 1.0}
    fast = torch.compile(model, backend="stof", options=options)
    found = fast(ids).last_hidden_state
    wanted = copy.deepcopy(model).double()(ids).last_hidden_state
    assert_close(found, wanted, dtype, scale=8.0)
    (gated,) = (p for p in explain(fast).packs if p.sizes == (2816, 2816))
    assert gated.source == "forced" or "us" in gated.reason
    model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    wanted = copy.deepcopy(model).double()(ids).last_hidden_state
    assert_close(fast(ids).last_hidden_state, wanted, dtype, scale=8.0)
