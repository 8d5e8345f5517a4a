"""The models that benchmarks and ``stof tune`` share."""

import pytest
import torch
from close import assert_close
from torch.utils.flop_counter import FlopCounterMode

from stof_compile import explain, zoo
from stof_compile.errors import StofOptionError

pytest.importorskip("transformers")

TINY = [name for name in zoo.ZOO if name.endswith("-tiny")]
SEQ = 33


def test_every_family_has_a_tiny_model():
    assert {zoo.ZOO[name].family for name in TINY} == set(zoo.FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_the_back_end_computes_what_eager_does(name, fresh_dynamo, monkeypatch):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", lambda gm, *_: gm.forward)
    model, inputs = zoo.build(name, 2, SEQ, seed=1)
    options = {"tune_budget_s": 0, "attention": "gather"}
    fast = torch.compile(model, backend="stof", dynamic=False, options=options)
    with torch.no_grad():
        out = fast(**inputs).last_hidden_state
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        expected = model.double()(**wide).last_hidden_state
    assert out.shape == (2, zoo.token_count(name, SEQ), 64)
    assert_close(out, expected, torch.float32, scale=10.0)  # two layers, T5 four
    (record,) = explain(fast).graphs
    assert len(record.sites) == sum(group.count for group in zoo.attention_layers(name))
    assert all(site.status == "rewritten" for site in record.sites)


def test_seeds_decide():
    def weights(seed):
        return next(zoo.build_model("bert-tiny", 16, seed).parameters())

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
    before = torch.get_rng_state()
    zoo.build("gpt2-tiny", 1, 8)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny", "distilbert-tiny"])
def test_positions_beyond_the_usual_limit(name):
    model, inputs = zoo.build(name, 1, 1100)
    with torch.no_grad():
        assert model(**inputs).last_hidden_state.shape == (1, 1100, 64)


def test_llama_keeps_its_frequencies_in_fp32():
    model, _ = zoo.build("llama-tiny", 1, 8, dtype=torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("patches", "size"), [(2048, (512, 1024)), (33, (48, 176)), (7, (16, 112))]
)
def test_patches_are_as_many_as_asked_for(patches, size):
    inputs = zoo.make_inputs("vit-tiny", 1, patches)
    assert inputs["pixel_values"].shape == (1, 3, *size)
    assert zoo.token_count("vit-tiny", patches) == patches + 1


@pytest.mark.parametrize(
    ("name", "millions", "layers"),
    [
        ("bert-base", 108.9, 12), ("bert-large", 334.1, 24), ("gpt2", 124.4, 12),
        ("llama-1b", 1038.7, 16), ("t5-base", 222.9, 36), ("vit-base", 85.7, 12),
        ("distilbert", 66.4, 6),
    ],
)  # fmt: skip
def test_full_sizes_without_their_weights(name, millions, layers):
    model, inputs = zoo.build(name, 1, 100, device="meta")
    parameters = list(model.parameters())
    assert round(sum(p.numel() for p in parameters) / 1e6, 1) == millions
    assert all(tensor.is_meta for tensor in (*parameters, *inputs.values()))
    groups = zoo.attention_layers(name)
    assert sum(group.count for group in groups) == layers
    if name == "bert-base":
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(**inputs)
        linear = 2 * 100 * 12 * (4 * 768**2 + 2 * 768 * 3072)
        assert counter.flop_counts["Global"][torch.ops.aten.addmm] == linear


def test_bad_requests():
    with pytest.raises(StofOptionError, match="did you mean 'bert-base'"):
        zoo.build("bert-bass", 1, 16)
    with pytest.raises(StofOptionError, match="at least one token"):
        zoo.build("bert-tiny", 1, 0)
    with pytest.raises(StofOptionError, match="at least one sequence"):
        zoo.build("bert-tiny", 0, 16)
