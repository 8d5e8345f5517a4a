"""Masks and operands whose memory the graph writes to between where they are computed and where
attention reads them."""

import pytest
import torch
import torch.nn.functional as F

B, H, S, D = 2, 4, 64, 32
SCALE = D**-0.5


def sdpa(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def eager(q, k, v, mask=0.0):
    return torch.softmax(q @ k.transpose(-1, -2) * SCALE + mask, -1) @ v


@torch.library.custom_op("stof_test::raise_by", mutates_args={"into"})
def raise_by(amount: torch.Tensor, into: torch.Tensor) -> None:
    into.add_(amount)


@raise_by.register_fake
def _(amount, into):
    return None


MASKS = {
    "sum": lambda b, c: (b + c, b.add_(10 * c)),
    "product": lambda b, c: (2 * b, b.add_(c)),
    "clone": lambda b, c: (b.clone(), b.add_(c)),
    "contiguous": lambda b, c: (b.mT.contiguous(), b.add_(c)),
    "view": lambda b, c: (b.mT, b.add_(c)),
    "through an alias": lambda b, c: (b * 2, b[:, :, :8].add_(c[:, :, :8])),
    "out": lambda b, c: (b + c, torch.add(b, c, alpha=3.0, out=b)),
    "custom operator": lambda b, c: (b + c, raise_by(c, b)),
    "where": lambda b, c: (torch.where(n := b > 0, 0.0, -torch.inf), n.logical_not_()),
    "one minus": lambda b, c: ((1.0 - (n := b > 0).float()) * -1e9, n.logical_not_()),
    "and": lambda b, c: ((n := b > -1) & (c > -1), n.logical_not_()),
    "padding": lambda b, c: (
        (p := b[:, 0, 0] > -0.5)[:, None, None, :].expand(B, 1, S, S).contiguous(),
        p.logical_not_(),
    ),
    "zeros": lambda b, c: ((m := torch.zeros(S, S)), m[:, :9].add_(b[0, 0, :, :9])),
    "ones": lambda b, c: ((m := torch.ones(S, S, dtype=torch.bool)), m[:, :5].logical_not_()),
    "positions": lambda b, c: ((p := torch.arange(S).expand(S, S).clone()) >= 9, p[:2].sub_(7)),
    "negative positions": lambda b, c: (
        (p := torch.arange(S).expand(S, S).clone()),
        p[:, :9].sub_(30),
        p >= 0,
    ),
    "nonzero": lambda b, c: (
        torch.zeros(S, S).masked_fill(n := b[0, 0] > 0, 1.0).bool(),
        n.logical_not_(),
    ),
}


def check(call, *given):
    """``call`` on operands of its own: compiled as eager, what it writes too."""
    torch._dynamo.reset()
    options = {"tune_budget_s": 0, "attention": "gather"}
    operands = [*torch.randn(3, B, H, S, D).unbind(), *given]
    mine, theirs = ([t.clone() for t in operands] for _ in range(2))
    found, wanted = torch.compile(call, backend="stof", options=options)(*mine), call(*theirs)
    tolerance = 2e-3 if wanted.dtype == torch.float16 else 1e-4
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_computed_before_a_write(mask):
    def call(q, k, v, b, c):
        parts = mask(b, c)
        return sdpa(q, k, v, parts[2] if len(parts) > 2 else parts[0])

    check(call, *torch.randn(2, B, 1, S, S))


@pytest.mark.parametrize("name", ["sum", "product", "clone", "contiguous"])
def test_a_sum_computed_before_a_write(name):
    check(lambda q, k, v, b, c: eager(q, k, v, MASKS[name](b, c)[0]), *torch.randn(2, B, 1, S, S))


def test_a_mask_between_two_sites():
    def call(q, k, v, b, c):
        mask = b + c
        first = sdpa(q, k, v, mask)
        b.add_(c)
        return first + sdpa(q, k, v, mask)

    check(call, *torch.randn(2, B, 1, S, S))


@pytest.mark.parametrize("mask", [lambda b, c: b + c, lambda b, c: b], ids=["sum", "itself"])
def test_a_write_between_the_softmax_and_the_values(mask):
    def call(q, k, v, b, c):
        weights = torch.softmax(q @ k.transpose(-1, -2) * SCALE + mask(b, c), -1)
        b.add_(c)
        return weights @ v

    check(call, *torch.randn(2, B, 1, S, S))


def expanded(x):
    return x[:, :, None].expand(B, 2, 2, S, D).reshape(B, H, S, D)


@pytest.mark.parametrize("repeat", [lambda x: x.repeat_interleave(2, 1), expanded])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("attend", [sdpa, eager])
def test_heads_repeated_around_a_write(attend, before, repeat):
    def call(q, k, v):
        k, v = k[:, :2], v[:, :2]
        if before:
            k.mul_(2.5)
        keys, values = repeat(k), repeat(v)
        if not before:
            k.mul_(2.5)
            v.mul_(-1.5)
        return attend(q, keys, values)

    check(call)


OPERANDS = {
    "clone": lambda q, k: (q.clone(), k.contiguous()),
    "scaled": lambda q, k: (q * 0.3, k / 2),
    "key": lambda q, k: (q, k.clone()),
}


@pytest.mark.parametrize("copied", OPERANDS.values(), ids=OPERANDS)
def test_operands_copied_before_a_write(copied):
    def call(q, k, v, added):
        mine, keys = copied(q, k)
        q.add_(added)
        k.add_(added)
        return eager(mine, keys, v)

    check(call, torch.randn(B, H, S, D))


def test_an_operand_widened_before_a_write():
    def call(q, k, v):
        q, k, v = q.half(), k.half(), v.half()
        wide = q.float()
        q.mul_(0.5)
        scores = wide @ k.float().transpose(-1, -2) * SCALE
        return torch.softmax(scores, -1).half() @ v

    check(call)


def test_heads_folded_before_a_write():
    def call(q, k, v, added):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        folded, keys, values = (x.reshape(B * H, S, D) for x in (q, k, v))
        q.add_(added)
        weights = torch.softmax(torch.bmm(folded, keys.transpose(1, 2)) * SCALE, -1)
        return torch.bmm(weights, values).view(B, H, S, D)

    check(call, torch.randn(B, H, S, D))
