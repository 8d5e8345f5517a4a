"""Symbolic lengths: right results at every length, and a rule keeps its sparsity.

Models have one layer: tracing symbolic sizes takes long, and a second layer is traced alike.
"""

import pytest
import torch
from models import BATCH, hand_written, hf_bert, hf_gpt2, hf_llama, hf_mistral, token_ids
from running import NO_TIMING, assert_same, masked, without_inductor
from torch import nn
from torch.nn import functional as F

from stof_compile import explain, masks, sparse_attention
from stof_compile.attention import functional
from stof_compile.errors import StofMaskError

LENGTHS = (32, 17, 48, 9, 64)
WINDOW = masks.sliding_window(4)
OPTIONS = {"tune_budget_s": 0, "attention": "gather"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


def graphs(fast):
    """Graphs compiled, and the statuses of the sites of the last one."""
    seen = explain(fast)
    return len(seen.graphs), {site.status for site in seen.graphs[-1].sites}


@torch.no_grad()
def test_bert_over_five_lengths_compiles_twice():
    model, _ = hf_bert("sdpa", False, layers=1)
    fast = torch.compile(model, backend="stof", options={**NO_TIMING, "mask": WINDOW})
    for length in LENGTHS:
        ids = token_ids(length)
        with masked(WINDOW):
            expected = model(ids)
        assert_same(fast(ids), expected)
    assert graphs(fast) == (2, {"rewritten"})


@torch.no_grad()
def test_bert_with_padding_and_without_a_mask():
    model, _ = hf_bert("sdpa", False, layers=1)
    fast = torch.compile(model, backend="stof", options=NO_TIMING, dynamic=True)
    for length in LENGTHS:
        ids, keep = token_ids(length), torch.ones(BATCH, length, dtype=torch.int64)
        keep[1, length // 2 :] = 0
        assert_same(fast(ids, attention_mask=keep), model(ids, attention_mask=keep))
    assert graphs(fast) == (1, {"kept"})  # no mask to gain from: strict has nothing to say


@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_the_fast_path_of_an_encoder_layer(norm_first):
    """The eps of its norms is an input of the graph."""
    layer = nn.TransformerEncoderLayer(40, 4, 72, batch_first=True, norm_first=norm_first).eval()
    fast = torch.compile(layer, backend="stof", options={**NO_TIMING, "mask": WINDOW}, dynamic=True)
    for length in LENGTHS:
        x, place = torch.randn(BATCH, length, 40), torch.arange(length)
        outside = (place[:, None] - place).abs() > 4
        assert_same(fast(x), layer(x, src_mask=outside))
    assert graphs(fast) == (1, {"rewritten"})


@pytest.mark.parametrize("mask", [None, masks.longformer(3, 2)], ids=repr)
@pytest.mark.parametrize("build", [hf_gpt2, hf_llama, hf_mistral], ids=lambda b: b.__name__)
@torch.no_grad()
def test_a_model_that_computes_its_own_mask(build, mask):
    model, _ = build("sdpa", False, layers=1)
    fast = torch.compile(model, backend="stof", options={**NO_TIMING, "mask": mask}, dynamic=True)
    for length in LENGTHS:
        ids = token_ids(length)
        with masked(mask):
            expected = model(ids)
        assert_same(fast(ids), expected)
    assert graphs(fast) == (1, {"rewritten"})


@torch.no_grad()
def test_the_models_own_mask_and_padding():
    model, _ = hf_gpt2("sdpa", False, layers=1)
    fast = torch.compile(model, backend="stof", options=NO_TIMING, dynamic=True)
    for length in LENGTHS:
        ids, keep = token_ids(length), torch.ones(BATCH, length, dtype=torch.int64)
        keep[1, length // 2 :] = 0
        assert_same(fast(ids, attention_mask=keep), model(ids, attention_mask=keep))
    assert graphs(fast) == (1, {"rewritten"})


@torch.no_grad()
def test_the_models_own_mask_at_other_batch_sizes():
    model, _ = hf_gpt2("sdpa", False, layers=1)
    fast = torch.compile(model, backend="stof", options=NO_TIMING, dynamic=True)
    for batch in (2, 3, 5):
        for length in LENGTHS[:3]:
            ids = torch.randint(2, 90, (batch, length))
            assert_same(fast(ids), model(ids))
    assert graphs(fast) == (1, {"rewritten"})


@torch.no_grad()
def test_a_mask_made_from_a_buffer():
    model, _ = hand_written("masked_fill_buffer")
    fast = torch.compile(model, backend="stof", options=NO_TIMING, dynamic=True)
    for length in LENGTHS:
        x = torch.randn(BATCH, length, 64)
        assert_same(fast(x), model(x))
    assert graphs(fast)[1] == {"rewritten"}


@torch.no_grad()
def test_a_finite_mask_value_stays_with_pytorch():
    model, _ = hand_written("where_einsum")
    fast = torch.compile(model, backend="stof", options=OPTIONS, dynamic=True)
    for length in LENGTHS:
        x = torch.randn(BATCH, length, 64)
        assert_same(fast(x), model(x))
    assert graphs(fast) == (1, {"kept"})


@torch.no_grad()
def test_only_the_batch_is_dynamic():
    model, _ = hf_bert("sdpa", False, layers=1)
    mask = WINDOW & masks.rule(lambda b, h, q, k: (k + b) % 5 != 0)
    for option in (WINDOW, mask):
        torch._dynamo.reset()
        fast = torch.compile(model, backend="stof", options={**NO_TIMING, "mask": option})
        for batch in (2, 3, 4, 7):
            ids = torch.randint(2, 90, (batch, 24))
            torch._dynamo.maybe_mark_dynamic(ids, 0)
            with masked(option):
                expected = model(ids)
            assert_same(fast(ids), expected)
        assert graphs(fast) == (1, {"rewritten"})


@torch.no_grad()
def test_a_marked_length():
    model, _ = hf_bert("sdpa", False, layers=1)
    fast = torch.compile(model, backend="stof", options={**NO_TIMING, "mask": WINDOW})
    for length in LENGTHS:
        ids = token_ids(length)
        torch._dynamo.mark_dynamic(ids, 1, min=2, max=64)
        with masked(WINDOW):
            expected = model(ids)
        assert_same(fast(ids), expected)
    assert graphs(fast) == (1, {"rewritten"})


@torch.no_grad()
def test_a_tensor_at_another_length_is_an_error():
    model, _ = hf_bert("sdpa", False, layers=1)
    keep = torch.ones(32, 32, dtype=torch.bool).tril()
    fast = torch.compile(model, backend="stof", options={**NO_TIMING, "mask": keep})
    with masked(masks.causal()):
        expected = model(token_ids(32))
    assert_same(fast(token_ids(32)), expected)
    with pytest.raises(StofMaskError, match=r"\[32, 32\].*\[17, 17\].*rule"):
        fast(token_ids(17))


@torch.no_grad()
def test_prefill_and_decode():
    from transformers import DynamicCache

    model, _ = hf_llama("sdpa", False, layers=1)
    mask = masks.sliding_window(5, causal=True) | masks.global_tokens(2)
    fast = torch.compile(model, backend="stof", options={**OPTIONS, "mask": mask})
    ids = token_ids(22)

    def generate(forward):
        cache = DynamicCache(config=model.config)
        steps = [(0, 12), *((i, i + 1) for i in range(12, 20)), (20, 22)]
        return [
            forward(ids[:, a:b], past_key_values=cache, use_cache=True).last_hidden_state
            for a, b in steps
        ]

    with masked(mask):
        expected = generate(model)
    assert_same(generate(fast), expected)
    assert len(explain(fast).graphs) <= 4


@torch.no_grad()
def test_decoding_into_a_preallocated_cache():
    from transformers import StaticCache

    model, _ = hf_llama("sdpa", False, layers=1)
    mask = masks.sliding_window(5, causal=True)
    fast = torch.compile(model, backend="stof", options={**OPTIONS, "mask": mask})
    ids = token_ids(18)

    def generate(forward, static):
        from transformers import DynamicCache

        config = model.config
        cache = (
            StaticCache(config=config, max_cache_len=64) if static else DynamicCache(config=config)
        )
        steps = [(0, 12), *((i, i + 1) for i in range(12, 18))]
        return [
            forward(ids[:, a:b].clone(), past_key_values=cache, use_cache=True).last_hidden_state
            for a, b in steps
        ]

    with masked(mask):
        expected = generate(model, False)
    assert_same(generate(fast, True), expected)


class Nested(nn.Module):
    """The user's own sparse_attention inside a model."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.out = mask, nn.Linear(16, 16)

    def forward(self, x):
        return self.out(sparse_attention(x, x, x, mask=self.mask))


@pytest.mark.parametrize("option", [None, masks.longformer(6, 1)], ids=repr)
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_sparse_attention_in_the_model(dynamic, option):
    documents = torch.arange(64) // 7
    rules = (
        WINDOW,
        masks.rule(lambda b, h, q, k: (q >= k) & (q - k < 6)),
        masks.document(documents),
    )
    for mask in rules:
        torch._dynamo.reset()
        model = Nested(mask)
        options = {"tune_budget_s": 0, "attention": "gather", "mask": option}
        fast = torch.compile(model, backend="stof", options=options, dynamic=dynamic)
        for length in (24, 40):
            x = torch.randn(2, 3, length, 16)
            joined = mask if option is None else mask & option
            keep = masks.build_block_mask(joined, length, length, 16).to_dense()
            expected = model.out(F.scaled_dot_product_attention(x, x, x, attn_mask=keep))
            assert_same(fast(x), expected)
        # documents are an attribute of the user's object: their contents may change between calls
        known = not dynamic and mask.rule != "document"
        status = explain(fast).graphs[0].sites[0].status
        assert status == ("rewritten" if known else "kept" if option is None else "masked")


@pytest.mark.parametrize("used", [False, True])
def test_a_log_sum_exp_kept_for_gradients_does_not_keep_the_call(used, monkeypatch, fresh_dynamo):
    """As sparse_attention traces where gradients are wanted on a GPU."""

    def attend(x):
        found = sparse_attention(x, x, x, WINDOW, return_lse=used)
        return found[0] + found[1][..., None] if used else found

    x = torch.randn(2, 3, 24, 16, requires_grad=True)
    expected = torch.autograd.grad(attend(x).square().sum(), x)[0]
    monkeypatch.setattr(functional, "wants_kernel_gradients", lambda *operands: True)
    options = {"tune_budget_s": 0, "attention": "gather"}
    fast = torch.compile(attend, backend="stof", options=options)
    assert_same(torch.autograd.grad(fast(x).square().sum(), x)[0], expected)
    site = explain(fast).graphs[0].sites[0]
    assert site.status == ("kept" if used else "rewritten")
    assert not used or any("its log-sum-exp is used" in note for note in site.notes)


@pytest.mark.parametrize(
    "option", [None, masks.sliding_window(8)], ids=["own mask", "and the option's"]
)
def test_a_mask_made_with_the_batch_size_survives_a_symbolic_batch(option, fresh_dynamo):
    """The second batch makes the batch a symbol and the mask a function of it."""

    def attend(q, k, v):
        keep = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    options = {"tune_budget_s": 0, "attention": "gather", "mask": option}
    fast = torch.compile(attend, backend="stof", options=options)
    for batch in (2, 3):
        q, k, v = (torch.randn(batch, 2, 32, 16) for _ in range(3))
        keep = torch.ones(32, 32, dtype=torch.bool).tril()
        if option is not None:
            rows = torch.arange(32)
            keep = keep & ((rows[:, None] - rows).abs() <= 8)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        torch.testing.assert_close(fast(q, k, v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 24])
def test_a_constant_mask_fixes_the_lengths_it_spells_out(columns):
    """Sizes that are symbols of Dynamo and numbers by its guards, and a mask that is broadcast."""

    def call(q, k, v):
        keep = torch.arange(24)[:, None] >= torch.arange(columns)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    fast = torch.compile(call, backend="stof", dynamic=True, options=NO_TIMING)
    for batch in (2, 3):
        operands = torch.randn(3, batch, 2, 24, 16).unbind()
        torch.testing.assert_close(fast(*operands), call(*operands), atol=1e-5, rtol=1e-5)
    assert not explain(fast).fallbacks
