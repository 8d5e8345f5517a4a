"""Every spelling of RMSNorm becomes one node, with the digits and dtypes that it had."""

import pytest
import torch
from close import assert_close
from normalized_calls import Normalized, llama, new_gelu, rows, weight

from stof_compile.node_ops import argument, operation


def t5(x, w):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def gemma(x, w):
    wide = x.float()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + w.float())).type_as(x)


def olmo(x, w):
    wide = x.float()
    out = wide * torch.rsqrt(torch.mean(wide * wide, [-1], True) + 1e-6)
    return (w * out).to(x.dtype)


def divided(x, w):
    wide = x.float()
    return (wide / torch.sqrt(1e-6 + torch.square(wide).mean(dim=2, keepdim=True))).to(x.dtype) * w


def inverted(x, w):
    wide = x.float()
    root = (wide**2).mean(axis=-1, keepdim=True).add(1e-6).sqrt()
    return (1.0 / root * wide).to(x.dtype) * w


def powered(x, w):
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5).to(x.dtype) * w


def no_weight(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS = [llama, t5, gemma, olmo, divided, inverted, powered, no_weight]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_norms(norm, dtype, fresh_dynamo):
    x, w = rows(dtype), weight(dtype)
    found = Normalized(norm, x, w)
    assert found.counts == [1, 0, 0] and found.again == [0, 0, 0]
    assert not {"rsqrt", "sqrt", "mean", "pow"} & set(found.names)
    assert found.result.dtype == dtype
    assert_close(found.result, norm(x.double(), w.double()))
    found.assert_values_are_true()


def test_the_width_of_gemmas_computation_is_kept(fresh_dynamo):
    found = Normalized(gemma, rows(torch.bfloat16), weight(torch.bfloat16))
    (norm,) = (n for n in found.gm.graph.nodes if operation(n) == "rms_norm")
    assert norm.meta["example_value"].dtype == torch.float32
    assert operation(argument(norm, 2, "weight")) == "add"  # 1 + weight is a node of its own


def test_a_weight_of_another_dtype_stays_outside(fresh_dynamo):
    x, w = rows(torch.bfloat16), weight()
    found = Normalized(llama, x, w)
    assert found.counts == [1, 0, 0] and found.result.dtype == torch.float32
    (norm,) = (n for n in found.gm.graph.nodes if operation(n) == "rms_norm")
    assert argument(norm, 2, "weight") is None
    assert torch.equal(found.result, llama(x, w))


def test_a_half_weight_after_a_wide_input(fresh_dynamo):
    """T5 with an fp32 residual stream: the norm is wide, the product half."""

    def run(x, w):
        wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * wide.to(w.dtype)

    x, w = rows(), weight(torch.bfloat16)
    found = Normalized(run, x, w)
    assert found.counts == [1, 0, 0]
    assert torch.equal(found.result, run(x, w))


def test_no_rounding_is_dropped(fresh_dynamo):
    """A wide result of a rounded value: a wide norm would give other digits."""

    def run(x, w):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * wide.to(torch.bfloat16).float()

    x, w = rows(), weight()
    found = Normalized(run, x, w)
    assert torch.equal(found.result, run(x, w))


def test_a_strided_input(fresh_dynamo):
    x = rows().transpose(0, 1)
    found = Normalized(llama, x, weight())
    assert_close(found.result, llama(x.double(), weight().double()))
    found.assert_values_are_true()


def test_a_symbolic_length(fresh_dynamo):
    x = rows()
    torch._dynamo.mark_dynamic(x, 1)

    def run(x, w):
        x = llama(x, w)
        return new_gelu(x * torch.sigmoid(x))

    found = Normalized(run, x, weight())
    assert found.counts == [1, 1, 1]
    assert any(isinstance(n.meta.get("example_value"), torch.SymInt) for n in found.gm.graph.nodes)
    assert_close(found.result, run(x.double(), weight().double()), scale=3)


def test_bad_rows_stay_bad(fresh_dynamo):
    x = rows()
    x[0, 0, 3], x[0, 1, 4], x[0, 2] = torch.nan, torch.inf, 0.0
    found = Normalized(llama, x, weight())
    assert torch.equal(found.result.isnan(), llama(x, weight()).isnan())
    torch.testing.assert_close(found.result, llama(x, weight()), equal_nan=True)
