"""Copies of transposed tensors in front of products go; every other copy stays."""

import pytest
import torch
import torch.nn.functional as F
from e2e import models
from e2e.running import assert_same
from pass_backend import PassBackend
from torch import nn

from stof_compile.fold_transpose import fold_transposes
from stof_compile.node_ops import operation


def tensor(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Folding(PassBackend):
    """A backend that folds."""

    def __init__(self, inductor=False):
        super().__init__(fold_transposes, inductor)

    @property
    def copies(self):
        return sum(operation(n) in ("contiguous", "clone") for n in self.gm.graph.nodes)


def folded(fn, *args, inductor=False, dynamic=False):
    """Number of folded copies, after checking that the result is that of the plain call."""
    given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    backend = Folding(inductor)
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = fn(*given)
        result = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    return backend.count


A, B = tensor(2, 3, 8, 6), tensor(2, 3, 8, 6, seed=1)  # [B, H, S, D]
W, W2 = nn.Parameter(tensor(10, 6)), nn.Parameter(tensor(6, 10))

FOLDED = {
    "scores": (lambda a, b: a @ b.transpose(-2, -1).contiguous(), (A, B)),
    "scores-mT": (lambda a, b: a @ b.mT.contiguous(), (A, B)),
    "clone": (lambda a, b: torch.matmul(a, b.transpose(2, 3).clone()), (A, B)),
    "clone-format": (
        lambda a, b: a @ b.transpose(2, 3).clone(memory_format=torch.contiguous_format), (A, B)
    ),
    "first-operand": (lambda a, b: a.transpose(-2, -1).contiguous() @ b, (A, B)),
    "bmm": (lambda a, b: torch.bmm(a, b.permute(0, 2, 1).contiguous()), (A[0], B[0])),
    "baddbmm": (
        lambda a, b: torch.baddbmm(b[:, :, :1], a, b.transpose(1, 2).contiguous()), (A[0], B[0])
    ),
    "addmm": (
        lambda a, b: torch.addmm(b.new_zeros(8), a, b.t().contiguous(), beta=2.0),
        (A[0, 0], B[0, 0]),
    ),
    "through-a-view": (
        lambda a, b: torch.bmm(a.flatten(0, 1), b.transpose(2, 3).contiguous().view(6, 6, 8)),
        (A, B),
    ),
    "through-an-unsqueeze": (
        lambda a, b: a @ b.transpose(2, 3).contiguous().unsqueeze(0).flatten(0, 1), (A, B)
    ),
    "all-readers-are-products": (
        lambda a, b: (a @ (t := b.transpose(-2, -1).contiguous())).sum() + (b @ t), (A, B)
    ),
    "weight": (lambda a, b: a @ W.t().contiguous(), (A, B)),
    "weight-of-linear": (lambda a, b: F.linear(a, W2.t().contiguous()), (A, B)),
    "batch-permuted": (  # [S, B, D] tensors read batch first: one stride over the batch
        lambda a, b: a.permute(1, 0, 2).contiguous() @ b.permute(1, 2, 0).contiguous(),
        (tensor(8, 4, 6), tensor(8, 4, 6, seed=1)),
    ),
}  # fmt: skip
COUNTS = {"batch-permuted": 2}


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name, fresh_dynamo):
    fn, args = FOLDED[name]
    assert folded(fn, *args) == COUNTS.get(name, 1)


