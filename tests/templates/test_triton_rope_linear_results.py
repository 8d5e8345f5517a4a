"""Projections with rotary embeddings: results in the interpreter against the recipe in fp64.

bf16 is left to the GPU tests: the interpreter multiplies bf16 tiles as integers.
"""

import pytest
import torch
from close import assert_close
from linear_recipes import SMALL
from norm_recipes import HALF, SINGLE
from rope_recipes import rope_recipe
from stof_compile.templates.triton_rope_linear import TritonRopeLinear
from template_checks import HOPPER, check_operator, check_template

import stof_compile.ops_rope_linear  # noqa: F401

pytestmark = pytest.mark.interpreter

TEMPLATE = TritonRopeLinear()
NARROW = SMALL | {"block_n": 32}

CASES = {
    "GQA": ({}, {}),
    "bias": ({"bias": True, "kept": 0}, {}),
    "a table for each batch": ({"period": 66, "heads": (1, 1)}, {}),
    "one value, nothing kept": ({"heads": (3,), "kept": 0}, {"block_n": 64}),
    "tiles of rotated and kept heads": ({"heads": (2, 1), "kept": 2}, {"block_n": 64}),
    "two dimensions": ({"rows": (257,), "period": 257}, {"block_m": 32}),
    "one row": ({"rows": (1, 1)}, {}),
    "one row of tables": ({"rows": (3, 1)}, {}),
    "four dimensions": ({"rows": (2, 2, 5)}, {}),
    "strided rows": ({"strided": True}, {"block_k": 32}),
    "[K, N] weight": ({"kn": True, "bias": True}, {"block_k": 32, "block_n": 64}),
    "even": ({"rows": (2, 32), "k": 64, "heads": (1, 1), "kept": 0}, {"block_n": 64}),
    "pieces": ({"bias": True, "heads": (3, 2), "kept": 2}, {"block_m": 128, "block_n": 128}),
    "chunks": ({"dim": 64, "heads": (1,)}, {"block_m": 64, "block_n": 64}),
    "heads of 256": ({"dim": 256, "heads": (1,), "k": 40}, {"block_n": 256}),
    "split": ({"bias": True}, {"split_k": 3}),
    "split, ragged parts, pieces": ({"k": 200}, {"split_k": 7, "block_m": 64, "block_n": 64}),
    "persistent": ({"rows": (3, 67)}, {"persistent": 1}),
    "[K, N], copied": ({"kn": True}, {"depth_first": 1}),
    "persistent pieces": ({"rows": (257,), "heads": (3, 1)}, {"persistent": 1, "block_m": 128,
                          "block_n": 128, "block_k": 32}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_interpreter(case, dtype):
    form, config = CASES[case]
    recipe, operands = rope_recipe(dtype=dtype, **form)
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    check_template(TEMPLATE, recipe, operands, NARROW | config)


def test_interpreter_keeps_nan_and_infinities():
    recipe, operands = rope_recipe((6,), (1, 1), 2, 32, 16, dtype=SINGLE, bias=True)
    operands[2][torch.tensor([3, 40, 70, 100])] = torch.tensor(
        [float("nan"), float("inf"), float("nan"), float("-inf")]
    )
    operands[0][1, 3] = float("inf")
    operands[3][2, 7] = float("nan")
    for change in ({}, {"block_n": 64}, {"block_n": 128, "persistent": 1}):
        check_template(TEMPLATE, recipe, operands, NARROW | change)


def test_interpreter_empty_strided_tables_and_odd_inputs():
    x, weight, config = torch.randn(2, 6, 16), torch.randn(64, 16), list(NARROW.values())
    wide = torch.randn(2, 6, 48)
    cos, sin = wide[0, :, 8:40], wide[1].t()[:32].t().contiguous().t().contiguous().t()

    def reference(x, cos, sin):
        value = (x.double() @ weight.double().t()).view(*x.shape[:-1], 2, 32)
        low, high = value[..., :1, :16], value[..., :1, 16:]
        turned = value[..., :1, :] * cos.double()[:, None] + (
            torch.cat((-high, low), -1) * sin.double()[:, None]
        )
        return torch.cat((turned, value[..., 1:, :]), -2).reshape(*x.shape[:-1], 64)

    op = torch.ops.stof.fused_rope_linear
    out = op(x, weight, None, cos, sin, 32, 32, config)
    assert_close(out, reference(x, cos, sin))
    merged = torch.randn(6, 2, 16).transpose(0, 1)  # leading dimensions cannot be merged
    out = op(merged, weight, None, cos, sin, 32, 32, config)
    assert out.is_contiguous()
    assert_close(out, reference(merged, cos, sin))
    assert op(x[:0], weight, None, cos, sin, 32, 32, config).shape == (0, 6, 64)
    one = op(x[0, 0], weight, None, cos[:1], sin[:1], 32, 32, config)
    assert one.shape == (64,)


def test_interpreter_wrong_arguments_are_named():
    x, weight, config = torch.randn(6, 16), torch.randn(64, 16), list(NARROW.values())
    table = torch.randn(6, 32)

    def call(
        x=x, weight=weight, bias=None, cos=table, sin=table, dim=32, rotated=32, config=config
    ):
        return torch.ops.stof.fused_rope_linear(x, weight, bias, cos, sin, dim, rotated, config)

    for reason, wrong in {
        "weight must be": {"weight": torch.randn(64, 17)},
        "N must be a multiple": {"weight": torch.randn(48, 16)},
        "bias must be": {"bias": torch.randn(9)},
        "head_dim must be a power": {"dim": 24},
        "head_dim must be <=": {"dim": 512},
        "block_n must be a multiple": {"dim": 64},
        "rotated must be": {"rotated": 40},
        "rotated must be a multiple": {"rotated": 96},
        "cos must be": {"cos": torch.randn(6, 16)},
        "a multiple of the rows of sin": {"sin": torch.randn(4, 32)},
        "as many rows as cos": {"sin": torch.randn(3, 32)},
        "cos must have the dtype": {"cos": table.half()},
        "split_k must": {"config": [*config[:6], 99, 0, 0]},
        "fp16, bf16": {"x": x.double()},
    }.items():
        with pytest.raises(ValueError, match=reason):
            call(**wrong)


def test_interpreter_passes_opcheck():
    x, weight, bias = torch.randn(2, 6, 16), torch.randn(64, 16), torch.randn(64)
    cos, sin = torch.randn(2, 6, 32).unbind()
    operator = torch.ops.stof.fused_rope_linear
    check_operator(operator, x, weight, bias, cos, sin, 32, 32, list(NARROW.values()))
