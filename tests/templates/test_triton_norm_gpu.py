"""The norm template on a GPU: its results, large offsets, and its use in compiled code."""

from functools import partial

import pytest
import torch
from close import assert_close
from norm_recipes import HALF, NAMES, norm_recipe
from stof_compile.templates.triton_norm import TritonNorm
from template_checks import HOPPER, check_compiled, run_template

import stof_compile.ops_norm  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

TEMPLATE = TritonNorm()
run = partial(run_template, TEMPLATE)


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("rows", [128, 1000, 4096])
@pytest.mark.parametrize(
    ("n", "norm"),
    [(768, "layer_norm"), (3072, "rms_norm"), (1000, "layer_norm"), (16384, "layer_norm")],
)
def test_gpu_model_sizes(rows, n, norm, dtype):
    recipe, operands = norm_recipe((rows,), n, dtype, norm, bias=True, residual=True, device="cuda")
    assert_close(run(recipe, operands), TEMPLATE.reference(recipe, operands, torch.float64))


@pytest.mark.parametrize("rows", [128, 1001, 4099])
def test_gpu_every_config(rows):
    recipe, operands = norm_recipe((rows,), 768, bias=True, residual=True, device="cuda")
    wanted = TEMPLATE.reference(recipe, operands, torch.float64)
    for config in TEMPLATE.space(recipe, HOPPER).configs():
        assert_close(run(recipe, operands, config), wanted)


def test_gpu_results_repeat():
    recipe, operands = norm_recipe((4096,), 768, residual=True, device="cuda")
    assert torch.equal(run(recipe, operands), run(recipe, operands))


def test_gpu_offsets_beyond_32_bits():
    x = torch.ones(270_000, 8192, dtype=HALF, device="cuda")  # 2.2e9 elements, 4.4 GB
    x[:, ::2] = 0
    out = torch.ops.stof.fused_norm(x, None, None, None, None, "layer_norm", 0.0, [1, 8])
    assert bool((out[-1, 1::2] == 1).all()) and bool((out[-1, ::2] == -1).all())


def test_gpu_under_inductor_and_in_a_cuda_graph(fresh_dynamo):
    torch.use_deterministic_algorithms(False)
    recipe, operands = norm_recipe((1000,), 768, bias=True, residual=True, device="cuda")
    with torch.no_grad():
        check_compiled(TEMPLATE, recipe, operands)