KEPT = {
    "heads-merged": (  # [B, S, H, D] -> [B, S, H*D]: no single stride
        lambda a, b: F.linear(a.transpose(1, 2).contiguous().view(2, 8, 18), tensor(5, 18)), (A, B)
    ),
    "linear-of-transposed-rows": (  # [B, M, K] with K outer: rows of all batches have no one stride
        lambda a, b: F.linear(a.transpose(1, 2).contiguous(), tensor(5, 8)), (A[0], B[0])
    ),
    "no-unit-stride": (
        lambda a, b: a @ b[..., ::2].transpose(-2, -1).contiguous(),
        (A[..., :3], B),
    ),
    "batch-without-one-stride": (
        lambda a, b: a.permute(1, 0, 2, 3).contiguous() @ b.permute(1, 0, 3, 2).contiguous(), (A, B)
    ),
    "another-reader": (
        lambda a, b: (a @ (t := b.transpose(-2, -1).contiguous())).sum() + t.relu(), (A, B)
    ),
    "returned": (lambda a, b: (a @ (t := b.transpose(-2, -1).contiguous()), t), (A, B)),
    "no-product": (lambda a, b: b.transpose(-2, -1).contiguous() + 1, (A, B)),
    "the-summand": (
        lambda a, b: torch.addmm(a.t().contiguous(), a.t(), a), (A[0, 0, :6], B)
    ),
    "other-format": (
        lambda a, b: a.transpose(-2, -1).contiguous(memory_format=torch.channels_last) @ b, (A, B)
    ),
    "not-transposed": (lambda a, b: a @ b[:, :, :6].contiguous(), (A, B)),
    "clone-of-contiguous": (lambda a, b: a.mT @ b.clone(), (A, B)),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept(name, fresh_dynamo):
    fn, args = KEPT[name]
    assert folded(fn, *args) == 0


def test_a_write_in_between(fresh_dynamo):
    def run(a, b):
        copy = b.transpose(-2, -1).contiguous()
        b.zero_()
        return a @ copy

    assert folded(run, A, B) == 0

    def behind(a, b):
        out = a @ b.transpose(-2, -1).contiguous()
        b.zero_()
        return out

    assert folded(behind, A, B) == 1


def test_a_write_to_the_copy(fresh_dynamo):
    def run(a, b):
        copy = b.transpose(-2, -1).contiguous()
        copy[0] = 0.0
        return a @ copy + b.sum()

    assert folded(run, A, B) == 0


def test_contiguous_of_contiguous(fresh_dynamo):
    def run(a, b):
        return (a + b).contiguous().view(2, -1).contiguous() * 2, a.contiguous()

    assert folded(run, A, B) == 3
    assert folded(lambda a: a.transpose(0, 1).contiguous() * 2, tensor(1, 5)) == 1  # a column
    assert folded(lambda a: a.transpose(0, 1).contiguous() * 2, tensor(3, 5)) == 0
    assert folded(lambda a: a.clone(), tensor(3, 5)) == 0


def test_a_symbolic_length(fresh_dynamo):
    a = tensor(2, 3, 8, 6)
    torch._dynamo.mark_dynamic(a, 2)
    assert folded(lambda a: a @ a.transpose(-2, -1).contiguous(), a) == 0


def test_half_precision(fresh_dynamo):
    a, b = (t.bfloat16() for t in (A, B))
    assert folded(lambda a, b: a @ b.transpose(-2, -1).contiguous(), a, b) == 1


def test_under_autocast(fresh_dynamo):
    def run(a, b):
        with torch.autocast("cpu", torch.bfloat16):
            return a @ b.transpose(-2, -1).contiguous()

    assert folded(run, A, B) == 1


def test_with_gradients(fresh_dynamo):
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    run = lambda a, b: (a @ b.transpose(-2, -1).contiguous()).square().sum()  # noqa: E731
    run(a, b).backward()
    wanted = [a.grad.clone(), b.grad.clone()]
    a.grad = b.grad = None
    backend = Folding()
    torch.compile(run, backend=backend)(a, b).backward()
    assert backend.count == 1
    torch.testing.assert_close([a.grad, b.grad], wanted)


def test_with_inductor(fresh_dynamo):
    def run(a, b):
        scores = a @ b.transpose(-2, -1).contiguous()
        return scores.softmax(-1) @ b.transpose(1, 2).contiguous().transpose(1, 2).contiguous()

    assert folded(run, A, B, inductor=True) >= 1


@pytest.mark.parametrize("name", ["hf_bert", "hf_llama", "hf_gpt2", "hf_t5", "nn_mha"])
def test_models(name, fresh_dynamo):
    build = getattr(models, name)
    model, inputs = build(False, True) if name == "nn_mha" else build("eager", True, layers=1)
    backend = Folding()
    with torch.no_grad():
        wanted = model(**inputs)
        assert_same(torch.compile(model, backend=backend)(**inputs), wanted)
    assert backend.count is not None
