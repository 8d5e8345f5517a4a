"""The product-and-norm template: its results in the interpreter against the recipe.

bf16 products are left to the GPU tests: the interpreter multiplies bf16 tiles as integers.
"""

import pytest
import torch
from close import assert_close
from linear_norm_recipes import check, config, linear_norm_recipe, run
from norm_recipes import HALF, NAMES, SINGLE, random
from stof_compile.templates.linear_norm_configs import FORMS, row_tiles
from template_checks import check_operator

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]

CONFIGS = {
    "one plane": config(),
    "three planes": config(split_k=3, norm_rows=4),
    "empty planes": config(split_k=7, block_k=64),
    "tall": config(block_m=64, block_n=16, block_k=16, split_k=2),
    "whole rows": config("full_row", 16),
    "whole rows, tall": config("full_row", 32, block_k=16),
}


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=NAMES.get)
@pytest.mark.parametrize(("norm", "kn"), [("layer_norm", False), ("rms_norm", True)])
@pytest.mark.parametrize(("rows", "n", "k"), [(33, 72, 72), (64, 96, 128)])
def test_every_form(chosen, dtype, norm, kn, rows, n, k):
    check(
        *linear_norm_recipe(
            (rows,), n, k, dtype, norm, bias="inside", residual="first", kn=kn
        ),
        chosen,
    )  # fmt: skip


@pytest.mark.parametrize("n", [16, 17, 64, 100, 128, 257])
@pytest.mark.parametrize("kn", [False, True])
def test_widths_of_whole_rows(n, kn):
    left, right = row_tiles(n)
    assert left <= n <= left + right + (right == 0) * left
    for chosen in (config("full_row", 16), config(block_n=64)):
        check(*linear_norm_recipe((19,), n, 40, residual="second", kn=kn), chosen)


@pytest.mark.parametrize("form", ["split_k", "full_row"])
@pytest.mark.parametrize("bias", ["", "inside", "added"])
@pytest.mark.parametrize("residual", ["", "first"])
@pytest.mark.parametrize("affine", [False, True])
def test_subsets(form, bias, residual, affine):
    recipe, operands = linear_norm_recipe(bias=bias, residual=residual, affine=affine)
    check(recipe, operands, config(form, 16, split_k=1 if form == "full_row" else 2))


@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (2, 3, 4), (257,)], ids=str)
@pytest.mark.parametrize("form", ["split_k", "full_row"])
def test_ranks(rows, form):
    recipe, operands = linear_norm_recipe(rows, residual="first" if rows else "", bias="inside")
    out = check(recipe, operands, config(form))
    assert out.shape == (*rows, 72)


@pytest.mark.parametrize("form", ["split_k", "full_row"])
def test_rows_apart_and_other_memory_orders(form):
    recipe, operands = linear_norm_recipe((4, 9), residual="first", strided=True)
    assert not operands[0].is_contiguous()
    check(recipe, operands, config(form))
    numbers = [FORMS.index(form), *list(config(form).values())[1:], 0]
    x = random(4, 9, 72).transpose(0, 1)
    weight = random(40, 144)[:, ::2]
    out = torch.ops.stof.fused_linear_norm(
        x, weight, None, None, None, None, "layer_norm", 1e-5, numbers
    )
    wanted = torch.nn.functional.layer_norm(x.double() @ weight.double().t(), (40,))
    assert out.is_contiguous()
    assert_close(out, wanted, scale=2)


@pytest.mark.parametrize("form", ["split_k", "full_row"])
def test_nan_and_infinity_stay_in_their_rows(form):
    recipe, operands = linear_norm_recipe((19,), 40, 72, SINGLE, residual="first")
    operands[0][2, 3] = float("nan")
    operands[2][5, 7] = float("inf")
    check(recipe, operands, config(form, 16, split_k=1 if form == "full_row" else 2))


@pytest.mark.parametrize("shape", [(0, 72), (2, 0, 72)])
@pytest.mark.parametrize("form", [0, 1])
def test_nothing_to_do(shape, form):
    numbers = [form, *list(config().values())[1:]]
    out = torch.ops.stof.fused_linear_norm(
        torch.empty(shape), torch.empty(40, 72), None, None, None, None, "rms_norm", 1e-5, numbers
    )
    assert out.shape == (*shape[:-1], 40)


def test_planes_are_added_in_one_order():
    recipe, operands = linear_norm_recipe((33,), 72, 128)
    chosen = config(split_k=4)
    assert torch.equal(run(recipe, operands, chosen), run(recipe, operands, chosen))


def test_opcheck():
    x, weight = random(5, 72), random(40, 72)
    numbers = [0, *list(config(split_k=2).values())[1:], 0]
    given = (x, weight, weight[:, 0], None, None, None, "layer_norm", 1e-5, numbers)
    check_operator(torch.ops.stof.fused_linear_norm, *given)


def test_wrong_arguments_are_refused():
    x, weight = random(5, 72), random(40, 72)

    def call(x=x, weight=weight, bias=None, **changes):
        chosen = config(**changes)
        numbers = [FORMS.index(chosen["form"]), *list(chosen.values())[1:]]
        torch.ops.stof.fused_linear_norm(
            x, weight, bias, None, None, None, "layer_norm", 1e-5, numbers
        )

    with pytest.raises(ValueError, match=r"weight must be \[N, 72\]"):
        call(weight=weight.t())
    with pytest.raises(ValueError, match="weight must have the dtype of x"):
        call(weight=weight.float())
    with pytest.raises(ValueError, match="bias must have 40 elements"):
        call(bias=x[0])
    with pytest.raises(ValueError, match="block_m must be a power of two"):
        call(block_m=48)
    with pytest.raises(ValueError, match="block_k must be >= 16"):
        call(block_k=8)
    with pytest.raises(ValueError, match="split_k must be at least 1"):
        call(split_k=0)
    with pytest.raises(ValueError, match="16 to 1024 columns"):
        call(weight=random(1040, 72), form="full_row")
