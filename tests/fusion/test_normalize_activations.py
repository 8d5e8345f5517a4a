"""Spelled-out GELU and SiLU become one node each, and only where that is the same."""

import math

import pytest
import torch
from normalized_calls import Normalized, new_gelu, rows


def quick(x):
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def multiplied_out(x):
    return x * (0.5 * (torch.tanh(0.79788456 * x + 0.035677408 * x**3) + 1))


def python_gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def halved(x):
    return (x / 2) * (1 + torch.erf(x * 0.70710678))


ACTIVATIONS = {
    "new": (new_gelu, (0, 1, 0)),
    "fast": (fast_gelu, (0, 1, 0)),
    "multiplied-out": (multiplied_out, (0, 1, 0)),
    "python": (python_gelu, (0, 1, 0)),
    "halved": (halved, (0, 1, 0)),
    "silu": (lambda x: x * torch.sigmoid(x), (0, 0, 1)),
    "silu-method": (lambda x: x.sigmoid() * x, (0, 0, 1)),
    "silu-quotient": (lambda x: x / (1 + torch.exp(-x)), (0, 0, 1)),
    "of-a-product": (lambda x: new_gelu(x * x.roll(1, -1)), (0, 1, 0)),
    "of-a-sum": (lambda x: new_gelu(x + x.roll(1, -1)), (0, 1, 0)),
    "quick": (quick, (0, 0, 0)),
    "other-constant": (lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * x**3))), (0, 0, 0)),
    "without-half": (lambda x: x * (1 + torch.erf(x / math.sqrt(2.0))), (0, 0, 0)),
    "of-two": (lambda x: 0.5 * x.roll(1, -1) * (1 + torch.erf(x * 0.70710678)), (0, 0, 0)),
    "gated": (lambda x: x.roll(1, -1) * torch.sigmoid(x), (0, 0, 0)),
    "read-elsewhere": (lambda x: torch.cat((x * (s := torch.sigmoid(x)), s)), (0, 0, 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype, fresh_dynamo):
    activation, counts = ACTIVATIONS[name]
    x = rows(dtype) * 3
    found = Normalized(activation, x)
    assert tuple(found.counts) == counts and found.again == [0, 0, 0]
    wanted, usual = activation(x.double()), activation(x)
    error, usual = ((t.double() - wanted).abs().max() for t in (found.result, usual))
    assert error <= 1.01 * usual + 1e-6
    found.assert_values_are_true()
