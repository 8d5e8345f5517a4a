"""The norm template: its results in the interpreter against the recipe."""

from functools import partial

import pytest
import torch
from close import assert_close
from norm_recipes import BRAIN, HALF, NAMES, SINGLE, Recording, norm_recipe, random
from stof_compile.templates.triton_norm import TritonNorm
from template_checks import check_operator, check_template

import stof_compile.ops_norm  # noqa: F401

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

TEMPLATE = TritonNorm()
check = partial(check_template, TEMPLATE)

CONFIGS = [{"rows": r, "num_warps": 4} for r in (1, 2, 8)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("n", [72, 257, 64])
def test_norm_with_all_that_is_added(n, norm, dtype, config):
    check(*norm_recipe((33,), n, dtype, norm, bias=True, residual=True), config)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_subsets(bias, residual, affine, swapped):
    check(*norm_recipe(bias=bias, residual=residual, affine=affine, swapped=swapped))


@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (2, 3, 4), (257,)], ids=str)
def test_ranks(rows):
    out = check(*norm_recipe(rows, residual=bool(rows)), {"rows": 2, "num_warps": 4})
    assert out.shape == (*rows, 72)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_weights_of_another_dtype(dtype):
    """A norm's fp32 parameters beside half rows give fp32 in torch: a cast brings it back."""
    _, operands = norm_recipe(dtype=dtype, affine=False, residual=True)
    out = torch.ops.stof.fused_norm(
        operands[0], None, operands[1], random(72, dtype=SINGLE), None, "rms_norm", 1e-5, [1, 1]
    )
    h = operands[0].double() + operands[1].double()
    wanted = torch.nn.functional.rms_norm(h, (72,), random(72, dtype=SINGLE).double(), 1e-5)
    assert out.dtype == dtype
    assert_close(out, wanted)


def test_an_fp32_stream_with_a_half_branch_keeps_its_dtype():
    stream, branch = random(5, 72, dtype=SINGLE), random(5, 72)
    rec = Recording(branch, stream)
    rec.add("add", ("o", 0), ("o", 1))
    rec.add("rms_norm", ("v", 0), eps=1e-6, width=72, has_weight=False, has_bias=False)
    assert check(rec.recipe(), [branch, stream]).dtype == SINGLE


def test_rows_apart_and_other_memory_orders():
    recipe, operands = norm_recipe((4, 9), residual=True, strided=True)
    assert not operands[0].is_contiguous()
    check(recipe, operands)
    x = random(4, 9, 72).transpose(0, 1)  # its rows have no single stride: the operator copies
    out = torch.ops.stof.fused_norm(x, None, x, None, None, "layer_norm", 1e-5, [4, 2])
    assert out.is_contiguous()
    assert_close(out, torch.nn.functional.layer_norm(2 * x.double(), (72,)))
    x = random(72, 9).t()
    out = torch.ops.stof.fused_norm(x, None, None, None, None, "layer_norm", 1e-5, [1, 2])
    assert_close(out, torch.nn.functional.layer_norm(x.double(), (72,)))


def test_large_offsets_do_not_cancel():
    """Two passes: rows of mean 1,000 and deviation 1 keep their digits."""
    x = 1000 + random(7, 257, dtype=SINGLE)
    out = torch.ops.stof.fused_norm(x, None, None, None, None, "layer_norm", 1e-5, [1, 4])
    assert_close(out, torch.nn.functional.layer_norm(x.double(), (257,)), scale=20)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_nan_and_infinity_stay_in_their_rows(norm):
    x = random(9, 72, dtype=SINGLE)
    x[2, 3], x[5, 71], x[7] = float("nan"), float("inf"), 0.0
    rec = Recording(x)
    rec.add(norm, ("o", 0), eps=1e-5, width=72, has_weight=False, has_bias=False)
    out = check(rec.recipe(), [x], {"rows": 4, "num_warps": 2})
    assert out[7].eq(0).all()


@pytest.mark.parametrize("shape", [(0, 72), (2, 0, 72), (3, 0)])
def test_nothing_to_do(shape):
    out = torch.ops.stof.fused_norm(
        torch.empty(shape), None, torch.empty(shape), None, None, "layer_norm", 1e-5, [1, 4]
    )
    assert out.shape == shape


def test_opcheck():
    x, weight = random(5, 72), random(72)
    operator = torch.ops.stof.fused_norm
    check_operator(operator, x, None, x, weight, weight, "layer_norm", 1e-5, [2, 4])


def test_wrong_arguments_are_refused():
    x = random(5, 72)
    op = torch.ops.stof.fused_norm
    with pytest.raises(ValueError, match="norm must be one of"):
        op(x, None, None, None, None, "batch_norm", 1e-5, [1, 4])
    with pytest.raises(ValueError, match="bias must have 72 elements"):
        op(x, x, None, None, None, "layer_norm", 1e-5, [1, 4])
    with pytest.raises(ValueError, match=r"residual must be \[..., 72\] with 5 rows"):
        op(x, None, x[:4], None, None, "layer_norm", 1e-5, [1, 4])
    with pytest.raises(ValueError, match="rows must be a power of two"):
        op(x, None, None, None, None, "layer_norm", 1e-5, [3, 4])
    with pytest.raises(ValueError, match="float64"):
        op(x.double(), None, None, None, None, "layer_norm", 1e-5, [1, 4])
