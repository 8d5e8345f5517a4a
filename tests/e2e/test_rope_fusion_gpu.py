"""A LLaMA on a GPU whose Q/K/V are one product with the rotation in its epilogue.

The choices are forced, so that every run takes this path whatever is faster.
"""

from dataclasses import replace

import pytest
import torch
from close import assert_close

from stof_compile import explain, fuse
from stof_compile.plan import ChainPlan, PackPlan, SegmentPlan

pytestmark = pytest.mark.gpu
pytest.importorskip("transformers")


@pytest.fixture
def rotated(monkeypatch, fresh_dynamo):
    """Q/K/V are packed, and the template's first config runs where it can."""

    def packs(gm, found, ctx, *, on_gpu, gated):
        return {p.key: PackPlan(p.role == "attention", p.sizes, "forced") for p in found}

    def rotation(recipe, ctx):
        first = ctx.bench.first(recipe)
        assert first is not None and first.template == "triton_rope_linear"
        segment = SegmentPlan(0, 2, first.template, first.config)
        return ChainPlan(("linear", "rope"), "0", "0", (segment,), "forced")

    monkeypatch.setattr(fuse, "choose_packs", packs)
    monkeypatch.setattr(fuse, "choose_rotation", rotation)


def llama(dtype, bias=False):
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=2048, intermediate_size=2048, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192,
        attention_bias=bias, use_cache=False,
    )  # fmt: skip
    return LlamaModel(config).eval().to("cuda", dtype)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    ("shape", "dtype", "bias"),
    [
        ((1, 128), torch.float16, False),
        ((1, 128), torch.bfloat16, True),
        ((1, 1000), torch.float16, True),
        ((2, 2048), torch.bfloat16, False),
    ],
    ids=["128", "128 bf16, bias", "1000, bias", "4096 bf16"],
)
def test_gpu_llama(shape, dtype, bias, mode, rotated, tmp_path):
    model = llama(dtype, bias)
    ids = torch.randint(0, 256, shape, device="cuda")
    options = {"cache_dir": str(tmp_path), "strict": True, "tune_budget_s": 0, "mode": mode}
    fast = torch.compile(model, backend="stof", options=options)
    with torch.no_grad():
        for _ in range(3):  # the third call replays where there are CUDA graphs
            torch.compiler.cudagraph_mark_step_begin()
            out = fast(ids)[0]
        out = out.clone()
        wanted = model.double()(ids)[0]
    assert_close(out, wanted, dtype, scale=8.0)
    record = explain(fast).graphs[0]
    (chain,) = (c for c in record.chains if c.kinds == ("linear", "rope"))
    assert chain.count == 2
    assert "fused_rope_linear" in record.graphs["rewritten"]
    assert any("in the epilogue of 2 products" in note for note in record.notes)


def test_gpu_the_search_decides_and_a_plan_repeats_it(fresh_dynamo, tmp_path):
    model, ids = llama(torch.float16), torch.randint(0, 256, (1, 128), device="cuda")
    # the other tests of the run share the host: most of it is not used where there is none
    options = {"cache_dir": str(tmp_path / "cache"), "strict": True, "tune_budget_s": 240}
    dump = {"dump_dir": str(tmp_path / "dump")}

    def run(**more):
        torch._dynamo.reset()
        fast = torch.compile(model, backend="stof", options={**options, **more})
        with torch.no_grad():
            out = fast(ids)[0]
        chains = explain(fast).graphs[0].chains
        return out, [c for c in chains if c.kinds == ("linear", "rope")], explain(fast).notes

    first, decided, _ = run(**dump)
    assert decided and all(chain.source == "measured" for chain in decided)
    (plan,) = (tmp_path / "dump").glob("graph_*/plan.json")
    again, replayed, notes = run(plan=str(plan), cache_dir=str(tmp_path / "elsewhere"))
    if replayed:  # the fused graph was the fastest as a whole
        decided = [replace(chain, source="plan") for chain in decided]
        assert sorted(map(str, replayed)) == sorted(map(str, decided))
    assert not any("candidates" in note for note in notes)
    with torch.no_grad():
        wanted = model.double()(ids)[0]
    for out in (first, again):
        assert_close(out, wanted, torch.float16, scale=8.0)
