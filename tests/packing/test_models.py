"""What is packed of whole models, that nothing else changes, and the memory it takes."""

import re
from functools import partial

import pytest
import torch
from e2e import models
from e2e.running import assert_same
from packed_projections import packed

from stof_compile.options import StofOptions
from stof_compile.packing import ALREADY_PACKED, packs_bytes
from stof_compile.packing_memory import within_memory

SHARE = StofOptions().pack_memory


@pytest.fixture(scope="module")
def distilbert():
    from transformers import DistilBertConfig, DistilBertModel

    torch.manual_seed(0)
    return DistilBertModel(DistilBertConfig(vocab_size=512)).eval()


def test_distilbert(distilbert, fresh_dynamo):
    ids = torch.randint(2, 512, (1, 128), generator=torch.Generator().manual_seed(1))
    before = {name: t.clone() for name, t in distilbert.state_dict().items()}
    backend, result = packed(distilbert, ids)
    assert [p.sizes for p in backend.packs] == [(768, 768, 768)] * 6
    assert (backend.before, backend.after) == (36, 24)  # 18 projections have become 6
    assert {p.role for p in backend.packs} == {"attention"}
    assert len({p.key for p in backend.packs}) == 1
    with torch.no_grad():
        torch.testing.assert_close(
            result.last_hidden_state, distilbert(ids).last_hidden_state, rtol=1e-5, atol=1e-5
        )
    after = distilbert.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert packs_bytes(backend.packs) == 6 * 3 * (768 * 768 + 768) * 4
    taken, refused = within_memory(backend.packs, backend.model_bytes, SHARE)
    assert len(taken) == 6 and not refused


def test_distilgpt2(fresh_dynamo):
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_layer=6, vocab_size=512, use_cache=False)).eval()
    backend, _ = packed(model, torch.randint(2, 512, (1, 128)))
    assert not backend.packs and backend.before == backend.after
    assert [r.reason for r in backend.refusals] == [ALREADY_PACKED] * 6


MODELS = {
    "bert": (partial(models.hf_bert, "sdpa", True), [(64, 64, 64)] * 2),
    "llama": (partial(models.hf_llama, "sdpa", False), [(64, 32, 32), (128, 128)] * 2),
    "llama-prefill": (partial(models.hf_llama_prefill, "sdpa"), [(64, 32, 32), (128, 128)] * 2),
    "gemma2": (partial(models.hf_gemma2, True), [(64, 32, 32), (128, 128)] * 2),
    "t5": (
        partial(models.hf_t5, "sdpa", False),
        # encoder: two layers; decoder: self-attention, then keys and values of the encoder's result
        [(64, 64, 64)] * 2 + [(64, 64, 64), (64, 64)] * 2,
    ),
    "vit": (partial(models.hf_vit, "sdpa"), [(64, 64, 64)] * 2),
    "mha": (partial(models.nn_mha, False, False), []),
    "mha-separate": (
        partial(models.nn_mha, False, False, kdim=64, vdim=64),
        [],  # its biases are slices of one parameter: no constants
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, fresh_dynamo):
    build, sizes = MODELS[name]
    model, inputs = build()
    with torch.no_grad():
        wanted = model(**inputs)
    model, inputs = build()
    backend, result = packed(model, **inputs)
    assert sorted(p.sizes for p in backend.packs) == sorted(sizes)
    assert_same(result, wanted)


def test_memory(fresh_dynamo):
    model, inputs = models.hf_llama("sdpa", False)
    backend, _ = packed(model, **inputs)
    attention = [p for p in backend.packs if p.role == "attention"]
    gated = [p for p in backend.packs if p.role == "gate_up"]
    assert len(attention) == len(gated) == 2
    total = packs_bytes(backend.packs)
    assert within_memory(backend.packs, total, 1.0) == (backend.packs, {})
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert backend.model_bytes == parameters
    taken, refused = within_memory(backend.packs, parameters, SHARE)
    assert taken == attention and list(refused) == [gated[0].key]
    assert "above 30% of the model's" in refused[gated[0].key]
    told = re.search(r"option pack_memory=([\d.]+) allows", refused[gated[0].key])
    assert within_memory(backend.packs, parameters, float(told.group(1))) == (backend.packs, {})
    assert 0 < float(told.group(1)) - total / parameters <= 0.01
    assert within_memory(backend.packs, parameters, 0.0)[0] == []
    buffers_alone = within_memory(backend.packs, 0, 1.0)[1].values()
    assert not any("pack_memory" in reason for reason in buffers_alone)  # no share is enough
