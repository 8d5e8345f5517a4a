"""Functions that are transformed inside a compiled graph: left to PyTorch, with the reason."""

import pytest
import torch
from close import assert_close
from running import without_inductor
from torch.autograd import forward_ad

from stof_compile import StofUnsupportedError, explain, masks, sparse_attention

OPTIONS = {"tune_budget_s": 0, "attention": "gather"}


def attend(x):
    i = torch.arange(x.shape[-2])
    far = (i[:, None] - i).abs() > 4
    return (x @ x.mT * 0.25).masked_fill(far, -torch.inf).softmax(-1) @ x


def dual_numbers(x, tangent):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        return forward_ad.unpack_dual(attend(dual) * dual).tangent


TRANSFORMED = {
    "forward-mode derivatives": dual_numbers,
    "torch.func.jvp": lambda x, t: torch.func.jvp(lambda y: attend(y) * y, (x,), (t,))[1],
    "torch.vmap": lambda x, t: torch.vmap(attend)(x[:, None]) + t[:, None],
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_attention_is_left_to_torch(name, fresh_dynamo, monkeypatch):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    x, tangent = torch.randn(3, 2, 64, 16), torch.randn(3, 2, 64, 16)
    fast = torch.compile(TRANSFORMED[name], backend="stof", options=OPTIONS)
    found = fast(x, tangent)
    assert_close(found, TRANSFORMED[name](x.double(), tangent.double()))
    (miss,) = explain(fast).near_misses
    assert "which STOF's operators have no rule for" in miss["reason"]


@pytest.mark.parametrize("name", ["forward-mode derivatives", "torch.vmap"])
def test_strict_names_the_transform(name, fresh_dynamo):
    x, tangent = torch.randn(3, 2, 64, 16), torch.randn(3, 2, 64, 16)
    strict = torch.compile(TRANSFORMED[name], backend="stof", options={**OPTIONS, "strict": True})
    with pytest.raises(StofUnsupportedError, match=name):
        strict(x, tangent)


def test_the_function_refuses_forward_mode_derivatives():
    q, tangent = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    rule = masks.sliding_window(4)
    with pytest.raises(StofUnsupportedError, match="forward-mode derivatives"):
        torch.func.jvp(lambda q: sparse_attention(q, q, q, rule), (q,), (tangent,))
    with forward_ad.dual_level():
        sparse_attention(q, q, q, rule)  # none of the operands has one
        with pytest.raises(StofUnsupportedError, match="forward-mode derivatives"):
            sparse_attention(q, q, forward_ad.make_dual(q, tangent), rule)
