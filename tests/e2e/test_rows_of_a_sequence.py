"""The option's mask on queries that are some of the sequence's rows: at the place of these rows."""

import pytest
import torch
import torch.nn.functional as F
from running import NO_TIMING, assert_same, without_inductor
from torch import nn

from stof_compile import StofMaskError, explain, masks

KEYS = 24


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


TAKEN = {
    "[:, :1]": (lambda x: x[:, :1], [0]),
    "[:, 6:12]": (lambda x: x[:, 6:12], range(6, 12)),
    "[:, -5:]": (lambda x: x[:, -5:], range(19, 24)),
    "[:, -8:-4]": (lambda x: x[:, -8:-4], range(16, 20)),
    "[..., 2:5, :]": (lambda x: x[..., 2:5, :], range(2, 5)),
    "[:, 3]": (lambda x: x[:, 3].unsqueeze(1), [3]),
    "[:, -1, None]": (lambda x: x[:, -1, None], [23]),
    "narrow": (lambda x: x.narrow(1, 3, 4), range(3, 7)),
    "chunk": (lambda x: x.chunk(3, 1)[1], range(8, 16)),
    "split": (lambda x: x.split(6, dim=1)[2], range(12, 18)),
    "unbind": (lambda x: x.unbind(1)[4].unsqueeze(1), [4]),
    "select": (lambda x: x.select(1, -1).unsqueeze(1), [23]),
}
SCATTERED = {
    "every third": lambda x: x[:, ::3],
    "two": lambda x: x[:, torch.tensor([3, 7])],
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 7])),
    "two parts": lambda x: torch.cat([x[:, :2], x[:, 8:10]], 1)[:, :4],
}


