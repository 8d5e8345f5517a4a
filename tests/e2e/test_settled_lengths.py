"""Queries and keys that come into a graph: their lengths decide, at every length of a call."""

import pytest
import torch
from running import NO_TIMING, assert_same, without_inductor
from torch import nn
from torch.nn import functional as F

from stof_compile import explain, masks
from stof_compile.errors import StofMaskError

WINDOW = masks.sliding_window(3)
LENGTHS = (64, 48, 80, 64, 9)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def by_hand(q, k, v):
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


def attend_in_window(q, k, v, first=0):
    """Under WINDOW; the first query stands at a position."""
    rows, columns = first + torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(rows - columns).abs() <= 3)


def operands(*lengths, batch=1):
    return [torch.randn(batch, 2, length, 8) for length in lengths]


def compile_with(model, mask=WINDOW, dynamic=None, **options):
    options = {**NO_TIMING, "mask": mask, **options}
    return torch.compile(model, backend="stof", options=options, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("call", [attend, by_hand])
@torch.no_grad()
def test_queries_and_keys_that_are_inputs(call, dynamic):
    fast = compile_with(call, dynamic=dynamic)
    for length in LENGTHS:
        q, k, v = operands(length, length, length)
        assert_same(fast(q, k, v), attend_in_window(q, k, v))
    seen = explain(fast)
    assert len(seen.graphs) == (1 if dynamic else 2)
    assert {site.status for site in seen.sites} == {"rewritten"}


@torch.no_grad()
def test_batches_and_lengths_that_are_inputs():
    fast = compile_with(attend)
    for batch, length in ((2, 32), (3, 32), (2, 17), (5, 24)):
        q, k, v = operands(length, length, length, batch=batch)
        assert_same(fast(q, k, v), attend_in_window(q, k, v))
    assert {site.status for site in explain(fast).sites} == {"rewritten"}


class Broken(nn.Module):
    """Self-attention with a graph break between projections and attention, as a print makes it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def project(self, x):
        return (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def forward(self, x):
        q, k, v = self.project(x)
        torch._dynamo.graph_break()
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("dynamic", [None, True])
@torch.no_grad()
def test_a_graph_break_behind_the_projections(dynamic):
    model = Broken()
    fast = compile_with(model, dynamic=dynamic)
    for length in LENGTHS:
        x = torch.randn(1, length, 16)
        assert_same(fast(x), attend_in_window(*model.project(x)))


@pytest.mark.parametrize("dynamic", [None, True])
@torch.no_grad()
def test_other_keys_are_another_graph_and_said(dynamic):
    fast = compile_with(attend, dynamic=dynamic, strict=False)
    for q_len, k_len in ((24, 24), (24, 40), (32, 32), (17, 40), (40, 40), (40, 24)):
        q, k, v = operands(q_len, k_len, k_len)
        expected = attend_in_window(q, k, v) if q_len == k_len else attend(q, k, v)
        assert_same(fast(q, k, v), expected)
    notes = [note for note in explain(fast).notes if "does not show" in note]
    assert notes and "attention" in notes[0]


@torch.no_grad()
def test_other_keys_are_an_error_under_strict():
    fast = compile_with(attend)
    for length in (24, 40):
        q, k, v = operands(length, length, length)
        assert_same(fast(q, k, v), attend_in_window(q, k, v))
    with pytest.raises(StofMaskError, match=r"attention: queries and keys .* different lengths"):
        fast(*operands(24, 40, 40))


@torch.no_grad()
def test_one_of_several_attentions_is_not_lost_in_silence():
    def both(x, q, k, v):
        return attend(x, x, x).sum() + attend(q, k, v)

    with pytest.raises(StofMaskError, match="not put into attention#1: queries and keys"):
        compile_with(both)(*operands(16, 24, 40, 40))


class CrossAttention(nn.Module):
    """Both projections in the graph: another sequence, whatever the lengths."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        k = self.key(y)
        return attend(x, x, x) + attend(self.query(x), k, k)


@torch.no_grad()
def test_cross_attention_of_equal_lengths_keeps_its_own_mask():
    model = CrossAttention()
    fast = compile_with(model, strict=False)
    for length in LENGTHS[:3]:
        x, y = operands(length, length)
        k = model.key(y)
        expected = attend_in_window(x, x, x) + attend(model.query(x), k, k)
        assert_same(fast(x, y), expected)
    assert not any("does not show" in note for note in explain(fast).notes)


@pytest.mark.parametrize("new", [1, 4], ids=["a token", "some tokens"])
@torch.no_grad()
def test_a_growing_cache_behind_a_graph_break(new):
    """The keys of this call are as many as its queries, and stand behind the cached ones."""

    def step(past, q, k, v):
        return attend(q, torch.cat((past, k), -2), torch.cat((past, v), -2))

    fast = compile_with(step)
    for length in (12, 13, 20, 33):
        past, q, k, v = operands(length, new, new, new)
        keys, values = torch.cat((past, k), -2), torch.cat((past, v), -2)
        assert_same(fast(past, q, k, v), attend_in_window(q, keys, values, length))


@torch.no_grad()
def test_a_preallocated_cache_behind_a_graph_break():
    def step(cache, at, q, k):
        cache.index_copy_(2, at, k)
        return attend(q, cache, cache)

    fast = compile_with(step, strict=False)
    for start, new in ((0, 6), (6, 1), (7, 3), (10, 2)):
        (cache, q, k), at = operands(32, new, new), torch.arange(start, start + new)
        written = cache.clone().index_copy_(2, at, k)[:, :, : start + new]
        assert_same(fast(cache, at, q, k), attend_in_window(q, written, written, start))


@torch.no_grad()
def test_without_a_mask_of_the_options_nothing_is_guarded():
    fast = compile_with(attend, mask=None, strict=False)
    for q_len, k_len in ((24, 24), (32, 32), (17, 40), (40, 24)):
        q, k, v = operands(q_len, k_len, k_len)
        assert_same(fast(q, k, v), attend(q, k, v))
    assert len(explain(fast).graphs) == 2
