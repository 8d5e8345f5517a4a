"""Which projections are found: spellings, widths, ranks, shared inputs and shared weights."""

import pytest
import torch
import torch.nn.functional as F
from packed_projections import BIAS, KN, WIDTH, Packing, Three, Weights, found, packed, rows
from torch import nn


def conv1d(x, weight, bias):
    return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.size(1))


SPELLINGS = {
    "conv1d": (
        Weights(
            lambda x, a, b, c, d: F.relu(conv1d(x, a, b)) + conv1d(x, c, d), KN, BIAS, KN, BIAS
        ),
        [(8, 8)],
    ),
    "addmm-transposed": (
        Weights(
            lambda x, a, b, c, d: (
                torch.addmm(b, x[0], a.t()) * torch.addmm(d, x[0], c.t(), beta=1, alpha=1)
            ),
            (8, WIDTH), BIAS, (8, WIDTH), BIAS,
        ),
        [],  # x[0] is taken twice: two nodes, not known to be one value
    ),
    "matmul": (
        Weights(lambda x, a, b: (x @ a).sum() + torch.matmul(x, b), KN, (WIDTH, 6)),
        [(8, 6)],
    ),
    "matmul-transposed": (
        Weights(lambda x, a, b: (x @ a.t()).sum() + x @ b.T, (8, WIDTH), (6, WIDTH)),
        [(8, 6)],
    ),
    "matmul-and-bias": (
        Weights(
            lambda x, a, b, c, d: (x @ a + b).sum() + (d + x @ c), KN, BIAS, (WIDTH, 6), (6,)
        ),
        [(8, 6)],
    ),
    "matmul-mixed-bias": (
        Weights(lambda x, a, b, c: (x @ a + b).sum() + x @ c, KN, BIAS, (WIDTH, 6)),
        [(8, 6)],
    ),
    "linear-of-transposed": (
        Weights(lambda x, a, b: F.linear(x, a.t()).sum() + F.linear(x, b.mT), KN, (WIDTH, 6)),
        [(8, 6)],
    ),
    "keywords": (
        Weights(
            lambda x, a, b: F.linear(input=x, weight=a).sum() + F.linear(x, bias=None, weight=b),
            (8, WIDTH), (6, WIDTH),
        ),
        [(8, 6)],
    ),
    "mixed-spellings": (
        Weights(lambda x, a, b: F.linear(x, a).sum() + x @ b, (8, WIDTH), (WIDTH, 6)),
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, fresh_dynamo):
    model, sizes = SPELLINGS[name]
    assert found(model, rows())[0] == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_grouped_heads_with_mixed_biases(dtype, fresh_dynamo):
    model = Three(sizes=(32, 8, 8), biases=(True, False, True)).to(dtype)
    model.use = lambda q, k, v, x: torch.cat((q, k * v), -1)
    x = rows().to(dtype)
    backend, result = packed(model, x)
    (pack,) = backend.packs
    assert pack.sizes == (32, 8, 8) and pack.biases[1] is None
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), rtol=rtol, atol=rtol)


def test_the_example_of_the_specification(fresh_dynamo):
    layers = nn.ModuleList(nn.Linear(256, n, bias=n == 512) for n in (512, 128, 128))

    def attend(x):
        q, k, v = (layer(x).unflatten(-1, (-1, 64)).transpose(1, 2) for layer in layers)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    x = torch.randn(2, 33, 256)
    backend, result = packed(attend, x)
    assert [(p.sizes, p.role) for p in backend.packs] == [((512, 128, 128), "attention")]
    with torch.no_grad():
        torch.testing.assert_close(result, attend(x), rtol=1e-5, atol=1e-5)


def test_cross_attention(fresh_dynamo):
    model = Three()

    def cross(x, memory):
        q, k, v = model.q(x), model.k(memory), model.v(memory)
        return F.scaled_dot_product_attention(q, k, v)

    assert found(cross, rows(2, 3), rows(2, 7))[0] == [(WIDTH, WIDTH)]


def test_one_input_through_several_views(fresh_dynamo):
    model = Three()

    def views(x):
        q, k = model.q(x.view(-1, WIDTH)), model.k(x.contiguous().reshape(-1, WIDTH))
        return q * k + model.v(x.flatten(0, 1).to(x.dtype))

    assert found(views, rows())[0] == [(WIDTH, WIDTH, WIDTH)]
    other = lambda x: model.q(x.view(-1, WIDTH)).sum() + model.k(x)  # noqa: E731
    assert found(other, rows())[0] == []  # the same value in another shape


def test_a_result_of_a_pack_is_the_input_of_the_next(fresh_dynamo):
    a, b = Three(lambda q, k, v, x: (q, k * v)), Three()

    def run(x):
        q, kv = a(x)
        return b(q) + kv

    assert found(run, rows())[0] == [(WIDTH,) * 3] * 2


def test_tied_weights(fresh_dynamo):
    model = Three(lambda q, k, v, x: (q * k + v) @ model.q.weight)
    assert found(model, rows())[0] == [(WIDTH,) * 3]
    model.k.weight = model.q.weight  # q and k still differ in their biases
    assert found(model, rows())[0] == [(WIDTH,) * 3]
    model.k.bias = model.q.bias
    assert found(model, rows()) == ([], ["two of the layers are the same"])


@pytest.mark.parametrize("lead", [(), (1,), (0,), (3, 2, 2)], ids=str)
def test_ranks(lead, fresh_dynamo):
    model = Three()
    assert found(model, torch.randn(*lead, WIDTH))[0] == [(WIDTH,) * 3]


def test_a_strided_input(fresh_dynamo):
    assert found(Three(), rows().transpose(0, 1))[0] == [(WIDTH,) * 3]


def test_a_symbolic_length(fresh_dynamo):
    model, backend = Three(), Packing()
    fast = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for length in (5, 9, 33):
            x = rows(2, length)
            torch.testing.assert_close(fast(x), model(x))
    assert [p.sizes for p in backend.packs] == [(WIDTH,) * 3]
