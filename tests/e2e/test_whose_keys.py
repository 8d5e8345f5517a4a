"""The option's mask goes into attention over a sequence's own keys, however these are kept, and
stays out of attention over those of another."""

import pytest
import torch
import torch.nn.functional as F
from running import NO_TIMING, assert_same, without_inductor
from torch import nn

from stof_compile import explain, masks, sparse_attention


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


class Layer(nn.Module):
    """Attention over x, then by ``sparse_attention`` over y, which has a mask of its own."""

    def __init__(self):
        super().__init__()
        self.own, self.q, self.kv = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, x, y, keep=None):
        q, k, v = self.heads(self.own(x))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = x + attended.transpose(1, 2).flatten(2)
        (q,), (k, v) = self.heads(self.q(x)), self.heads(self.kv(y))
        return x + sparse_attention(q, k, v, masks.causal()).transpose(1, 2).flatten(2)

    @staticmethod
    def heads(t):
        return t.view(1, t.shape[1], -1, 4, 8).permute(2, 0, 3, 1, 4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("keys", [24, 30])
@torch.no_grad()
def test_cross_attention_by_sparse_attention(keys, dynamic):
    model, place = Layer().eval(), torch.arange(24)
    x, y = torch.randn(1, 24, 32), torch.randn(1, keys, 32)
    options = {**NO_TIMING, "mask": masks.sliding_window(3)}
    fast = torch.compile(model, backend="stof", options=options, dynamic=dynamic)
    assert_same(fast(x, y), model(x, y, (place[:, None] - place).abs() <= 3))
    assert "window" not in str(explain(fast).sites[1].mask)


class Cached(nn.Module):
    """Keys and values that are kept in buffers of the model."""

    def __init__(self, write):
        super().__init__()
        self.write, self.project = write, nn.Linear(32, 96)
        self.register_buffer("k", torch.zeros(1, 4, 40, 8))
        self.register_buffer("v", torch.zeros(1, 4, 40, 8))

    def forward(self, x, place, keep=None):
        q, k, v = self.project(x).view(1, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        if self.write == "index":
            self.k[:, :, place] = k
            self.v[:, :, place] = v
        else:
            self.k.index_copy_(2, place, k)
            self.v.index_copy_(2, place, v)
        there = torch.arange(40) <= place[:, None]
        there = there if keep is None else there & keep
        return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=there)


@pytest.mark.parametrize("write", ["index", "index_copy_"])
@torch.no_grad()
def test_a_cache_in_the_models_buffers(write):
    model, place, columns = Cached(write).eval(), torch.arange(20), torch.arange(40)
    x = torch.randn(1, 20, 32)
    options = {**NO_TIMING, "mask": masks.sliding_window(6, causal=True), "strict": False}
    found = torch.compile(model, backend="stof", options=options)(x, place)
    far = place[:, None] - columns >= 6  # no key behind a query is there
    reference = Cached(write).eval()
    reference.load_state_dict(model.state_dict())
    assert_same(found, reference(x, place, ~far))
