"""The pointwise template on a GPU: its results, large indices, and its use in compiled code."""

import pytest
import torch
from close import assert_close
from norm_recipes import HALF, NAMES, SINGLE, random
from pointwise_recipes import (
    POSITIVE,
    TEMPLATE,
    check,
    gelu_residual,
    one_step,
    program,
    run,
    values,
)
from template_checks import HOPPER, check_compiled

from stof_compile.fusion.recipe import ACTIVATIONS, BINARY, UNARY

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("rows", [128, 1000, 4096])
@pytest.mark.parametrize("n", [768, 3072, 1001])
def test_gpu_model_sizes(rows, n, dtype):
    check(gelu_residual((rows,), n, dtype, "cuda"), None)


def test_gpu_every_config():
    rec = gelu_residual((4096,), 768, device="cuda")
    recipe, operands = rec.recipe(), list(rec.operands)
    wanted = TEMPLATE.reference(recipe, operands, torch.float64)
    for config in TEMPLATE.space(recipe, HOPPER).configs():
        assert_close(run(recipe, operands, config), wanted, scale=2)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=NAMES.get)
def test_gpu_steps(dtype):
    for name in ACTIVATIONS:
        check(one_step("activation", values(dtype), name=name))
    for kind in set(UNARY) - set(POSITIVE) - {"exp", "exp2", "square", "sin", "cos"}:
        check(one_step(kind, values(dtype)))
    x = random(33, 72, dtype=dtype)
    for kind in ("exp", "exp2", "square", "sin", "cos"):
        check(one_step(kind, x))
    for kind in POSITIVE:
        check(one_step(kind, 0.1 + x.abs()))
    for kind in sorted(set(BINARY) - {"pow"}):
        check(one_step(kind, x, 1 + x[0].abs()))
        check(one_step(kind, x, 1 + x[:, :1].abs().contiguous()))


def test_gpu_indices_beyond_32_bits():
    x = torch.ones(2**31 + 4096, dtype=HALF, device="cuda")
    x[-1] = 3
    text = program("square", "x0")
    out = torch.ops.stof.fused_pointwise([x], text, x.shape, [1024, 4])
    assert out[-1] == 9 and bool((out[2**31 - 8 : -1] == 1).all()) and out[0] == 1


def test_gpu_under_inductor_and_in_a_cuda_graph(fresh_dynamo):
    torch.use_deterministic_algorithms(False)
    rec = gelu_residual((1000,), 768, device="cuda")
    recipe, operands = rec.recipe(), list(rec.operands)
    with torch.no_grad():
        check_compiled(TEMPLATE, recipe, operands, scale=2)
