"""Rotary embeddings in the epilogue of Q/K/V, end to end on the CPU: decided, kept, replayed."""

import json

import pytest
import torch
from close import assert_close
from torch_templates import templates_win

from stof_compile import explain
from stof_compile.verdict import FastestForm

pytest.importorskip("transformers")


def llama(layers=2):
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaModel(config).eval()


@pytest.fixture(autouse=True)
def fused_form(monkeypatch, fresh_dynamo):
    """The finished graph is kept without being timed as a whole, and runs as it is."""
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *a: FastestForm(None))
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", lambda gm, *_: gm.forward)


def run(tmp_path, model=None, grad=False, **options):
    """Record of a compile, after checking the result."""
    torch._dynamo.reset()
    model, ids = model or llama(), torch.arange(34).view(2, 17)
    held = {"cache_dir": str(tmp_path / "cache"), "strict": True, "attention": "sdpa"}
    options = {**held, **options}
    fast = torch.compile(model, backend="stof", options=options)
    with torch.set_grad_enabled(grad):
        out = fast(ids)[0].detach()
        wanted = model.double()(ids)[0].detach()
    model.float()
    assert_close(out, wanted, torch.float32, scale=8.0)
    return explain(fast).graphs[0]


def rotations(record):
    return [chain for chain in record.chains if chain.kinds == ("linear", "rope")]


def test_measured_stored_and_replayed_from_a_plan(tmp_path):
    with templates_win() as timed:
        record = run(tmp_path, dump_dir=str(tmp_path / "dump"))
        (chain,) = rotations(record)
        assert (chain.source, chain.count, chain.code) == ("measured", 2, "0")
        (segment,) = chain.segments
        assert segment.template == "any_recipe" and segment.median_us < segment.library_us
        assert any("in the epilogue of 2 products" in note for note in record.notes)
        assert timed
        del timed[:]
        (chain,) = rotations(run(tmp_path))
        assert chain.source == "store" and timed == []
        (plan,) = (tmp_path / "dump").glob("graph_*/plan.json")
        held = json.loads(plan.read_text())["graphs"][0]["chains"]
        assert sum(key.endswith(" rope") for key in held) == 1
        (chain,) = rotations(run(tmp_path / "elsewhere", plan=str(plan)))
        assert chain.source == "plan" and timed == []
        assert chain.segments[0].template == "any_recipe"
        summary = (plan.parent / "summary.txt").read_text()
        assert "linear rope" in summary and "us with the rotations apart" in summary


def test_no_budget_takes_only_what_is_stored(tmp_path):
    with templates_win() as timed:
        found = rotations(run(tmp_path, tune_budget_s=0))  # of Q and of K, which are not packed
        assert [(c.source, c.segments[0].template) for c in found] == [("rules", "inductor")] * 2
        assert timed == []


def test_what_is_slower_stays_apart(tmp_path):
    from stof_compile.search import bench

    with templates_win(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bench.DeviceBench, "compare", lambda self, schemes, long_turns=False: [10.0, 20.0]
        )
        record = run(tmp_path)
    (chain,) = rotations(record)
    assert chain.source == "measured" and chain.segments[0].template == "inductor"
    assert "measured in turns" in chain.reason
    assert not any("in the epilogue" in note for note in record.notes)


def test_off_and_gradients_leave_it(tmp_path):
    with templates_win():
        assert rotations(run(tmp_path, fusion="off")) == []
        assert rotations(run(tmp_path, grad=True, strict=False)) == []


def test_what_cannot_be_rotated_there_is_told(tmp_path):
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with templates_win():
        record = run(tmp_path, Qwen3Model(config).eval())
    assert rotations(record) == []
    told = next(note for note in record.notes if "rotary embeddings left" in note)
    assert "4 times" in told and "rms_norm" in told
