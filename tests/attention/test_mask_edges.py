"""Additive masks that are not what they look like: gradients cut off, numbers that are not
moderate, integers, buffers that are learned, scales that are not positive."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

B, H, S, D = 2, 4, 16, 8
LOWEST, INF = torch.finfo(torch.float32).min, float("inf")


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    inner = lambda gm, inputs, options: aot_eager(gm, list(inputs))  # noqa: E731
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", inner)


def softmax_by_hand(q, k, v, mask):
    return torch.softmax(q @ k.transpose(-1, -2) * D**-0.5 + mask, -1) @ v


FORMS = {"sdpa": F.scaled_dot_product_attention, "softmax": softmax_by_hand}


def compiled(call, kernel):
    return torch.compile(call, backend="stof", options={"attention": kernel, "tune_budget_s": 0})


def operands(*more, grad=True):
    made = [*torch.randn(3, B, H, S, D).unbind(), *more]
    return [t.clone().requires_grad_(grad and t.is_floating_point()) for t in made]


def check(call, kernel, *more):
    """Outputs and gradients as in eager mode."""
    mine = operands(*more)
    theirs = [t.detach().clone().requires_grad_(t.requires_grad) for t in mine]
    found, wanted = compiled(call, kernel)(*mine), call(*theirs)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
    found.sum().backward()
    wanted.sum().backward()
    for here, there in zip(mine, theirs, strict=True):
        assert (here.grad is None) == (there.grad is None)
        if there.grad is not None:
            torch.testing.assert_close(here.grad, there.grad, atol=1e-4, rtol=1e-4, equal_nan=True)


def detached(bias):
    return bias.detach().expand(B, H, S, S).contiguous()


def without_gradient(bias):
    with torch.no_grad():
        return bias.expand(B, H, S, S) + torch.zeros(S, S)


def half_detached(bias):
    return bias.detach() * 2 + bias


@pytest.mark.parametrize("kernel", ["sdpa", "gather"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("made", [detached, without_gradient, half_detached])
def test_gradients_that_were_cut_off_stay_so(made, form, kernel):
    check(lambda q, k, v, b: FORMS[form](q, k, v, made(b)), kernel, torch.randn(1, H, S, S))


@pytest.mark.parametrize("kernel", ["sdpa", "gather"])
@pytest.mark.parametrize("value", [-INF, LOWEST, INF, float("nan"), -3e4, -2.0])
def test_one_number_for_all_scores(value, kernel):
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.full((1, 1, 1, 1), value)),
        kernel,
    )


@pytest.mark.parametrize("kernel", ["sdpa", "gather"])
@pytest.mark.parametrize("value", [-INF, INF, float("nan"), 3.0])
def test_a_number_added_to_a_bias(value, kernel):
    def call(q, k, v, bias):
        mask = (bias + value).expand(B, H, S, S) + torch.zeros(B, H, S, S)
        return F.scaled_dot_product_attention(q, k, v, mask)

    mine = operands(torch.randn(1, H, S, S), grad=False)
    wanted = call(*mine)
    found = compiled(call, kernel)(*mine)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kernel", ["sdpa", "gather"])
@pytest.mark.parametrize("made", [lambda x: x * 3, lambda x: x + x, lambda x: x + 255])
def test_integers_wrap_around(made, kernel):
    steps = torch.randint(0, 255, (1, H, S, S), dtype=torch.uint8)
    check(
        lambda q, k, v, x: F.scaled_dot_product_attention(q, k, v, made(x) + torch.zeros(S, S)),
        kernel,
        steps,
    )


@pytest.mark.parametrize("kernel", ["sdpa", "gather"])
def test_a_buffer_that_is_learned(kernel):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(1, 1, S, S, requires_grad=True))

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, self.mask)

    mine, theirs = Model(), Model()
    tensors = operands(grad=False)
    compiled(mine, kernel)(*tensors).sum().backward()
    theirs(*tensors).sum().backward()
    torch.testing.assert_close(mine.mask.grad, theirs.mask.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "gather"])
@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize("form", ["bool", "added"])
def test_a_causal_mask_with_a_scale_that_is_not_positive(form, scale, kernel):
    def call(q, k, v):
        keep = torch.arange(S) <= torch.arange(S)[:, None]
        mask = keep if form == "bool" else torch.where(keep, 0.0, LOWEST)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)

    check(call, kernel)


@pytest.mark.parametrize("kernel", ["sdpa", "gather"])
def test_a_bias_that_is_written_to_later(kernel):
    def call(q, k, v, x):
        found = F.scaled_dot_product_attention(q, k, v, x + torch.zeros(B, H, S, S))
        x.add_(1)
        return found

    mine, bias = operands(), torch.randn(1, H, S, S)
    theirs, given = [t.detach().clone().requires_grad_() for t in mine], bias.clone()
    compiled(call, kernel)(*mine, bias).sum().backward()
    call(*theirs, given).sum().backward()
    torch.testing.assert_close(bias, given)
    for here, there in zip(mine, theirs, strict=True):
        torch.testing.assert_close(here.grad, there.grad, atol=1e-4, rtol=1e-4)
