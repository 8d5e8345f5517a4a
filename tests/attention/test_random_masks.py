"""Masks that are drawn in the forward pass are drawn at each call; constants are told from them."""

import pytest
import torch
import torch.nn.functional as F
from e2e.running import NO_TIMING, without_inductor

from stof_compile import explain
from stof_compile.capture import read_capture

S = 32
state = {"share": 0.5}


@torch.library.custom_op("stof_tests::drawn_mask", mutates_args=())
def drawn_mask(n: int) -> torch.Tensor:
    return torch.rand(n, n) > 0.5


@drawn_mask.register_fake
def _(n):
    return torch.empty(n, n, dtype=torch.bool)


@torch.library.custom_op("stof_tests::mask_of_state", mutates_args=())
def mask_of_state(n: int) -> torch.Tensor:
    return torch.arange(n * n).view(n, n) < state["share"] * n * n


@mask_of_state.register_fake
def _(n):
    return torch.empty(n, n, dtype=torch.bool)


@torch._dynamo.allow_in_graph
def opaque_mask(n):
    return torch.rand(n, n) > 0.5


def ones():
    return torch.ones(S, S)


DRAWN = {
    "rand": lambda: torch.rand(S, S) > 0.5,
    "rand_like": lambda: torch.rand_like(ones()) > 0.5,
    "bernoulli": lambda: torch.bernoulli(ones() / 2).bool(),
    "bernoulli_": lambda: torch.empty(S, S).bernoulli_(0.5).bool(),
    "uniform_": lambda: ones().uniform_() > 0.5,
    "binomial": lambda: torch.binomial(ones(), ones() / 2).bool(),
    "poisson": lambda: torch.poisson(ones()).bool(),
    "_standard_gamma": lambda: torch._standard_gamma(ones()) > 0.7,
    "multinomial": lambda: F.one_hot(torch.multinomial(ones(), 1)[:, 0], S).bool(),
    "randperm": lambda: torch.randperm(S * S).view(S, S) > S * S // 2,
    "F.dropout": lambda: F.dropout(ones()).bool(),
    "F.dropout1d": lambda: F.dropout1d(ones()[None], 0.5, True)[0].bool(),
    "F.alpha_dropout": lambda: F.alpha_dropout(ones(), 0.5, True) > 0,
    "feature_dropout": lambda: torch.feature_dropout(ones(), 0.5, True).bool(),
    "F.feature_alpha_dropout": lambda: F.feature_alpha_dropout(ones(), 0.5, True) > 0,
    "native_dropout": lambda: torch.native_dropout(ones(), 0.5, True)[1],
    "F.rrelu": lambda: F.rrelu(-ones(), 0.1, 0.3, training=True) > -0.2,
    "F.gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(S, S, 2), hard=True)[..., 0].bool(),
    "a custom operator": lambda: torch.ops.stof_tests.drawn_mask(S),
    "allow_in_graph": lambda: opaque_mask(S),
    "on the way": lambda: (torch.binomial(ones(), ones() / 2) * 2 - 1).tril() > 0,
}  # fmt: skip

CONSTANT = {
    "factories": lambda: torch.arange(S)[:, None] >= torch.arange(S),
    "one_hot": lambda: F.one_hot(torch.arange(S), S).bool(),
    "block_diag": lambda: torch.block_diag(ones()[:4, :4], ones()[4:, 4:]).bool(),
    "chunk": lambda: ones().tril().chunk(2, -1)[0].repeat(1, 2).mT.bool(),
    "literals": lambda: torch.tensor([True, False]).repeat(S, S // 2),
    "full and where": lambda: torch.where(ones().triu().bool(), 0.0, -torch.inf),
    "dropout in eval mode": lambda: F.dropout1d(ones()[None], 0.5, False)[0].bool(),
    "alpha dropout in eval mode": lambda: F.alpha_dropout(ones(), 0.5, False) > 0,
}  # fmt: skip


def attend_under(mask):
    def attend(q, k, v):
        keep = mask() | torch.eye(S, dtype=torch.bool)  # no row is empty
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    return attend


@pytest.mark.parametrize("mask", DRAWN.values(), ids=DRAWN)
@torch.no_grad()
def test_a_mask_is_drawn_at_each_call(mask, monkeypatch, fresh_dynamo):
    """As without STOF: the same masks of the same generator, which stands where it would stand."""
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    q, k, v = torch.randn(3, 1, 2, S, 16)
    found = []
    for backend, options in (("stof", {**NO_TIMING, "strict": False}), ("aot_eager", None)):
        torch._dynamo.reset()
        fast = torch.compile(attend_under(mask), backend=backend, options=options)
        torch.manual_seed(0)
        found.append([fast(q, k, v) for _ in range(3)] + [torch.get_rng_state()])
    for with_stof, without in zip(*found, strict=True):
        torch.testing.assert_close(with_stof, without, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found[0][0], found[0][1])


def is_static(mask):
    """Whether what a function returns is a constant of its graph; asking draws no numbers."""
    seen = []

    def backend(gm, inputs):
        (result,) = gm.graph.find_nodes(op="output")[0].args[0]
        before = torch.get_rng_state()
        seen.append(read_capture(gm, inputs).static.is_static(result))
        assert torch.equal(torch.get_rng_state(), before)
        return gm.forward

    torch.compile(mask, backend=backend, fullgraph=True)()
    return seen[-1]


@pytest.mark.parametrize("mask", DRAWN.values(), ids=DRAWN)
def test_random_numbers_are_no_constants(mask, fresh_dynamo):
    assert not is_static(mask)


@pytest.mark.parametrize("mask", CONSTANT.values(), ids=CONSTANT)
def test_constants(mask, fresh_dynamo):
    assert is_static(mask)


@torch.no_grad()
def test_an_operator_of_others_may_read_anything(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    call = attend_under(lambda: torch.ops.stof_tests.mask_of_state(S))
    fast = torch.compile(call, backend="stof", options={**NO_TIMING, "strict": False})
    q, k, v = torch.randn(3, 1, 2, S, 16)
    for share in (0.5, 0.1):
        monkeypatch.setitem(state, "share", share)
        torch.testing.assert_close(fast(q, k, v), call(q, k, v), atol=1e-5, rtol=1e-5)
    (fallback,) = explain(fast).fallbacks
    assert "is made anew at each call and varies along queries, keys" in fallback["reason"]
