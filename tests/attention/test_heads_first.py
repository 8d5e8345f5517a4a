"""Kernels that write heads first where readers count on it: every head is a batch entry then."""

import pytest
import torch
from close import assert_close
from stof_compile.kernels.reference import attention_reference

import stof_compile.ops  # noqa: F401  # registers the operators
from stof_compile import masks
from stof_compile.attention.call import _bind_sparse
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.masks import build_block_mask

CONFIGS = {"block": (16, 16, 4, 2), "row": (16, 16), "gather": (16, 16)}
SHAPE = (2, 3, 70, 16)
MASK = masks.bigbird(window=4, global_tokens=3, random_fill=0.3, random_block=16)


def bound(kernel, q, k, v, spec=MASK, **facts):
    pytest.importorskip("triton")
    metas = [TensorMeta.of(t) for t in (q, k, v)]
    asked = AttentionProblem(*metas, spec, 0, torch.device("cpu"), 0.25, **facts)
    return _bind_sparse(asked, kernel, CONFIGS[kernel])


def operands(shape=SHAPE, kv_shape=None):
    return torch.randn(shape), *torch.randn((2, *(kv_shape or shape))).unbind()


@pytest.mark.parametrize(
    ("shape", "fits"),
    [(SHAPE, True), ((1, 3, 70, 16), True), ((2, 1, 70, 16), True)],
)
def test_heads_are_batches_where_that_is_a_view(shape, fits):
    assert (bound("block", *operands(shape)).heads_first is not None) == fits


@pytest.mark.parametrize(
    ("kernel", "given", "facts"),
    [
        ("row", operands(), {}),
        ("block", operands((2, 4, 70, 16), (2, 2, 70, 16)), {}),
        ("block", operands(), {"padding": True}),
        ("block", operands(), {"bias": TensorMeta((70, 70), (70, 1), torch.float32)}),
        ("block", [t.transpose(1, 2).contiguous().transpose(1, 2) for t in operands()], {}),
        ("block", operands(), {"spec": masks.from_tensor(torch.rand(1, 3, 70, 70) < 0.3)}),
    ],
    ids=["rows take several heads", "groups", "padding", "bias", "strides", "mask of each head"],
)
def test_where_heads_stay_heads(kernel, given, facts):
    assert bound(kernel, *given, **facts).heads_first is None


@pytest.mark.interpreter
@pytest.mark.parametrize("value_dim", [16, 8])
@pytest.mark.parametrize("kernel", ["block", "gather"])
def test_the_result_is_the_same_in_another_order(kernel, value_dim):
    q, k, v = operands()
    v = v[..., :value_dim].contiguous()
    call = bound(kernel, q, k, v)
    found = call.heads_first(q, k, v, None, None, call.buffers)
    assert found.is_contiguous() and found.shape == (*SHAPE[:3], value_dim)
    as_it_was = call.attend(q, k, v, None, None, call.buffers)
    assert as_it_was.transpose(1, 2).is_contiguous() and torch.equal(found, as_it_was)
    wide = [t.double() for t in (q, k, v)]
    keep = build_block_mask(MASK, 70, 70, 16).to_dense()
    assert_close(found, attention_reference(*wide, keep, scale=0.25))


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", ["block", "gather"])
def test_gradients_go_the_same_way(kernel):
    given = [t.requires_grad_() for t in operands()]
    call = bound(kernel, *given)
    upstream = torch.randn(SHAPE)
    ours, as_it_was = (
        torch.autograd.grad(attend(*given, None, None, call.buffers), given, upstream)
        for attend in (call.heads_first, call.attend)
    )
    for found, wanted in zip(ours, as_it_was, strict=True):
        assert_close(found, wanted)
