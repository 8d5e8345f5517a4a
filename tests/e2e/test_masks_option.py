"""``options["mask"]``: where it goes, from which position it counts, and that it is never lost."""

import logging

import pytest
import torch
from models import (
    BATCH,
    LENGTH,
    HandWritten,
    hand_written,
    hf_bert,
    hf_gpt2,
    hf_llama_decode,
    hf_t5,
    nn_decoder,
    nn_mha,
    padding_mask,
)
from running import NO_TIMING, assert_same, masked, without_inductor
from torch import nn
from torch.nn import functional as F

from stof_compile import explain, masks
from stof_compile.errors import StofMaskError

WINDOW = masks.sliding_window(4)
NARROW = masks.sliding_window(1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


def compile_with(model, mask, **options):
    return torch.compile(model, backend="stof", options={**NO_TIMING, "mask": mask, **options})


def statuses(fast):
    return {site.name: site.status for site in explain(fast).sites}


# -- joined with what the model masks --------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mask", [WINDOW, masks.bigbird(4, 2, 0.1), masks.causal()], ids=repr)
@torch.no_grad()
def test_it_is_joined_with_padding(mask, padded):
    model, inputs = hf_bert("sdpa", padded, layers=1)
    fast = compile_with(model, mask)
    with masked(mask):
        expected = model(**inputs)
    assert_same(fast(**inputs), expected)
    assert set(statuses(fast).values()) == {"rewritten"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_it_is_joined_with_the_models_own_mask(implementation):
    model, inputs = hf_gpt2(implementation, False, layers=1)
    reference, _ = hf_gpt2("sdpa", False, layers=1)
    fast = compile_with(model, masks.longformer(3, 2))
    with masked(masks.longformer(3, 2)):
        expected = reference(**inputs)
    assert_same(fast(**inputs), expected)
    assert set(statuses(fast).values()) == {"rewritten"}


@torch.no_grad()
def test_a_mask_per_head_and_a_mask_per_batch_row():
    model, inputs = hf_bert("sdpa", False, layers=1)
    heads = masks.per_head([masks.sliding_window(w) for w in (1, 2, 3, 4)])
    documents = masks.document(torch.arange(LENGTH)[None] // torch.tensor([[8], [5]]))
    for mask in (heads, documents, heads & documents):
        torch._dynamo.reset()
        with masked(mask):
            expected = model(**inputs)
        assert_same(compile_with(model, mask)(**inputs), expected)


@torch.no_grad()
def test_a_bool_tensor_and_a_block_mask():
    model, inputs = hf_bert("sdpa", False, layers=1)
    keep = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.5
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    with masked(masks.from_tensor(keep)):
        expected = model(**inputs)
    assert_same(compile_with(model, keep)(**inputs), expected)
    torch._dynamo.reset()
    block_mask = masks.build_block_mask(WINDOW, LENGTH, LENGTH, 16)
    with masked(WINDOW):
        expected = model(**inputs)
    assert_same(compile_with(model, block_mask)(**inputs), expected)


@torch.no_grad()
def test_a_tensor_of_another_length_is_an_error():
    model, inputs = hf_bert("sdpa", False, layers=1)
    with pytest.raises(StofMaskError, match=r"\[16, 16\].*\[32, 32\].*rule"):
        compile_with(model, torch.ones(16, 16, dtype=torch.bool))(**inputs)


# -- by path ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_paths_choose_layers():
    model, inputs = hf_bert("sdpa", True)
    fast = compile_with(model, {"encoder.layer.0": WINDOW, "encoder.*.1": NARROW})
    with masked(WINDOW, NARROW):
        expected = model(**inputs)
    assert_same(fast(**inputs), expected)
    torch._dynamo.reset()
    fast = compile_with(model, {"encoder.layer.1": NARROW})
    with masked(None, NARROW):
        expected = model(**inputs)
    assert_same(fast(**inputs), expected)


@torch.no_grad()
def test_an_unmatched_path_is_an_error_in_one_graph():
    model, inputs = hf_bert("sdpa", False)
    with pytest.raises(
        StofMaskError, match=r"'encoder\.layr\.0'.*did you mean 'encoder\.layer\.0'"
    ):
        compile_with(model, {"encoder.layr.0": WINDOW})(**inputs)


class Broken(nn.Module):
    """Two attention layers with a graph break between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = HandWritten("scale_both"), HandWritten("repeat_interleave")
        self.pooler = nn.Linear(64, 64)

    def forward(self, x):
        x = x + self.first(x)
        torch._dynamo.graph_break()
        return self.pooler(x + self.second(x))


@torch.no_grad()
def test_paths_with_several_graphs(caplog):
    torch.manual_seed(0)
    model, x = Broken().eval(), torch.randn(BATCH, LENGTH, 64)
    fast = compile_with(model, {"second": NARROW, "pooler": WINDOW, "thrid": WINDOW})
    with masked(NARROW):  # the first layer is written out and has no SDPA
        expected = model(x)
    with caplog.at_level(logging.WARNING, logger="stof_compile"):
        assert_same(fast(x), expected)
    seen = explain(fast)
    assert len(seen.graphs) == 2
    assert seen.unmatched == ("pooler", "thrid")
    assert "mask paths that match no site: pooler, thrid" in str(seen)
    assert [r.getMessage() for r in caplog.records if "'thrid'" in r.getMessage()]
    assert sum("names no module" in r.getMessage() for r in caplog.records) == 1


@torch.no_grad()
def test_paths_in_a_submodule_compiled_alone_are_an_error():
    model, inputs = hf_bert("sdpa", False)
    options = {**NO_TIMING, "mask": {"encoder.layer.0": WINDOW}}
    model.encoder.layer[0].compile(backend="stof", options=options)
    with pytest.raises(StofMaskError, match=r"encoder\.layer\.0"):
        model(**inputs)


@torch.no_grad()
def test_one_mask_in_a_submodule_compiled_alone():
    model, inputs = hf_bert("sdpa", False)
    with masked(None, WINDOW):
        expected = model(**inputs)
    model.encoder.layer[1].compile(backend="stof", options={**NO_TIMING, "mask": WINDOW})
    assert_same(model(**inputs), expected)
    (site,) = explain(model).sites
    assert site.status == "rewritten"


# -- cross-attention -------------------------------------------------------------------------------


@torch.no_grad()
def test_cross_attention_is_untouched_unless_named():
    model, inputs = hf_t5("sdpa", True)
    mask = masks.longformer(4, 2)  # leaves no row without a key beside the padding
    with masked(mask, mask, mask, None, mask, None):
        expected = model(**inputs)
    assert_same(compile_with(model, mask)(**inputs), expected)
    torch._dynamo.reset()
    cross = masks.prefix_lm(20) | masks.sliding_window(3)
    named = compile_with(model, {"decoder.block.1.layer.1": cross})
    found = named(**inputs)
    seen = {s.name: s.mask for s in explain(named).sites}
    assert "prefix" in seen["decoder.block.1.layer.1.EncDecAttention"]
    assert "prefix" not in seen["decoder.block.0.layer.1.EncDecAttention"]
    q, k = torch.arange(24)[:, None], torch.arange(32)  # both count from 0
    keep = (k < 20) | (k <= q) | ((q - k).abs() <= 3)
    with masked(None, None, None, None, None, masks.from_tensor(keep)):
        expected = model(**inputs)
    assert_same(found, expected)


@torch.no_grad()
def test_cross_attention_of_a_transformer_decoder():
    model, inputs = nn_decoder()
    with masked(WINDOW, None):
        expected = model(**inputs)
    assert_same(compile_with(model, WINDOW)(**inputs), expected)


# -- the position of the queries -------------------------------------------------------------------


@torch.no_grad()
def test_queries_behind_a_growing_cache_count_from_its_length():
    mask = masks.sliding_window(3, causal=True) | masks.global_tokens(1)
    model, inputs = hf_llama_decode("sdpa", static=False)
    with masked(mask):
        expected = model(**inputs)
    model, inputs = hf_llama_decode("sdpa", static=False)
    fast = compile_with(model, mask)
    assert_same(fast(**inputs).last_hidden_state, expected.last_hidden_state)


@torch.no_grad()
def test_queries_in_a_preallocated_cache_count_from_the_cache_position():
    mask = masks.sliding_window(3, causal=True)
    model, inputs = hf_llama_decode("sdpa", static=False)
    with masked(mask):
        expected = model(**inputs).last_hidden_state
    model, inputs = hf_llama_decode("sdpa", static=True)
    fast = compile_with(model, mask, strict=False)
    assert_same(fast(**inputs).last_hidden_state, expected)
    assert set(statuses(fast).values()) == {"masked"}
    # the next token: the position is data, nothing compiles again
    with torch._dynamo.config.patch(error_on_recompile=True):
        fast(**inputs)


class Cached(nn.Module):
    """Self-attention over a preallocated cache whose unwritten rest nobody masks.

    Args:
        where: begin of the new keys, or a mask [32] of the places they go to.
    """

    def __init__(self, where):
        super().__init__()
        self.where, self.query, self.key = where, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, cache):
        q, k = self.query(x), self.key(x)
        if isinstance(self.where, int):
            cache[:, :, self.where : self.where + x.shape[2]] = k
        else:
            cache[:, :, self.where] = k
        return F.scaled_dot_product_attention(q, cache, cache)


@pytest.mark.parametrize("attention", ["gather", "off"])
@pytest.mark.parametrize("start", [0, 5])
@torch.no_grad()
def test_keys_past_the_position_are_masked(start, attention):
    torch.manual_seed(0)
    model, mask = Cached(start).eval(), masks.sliding_window(4)
    x, cache = torch.randn(1, 2, 6, 16), torch.randn(1, 2, 32, 16)
    written = cache.clone()
    written[:, :, start : start + 6] = model.key(x)
    positions, keys = torch.arange(start, start + 6)[:, None], torch.arange(32)
    keep = ((positions - keys).abs() <= 4) & (keys < start + 6)
    expected = F.scaled_dot_product_attention(model.query(x), written, written, attn_mask=keep)
    assert_same(compile_with(model, mask, attention=attention)(x, cache), expected)
    assert torch.equal(cache, written)


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_a_position_that_cannot_be_told_is_an_error(strict):
    places = torch.arange(32) % 5 == 1
    x, cache = torch.randn(1, 2, 7, 16), torch.randn(1, 2, 32, 16)
    x = x[:, :, : int(places.sum())]
    with pytest.raises(StofMaskError, match="position of the queries"):
        compile_with(Cached(places), WINDOW, strict=strict)(x, cache)


@torch.no_grad()
def test_fewer_queries_than_keys_end_with_the_keys():
    class Attend(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x[:, :, 20:], x, x)

    x = torch.randn(1, 2, 32, 16)
    keep = torch.rand(12, 32, generator=torch.Generator().manual_seed(1)) > 0.4
    for mask in (masks.sliding_window(3, causal=True), masks.from_tensor(keep)):
        for attention in ("gather", "off"):
            torch._dynamo.reset()
            with masked(mask):
                expected = Attend()(x)
            assert_same(compile_with(Attend(), mask, attention=attention)(x), expected)


# -- attention that is not rewritten ---------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_attention_off_keeps_sdpa_with_the_mask(padded):
    model, inputs = hf_gpt2("sdpa", padded, layers=1)
    fast = compile_with(model, WINDOW, attention="off")
    with masked(WINDOW):
        expected = model(**inputs)
    assert_same(fast(**inputs), expected)
    assert set(statuses(fast).values()) == {"masked"}


@torch.no_grad()
def test_a_softmax_that_stays_gets_the_mask():
    model, inputs = hand_written("scale_both")
    expected = compile_with(model, WINDOW)(**inputs)
    torch._dynamo.reset()
    assert_same(compile_with(model, WINDOW, attention="off")(**inputs), expected)


def eager_escape(model, x, keep):
    """The hand-written layer whose weights are used twice, with a mask."""
    for layer in model.layers:
        q = layer._split(layer.query(x), 4)
        k, v = (layer._split(f(x), 4) for f in (layer.key, layer.value))
        scores = (q @ k.mT / layer.head_dim**0.5).masked_fill(~keep, -torch.inf)
        weights = torch.softmax(scores, -1)
        y = weights @ v + weights.mean()
        x = x + layer.out(y.transpose(1, 2).reshape(x.shape))
    return x


@torch.no_grad()
def test_a_near_miss_gets_the_mask():
    model, inputs = hand_written("weights_escape")
    fast = compile_with(model, WINDOW, strict=False)
    i = torch.arange(LENGTH)
    expected = eager_escape(model, inputs["x"], (i[:, None] - i).abs() <= 4)
    assert_same(fast(**inputs), expected)
    assert len(explain(fast).near_misses) == 2


@torch.no_grad()
def test_a_near_miss_gets_its_mask_by_path():
    model, inputs = hand_written("weights_escape")
    fast = compile_with(model, {"layers.0": WINDOW}, strict=False)
    assert not torch.allclose(fast(**inputs), model(**inputs))
    assert explain(fast).unmatched == ()


@torch.no_grad()
def test_attention_weights_that_are_returned_are_masked_too():
    model, inputs = nn_mha(True, True)
    fast = compile_with(model, masks.longformer(4, 2), strict=False)  # leaves no row without a key
    i = torch.arange(LENGTH)
    blocked = ((i[:, None] - i).abs() > 4) & (i >= 2) & (i[:, None] >= 2)
    x = inputs["x"]
    for block in model.blocks:
        x = block(x, inputs["padding"], blocked)
    assert_same(fast(**inputs), x)


@torch.no_grad()
def test_where_the_mask_has_no_place_it_is_an_error():
    model, inputs = nn_mha(False, False, add_bias_kv=True)
    for strict in (False, True):
        torch._dynamo.reset()
        with pytest.raises(StofMaskError, match=r"multi_head_attention"):
            compile_with(model, WINDOW, strict=strict)(**inputs)


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_a_pass_that_raises_never_loses_the_mask(monkeypatch, strict):
    def fail(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("stof_compile.improve.match_attention", fail)
    model, inputs = hf_bert("sdpa", False, layers=1)
    with pytest.raises(StofMaskError, match="broken on purpose"):
        compile_with(model, WINDOW, strict=strict)(**inputs)


@torch.no_grad()
def test_a_mask_the_model_gets_as_input_is_joined():
    model, inputs = hf_bert("sdpa", False, layers=1)
    i = torch.arange(LENGTH)
    given = ((i[:, None] - i) % 3 != 1).expand(BATCH, 1, LENGTH, LENGTH)
    inputs["attention_mask"] = given & (padding_mask()[:, None, None] == 1)
    fast = compile_with(model, WINDOW, strict=False)
    with masked(WINDOW):
        expected = model(**inputs)
    assert_same(fast(**inputs), expected)
    assert set(statuses(fast).values()) == {"masked"}