class Layer(nn.Module):
    def __init__(self, take, behind):
        super().__init__()
        self.take, self.behind = take, behind
        self.norm, self.q, self.kv = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, x, keep=None):
        x = self.norm(x)
        q = self.take(self.q(x)) if self.behind else self.q(self.take(x))
        q = q.view(1, q.shape[1], 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(1, -1, 2, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def compiled(take, behind, dynamic=False):
    model = Layer(take, behind).eval()
    options = {**NO_TIMING, "mask": masks.sliding_window(3), "strict": not dynamic}
    return model, torch.compile(model, backend="stof", options=options, dynamic=dynamic)


def assert_at(model, fast, rows):
    x = torch.randn(1, KEYS, 32)
    keep = (torch.tensor(list(rows))[:, None] - torch.arange(KEYS)).abs() <= 3
    assert_same(fast(x), model(x, keep))


@pytest.mark.parametrize("behind", [False, True], ids=["projected", "of the projection"])
@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_rows(name, behind):
    take, rows = TAKEN[name]
    model, fast = compiled(take, behind)
    assert_at(model, fast, rows)
    assert explain(fast).sites[0].status == "rewritten"


@pytest.mark.parametrize("name", ["[:, :1]", "[:, 6:12]", "[:, -5:]", "narrow", "[:, -1, None]"])
@torch.no_grad()
def test_rows_of_symbolic_lengths(name):
    take, rows = TAKEN[name]
    assert_at(*compiled(take, False, True), rows)


@pytest.mark.parametrize("name", SCATTERED)
@torch.no_grad()
def test_rows_that_do_not_follow_each_other_are_refused(name):
    _, fast = compiled(SCATTERED[name], False)
    with pytest.raises(StofMaskError, match="it is not known which rows they are"):
        fast(torch.randn(1, KEYS, 32))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("number", range(3))
@torch.no_grad()
def test_a_part_of_a_concatenation(number, dynamic):
    """As a class token before the others, or latent rows behind them."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.kv = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 64)

        def forward(self, *parts, keep=None):
            parts = [self.norm(part) for part in parts]
            q = self.q(parts[number])
            q = q.view(1, q.shape[1], 4, 8).transpose(1, 2)
            k, v = self.kv(torch.cat(parts, 1)).view(1, -1, 2, 4, 8).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    model, sizes = Layer().eval(), (3, 16, 5)
    parts = [torch.randn(1, size, 32) for size in sizes]
    start = sum(sizes[:number])
    rows = torch.arange(start, start + sizes[number])
    options = {**NO_TIMING, "mask": masks.sliding_window(3), "strict": not dynamic}
    fast = torch.compile(model, backend="stof", options=options, dynamic=dynamic)
    if dynamic and number == 1:  # behind a part whose length is a symbol
        with pytest.raises(StofMaskError, match="it is not known which rows they are"):
            fast(*parts)
        return
    keep = (rows[:, None] - torch.arange(KEYS)).abs() <= 3
    assert_same(fast(*parts), model(*parts, keep=keep))


PROJECTED = {  # q, k and v of [B, rows, 3, heads, dims]
    "permute": lambda t: t.permute(2, 0, 3, 1, 4),
    "unbind": lambda t: tuple(part.transpose(1, 2) for part in t.unbind(2)),
    "index": lambda t: tuple(t[:, :, i].transpose(1, 2) for i in range(3)),
    "chunk": lambda t: tuple(part.squeeze(2).transpose(1, 2) for part in t.chunk(3, 2)),
}


@pytest.mark.parametrize("keys", [3, 4, 8])
@pytest.mark.parametrize("name", PROJECTED)
@torch.no_grad()
def test_as_many_keys_as_parts_of_a_projection_are_an_accident(name, keys):
    """Or as heads, or dims: the query is the last one behind a cache of ``keys - 1`` rows."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(32, 96)

        def forward(self, x, past_k, past_v, keep=None):
            q, k, v = PROJECTED[name](self.project(x).view(1, x.shape[1], 3, 4, 8))
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    model, options = Layer().eval(), {**NO_TIMING, "mask": masks.sliding_window(1, causal=True)}
    fast = torch.compile(model, backend="stof", options=options)
    x, past = torch.randn(1, 1, 32), torch.randn(2, 1, 4, keys - 1, 8)
    keep = torch.arange(keys)[None] == keys - 1
    assert_same(fast(x, *past), model(x, *past, keep=keep))


@torch.no_grad()
def test_rows_and_rotary_tables_of_as_many_dims_as_keys():
    """The halves of ``rotate_half`` are put together to as many columns as there are keys."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x, keep=None):
            q, k, v = (f(x).view(1, 16, 2, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
            angle = torch.arange(16)[:, None] * torch.logspace(0, -2, 8).repeat(2)
            q, k = (
                t * angle.cos() + torch.cat([-t[..., 8:], t[..., :8]], -1) * angle.sin()
                for t in (q, k)
            )
            return F.scaled_dot_product_attention(q[:, :, 4:6], k, v, attn_mask=keep)

    model, options = Layer().eval(), {**NO_TIMING, "mask": masks.sliding_window(3)}
    fast, x = torch.compile(model, backend="stof", options=options), torch.randn(1, 16, 32)
    keep = (torch.arange(4, 6)[:, None] - torch.arange(16)).abs() <= 3
    assert_same(fast(x), model(x, keep))


@torch.no_grad()
def test_a_second_layer_over_the_rows():
    """Its queries come from the first layer's result, its keys from the whole sequence."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.q, self.kv = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 64)

        def forward(self, x, keep=None, row=None):
            q, k, v = self.first(x).view(1, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
            x = x + attended.transpose(1, 2).flatten(2)
            y = x[:, 2:3]
            for _ in range(2):
                q = self.q(y).view(1, 1, 4, 8).transpose(1, 2)
                k, v = self.kv(x).view(1, -1, 2, 4, 8).permute(2, 0, 3, 1, 4)
                attended = F.scaled_dot_product_attention(q, k, v, attn_mask=row)
                y = y + attended.transpose(1, 2).flatten(2)
            return y

    model, place = Two().eval(), torch.arange(KEYS)
    options = {**NO_TIMING, "mask": masks.sliding_window(3)}
    fast = torch.compile(model, backend="stof", options=options)
    x, keep = torch.randn(1, KEYS, 32), (place[:, None] - place).abs() <= 3
    assert_same(fast(x), model(x, keep, keep[2:3]))
