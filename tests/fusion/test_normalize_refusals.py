"""What normalisation leaves as it was written: other formulas, writes on the way, gradients."""

import pytest
import torch
import torch.nn.functional as F
from normalized_calls import WIDTH, Normalized, llama, rows, weight
from torch import nn


def shared_variance(x, w):
    variance = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + 1e-6) * w + variance


def half_computation(x, w):
    x = x.half()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


def other_dimension(x, w):
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w


def two_dimensions(x, w):
    return x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-6) * w


def cube(x, w):
    return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6) * w


def other_factor(x, w):
    return x.roll(1, -1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def narrowed(x, w):
    x = x.double()
    wide = x.float()
    return x * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * w


STAYS = [
    shared_variance,
    half_computation,
    other_dimension,
    two_dimensions,
    cube,
    other_factor,
    narrowed,
]


@pytest.mark.parametrize("fn", STAYS, ids=lambda f: f.__name__)
def test_what_stays(fn, fresh_dynamo):
    x, w = rows(), weight()
    found = Normalized(fn, x, w)
    assert found.counts == [0, 0, 0]
    assert torch.equal(found.result, fn(x, w))


def test_a_write_on_the_way(fresh_dynamo):
    def run(x, w):
        squares = x.pow(2).mean(-1, keepdim=True)
        x[:, :1] = 0.0
        return x * torch.rsqrt(squares + 1e-6) * w

    found = Normalized(run, rows(), weight())
    assert found.counts == [0, 0, 0]
    assert torch.equal(found.result, run(rows(), weight()))

    def gate(x):
        opened = torch.sigmoid(x)
        x.add_(1.0)
        return x * opened

    found = Normalized(gate, rows())
    assert found.counts == [0, 0, 0]
    assert torch.equal(found.result, gate(rows()))


def test_a_write_behind_a_cast(fresh_dynamo):
    """The wide copy keeps the old values."""

    def run(x, w):
        wide = x.float()
        x.zero_()
        out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (out * w).to(x.dtype)

    x, w = rows(torch.bfloat16), weight(torch.bfloat16)
    found = Normalized(run, x.clone(), w)
    assert torch.equal(found.result, run(x.clone(), w))


def test_gradients(fresh_dynamo):
    x = rows().requires_grad_()
    found = Normalized(lambda x, w: F.relu(llama(x, w)) * torch.sigmoid(x), x, weight())
    assert found.counts == [0, 0, 0]
    w = nn.Parameter(weight())
    assert Normalized(lambda x: llama(x, w) + x * x.sigmoid(), rows()).counts == [0, 0, 0]


def test_autocast_decides_the_dtype(fresh_dynamo):
    def run(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, torch.eye(WIDTH))
            return llama(y, w) * 2 + y * torch.sigmoid(y)

    x, w = rows(), weight()
    found = Normalized(run, x, w)
    assert found.result.dtype == run(x, w).dtype
    torch.testing.assert_close(found.result, run(x, w), rtol=1e-2, atol=1e-2)
    found.assert_values_are_true()
