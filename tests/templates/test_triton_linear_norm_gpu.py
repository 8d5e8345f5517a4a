"""The product-and-norm template on a GPU: results, exactness of fp32, use in compiled code."""

import pytest
import torch
from close import assert_close
from linear_norm_recipes import TEMPLATE, config, linear_norm_recipe, one_of_each_tile, run
from norm_recipes import BRAIN, HALF, NAMES, SINGLE
from stof_compile.templates.linear_norm_configs import FORMS
from template_checks import HOPPER, check_compiled

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def wanted_by(recipe, operands):
    return TEMPLATE.reference(recipe, operands, torch.float64)


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=NAMES.get)
@pytest.mark.parametrize("rows", [128, 1000, 4096])
@pytest.mark.parametrize("k", [768, 3072])
def test_gpu_model_sizes(rows, k, dtype):
    """The config of the rules, and the first of whole rows."""
    recipe, operands = linear_norm_recipe(
        (rows,), 768, k, dtype, bias="inside", residual="first", device="cuda"
    )
    wanted = wanted_by(recipe, operands)
    configs = TEMPLATE.space(recipe, HOPPER).configs()
    full = [c for c in configs if c["form"] == "full_row"]
    for chosen in [TEMPLATE.first(recipe, HOPPER), *full[:1]]:
        assert_close(run(recipe, operands, chosen), wanted, scale=2)


@pytest.mark.parametrize("rows", [128, 4096])
def test_gpu_every_tile(rows):
    recipe, operands = linear_norm_recipe((rows,), 512, 1536, residual="first", device="cuda")
    wanted = wanted_by(recipe, operands)
    for chosen in one_of_each_tile(TEMPLATE.space(recipe, HOPPER).configs()):
        assert_close(run(recipe, operands, chosen), wanted, scale=2)


@pytest.mark.parametrize("size", [(33, 1000, 72), (257, 72, 100), (1, 768, 768)], ids=str)
@pytest.mark.parametrize(("kn", "dtype"), [(False, HALF), (True, BRAIN), (True, SINGLE)])
def test_gpu_ragged_sizes(size, kn, dtype):
    rows, n, k = size
    recipe, operands = linear_norm_recipe(
        (rows,), n, k, dtype, "rms_norm", bias="added", residual="second", kn=kn, strided=True,
        device="cuda",
    )  # fmt: skip
    wanted = wanted_by(recipe, operands)
    whole = config("full_row", 16, block_k=32, num_warps=8 if dtype != SINGLE else 16)
    for chosen in (TEMPLATE.first(recipe, HOPPER), whole):
        assert_close(run(recipe, operands, chosen), wanted, scale=2)


def test_gpu_results_repeat():
    recipe, operands = linear_norm_recipe((128,), 768, 3072, residual="first", device="cuda")
    assert torch.equal(run(recipe, operands), run(recipe, operands))


def test_gpu_fp32_is_exact_unless_tf32_is_allowed():
    recipe, operands = linear_norm_recipe((128,), 768, 768, SINGLE, device="cuda")
    wanted = wanted_by(recipe, operands)
    assert_close(run(recipe, operands), wanted, scale=2)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        error = (run(recipe, operands).double() - wanted).abs().max() / wanted.abs().max()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert 1e-6 < error < 5e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kn", [False, True])
def test_gpu_under_inductor_and_in_a_cuda_graph(form, kn, fresh_dynamo):
    torch.use_deterministic_algorithms(False)
    recipe, operands = linear_norm_recipe(
        (1000,), 768, 768, bias="inside", residual="first", kn=kn, device="cuda"
    )
    configs = TEMPLATE.space(recipe, HOPPER).configs()
    chosen = next(c for c in configs if c["form"] == form)
    with torch.no_grad():
        check_compiled(TEMPLATE, recipe, operands, chosen, scale=2)
