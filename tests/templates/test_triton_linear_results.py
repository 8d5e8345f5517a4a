"""The linear template: its results in the interpreter against the recipe.

bf16 is left to the GPU tests: the interpreter multiplies bf16 tiles as integers.
"""

import pytest
import torch
from close import assert_close
from linear_recipes import SMALL, linear_recipe
from norm_recipes import HALF, SINGLE
from stof_compile.templates.triton_linear import TritonLinear
from template_checks import HOPPER, check_operator, check_template

import stof_compile.ops_linear  # noqa: F401
from stof_compile.fusion.recipe import ACTIVATIONS

pytestmark = pytest.mark.interpreter

TEMPLATE = TritonLinear()

CASES = {
    "plain": ({"bias": "", "activation": ""}, {}),
    "bias, GELU": ({}, {"block_n": 32}),
    "four dimensions": ({"rows": (2, 3, 5)}, {}),
    "one row": ({"rows": ()}, {}),
    "strided rows": ({"strided": True, "residual": True}, {"block_k": 32}),
    "[K, N] weight": ({"kn": True, "residual": True}, {"block_n": 32, "block_k": 32}),
    "all of it": ({"factor": True, "residual": True, "rows": (257,)}, {"block_m": 32}),
    "even": ({"rows": (64,), "n": 64, "k": 64, "residual": True}, {"block_m": 32, "block_n": 32}),
    "pieces": ({"n": 140, "residual": True}, {"block_m": 128, "block_n": 128}),
    "split": ({"residual": True, "factor": True}, {"split_k": 3}),
    "split, ragged parts": ({"k": 200, "activation": "relu"}, {"split_k": 7}),
    "more parts than steps": ({"k": 24}, {"split_k": 8}),
    "[K, N], copied": ({"kn": True, "bias": "input"}, {"depth_first": 1, "block_n": 32}),
    "split, [K, N]": ({"kn": True}, {"split_k": 2, "block_n": 32}),
    "persistent": ({"rows": (257,), "residual": True}, {"persistent": 1}),
    "persistent pieces": ({"rows": (257,), "n": 200}, {"persistent": 1, "block_m": 128,
                          "block_n": 128, "block_k": 32}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_interpreter(case, dtype):
    form, config = CASES[case]
    recipe, operands = linear_recipe(dtype=dtype, **form)
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    check_template(TEMPLATE, recipe, operands, SMALL | config)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_interpreter_activations(activation, dtype):
    recipe, operands = linear_recipe((40,), activation=activation, dtype=dtype)
    check_template(TEMPLATE, recipe, operands, SMALL)
    # small values, where a careless tanh loses all its digits; large ones, whose rounding it shows
    for size, scale in ((1e-3, 1.0), (30.0, 4.0)):
        scaled = [t * size if i != 1 else t for i, t in enumerate(operands)]
        check_template(TEMPLATE, recipe, scaled, SMALL, scale)


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_interpreter_keeps_nan_and_infinities(activation):
    recipe, operands = linear_recipe((6,), 40, 16, SINGLE, activation=activation, residual=True)
    operands[2][:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    operands[0][1, 3] = float("nan")
    operands[3][2, 7] = float("inf")
    check_template(TEMPLATE, recipe, operands, SMALL)
    check_template(TEMPLATE, recipe, operands, SMALL | {"split_k": 1, "persistent": 1})


def test_interpreter_empty_and_columns():
    x, weight = torch.randn(0, 16), torch.randn(8, 16)
    config = list(SMALL.values())
    out = torch.ops.stof.fused_linear(x, weight, None, None, None, "", config)
    assert out.shape == (0, 8)
    columns = torch.randn(16, 12).t()  # no unit stride along K: copied
    out = torch.ops.stof.fused_linear(columns, weight, None, None, None, "", config)
    assert_close(out, columns.double() @ weight.double().t())
    vector = torch.ops.stof.fused_linear(columns[0], weight, None, None, None, "relu", config)
    assert vector.shape == (8,)
    merged = torch.randn(3, 4, 16).transpose(0, 1)  # leading dimensions cannot be merged
    out = torch.ops.stof.fused_linear(merged, weight, None, None, None, "", config)
    assert out.is_contiguous()
    assert_close(out, merged.double() @ weight.double().t())


def test_interpreter_wrong_arguments_are_named():
    x, weight, config = torch.randn(4, 16), torch.randn(8, 16), list(SMALL.values())

    def call(x=x, weight=weight, bias=None, residual=None, name="", config=config):
        return torch.ops.stof.fused_linear(x, weight, bias, residual, None, name, config)

    for reason, wrong in {
        "weight must be": {"weight": torch.randn(8, 17)},
        "unit stride": {"weight": torch.randn(8, 32)[:, ::2]},
        "x's dtype": {"bias": torch.randn(8).half()},
        "bias must be": {"bias": torch.randn(9)},
        "as many rows": {"residual": torch.randn(5, 8)},
        "activation must be": {"name": "swish"},
        "power of two": {"config": [24, *config[1:]]},
        "split_k must": {"config": [*config[:6], 99, 0, 0]},
        "fp16, bf16": {"x": x.double()},
    }.items():
        with pytest.raises(ValueError, match=reason):
            call(**wrong)


def test_interpreter_passes_opcheck():
    x, weight, bias = torch.randn(2, 6, 16), torch.randn(8, 16), torch.randn(8)
    residual, config = torch.randn(2, 6, 8), list(SMALL.values())
    operator = torch.ops.stof.fused_linear
    check_operator(operator, x, weight, bias, residual, None, "gelu", config)


def marked(x, weight, config, residual=None, bias=None, mark=16):
    marks = torch.zeros(48, dtype=torch.int32)
    given = (x, weight, bias, residual, None, "", list((SMALL | config).values()))
    out = torch.ops.stof.fused_linear_marked(*given, marks, mark)
    plain = torch.ops.stof.fused_linear(*given)
    torch.testing.assert_close(out, plain, rtol=0, atol=0, equal_nan=True)
    assert not [i for i in range(48) if i != mark and marks[i]], "another word was written"
    return out, int(marks[mark])


@pytest.mark.parametrize(
    ("sizes", "config", "dtype"),
    [
        ((33, 40, 72), {}, HALF),
        ((33, 40, 72), {"split_k": 3}, SINGLE),
        ((64, 64, 64), {"block_n": 64, "block_m": 64}, HALF),
        ((40, 200, 64), {"block_m": 128, "block_n": 128, "persistent": 1, "block_k": 32}, HALF),
    ],
    ids=["ragged", "split, fp32", "even", "persistent pieces"],
)
def test_interpreter_marks_infinities(sizes, config, dtype):
    m, n, k = sizes
    x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    residual = torch.randn(m, n).to(dtype)
    assert marked(x, weight, config, residual)[1] == 0
    largest = torch.finfo(dtype).max
    for place, number in (((0, 0), torch.inf), ((m - 1, n - 1), -torch.inf)):
        held = residual.clone()
        held[place] = number
        assert marked(x, weight, config, held)[1] == 1
    residual[m // 2, n // 3], residual[0, n - 1] = torch.nan, largest  # which stays finite
    assert marked(x * 0, weight, config, residual)[1] == 0
    x[m - 1] = largest / 64  # finite operands, an infinity when the result is rounded
    out, seen = marked(x, weight.abs() + 1, config, mark=0)
    assert out.isinf().any() and seen == 1


def test_interpreter_marks_nothing_outside_of_the_result():
    x, weight = torch.randn(20, 16), torch.randn(24, 16)
    bias = torch.full((24,), torch.inf)
    residual = torch.full((20, 24), -torch.inf)  # NaN together; the rows beyond have no residual
    out, seen = marked(x, weight, {"block_m": 64, "block_n": 64}, residual, bias)
    assert out.isnan().all() and seen == 0


def test_interpreter_wrong_marks_are_named():
    x, weight, config = torch.randn(4, 16), torch.randn(8, 16), list(SMALL.values())
    words = torch.zeros(32, dtype=torch.int32)
    for reason, marks, mark in (
        ("int32", words.long(), 0), ("contiguous", words[::2], 0), ("vector", words[None], 0),
        ("multiple of 16", words, 8), ("below 32", words, 32), ("multiple", words, -16),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            torch.ops.stof.fused_linear_marked(x, weight, None, None, None, "", config, marks, mark)


def test_interpreter_marking_passes_opcheck():
    x, weight, residual = torch.randn(2, 6, 16), torch.randn(8, 16), torch.randn(2, 6, 8)
    operator, config = torch.ops.stof.fused_linear_marked, list(SMALL.values())
    marks = torch.zeros(32, dtype=torch.int32)
    check_operator(operator, x, weight, None, residual, None, "", config, marks, 16)
