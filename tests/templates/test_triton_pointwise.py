"""The pointwise template: what it accepts and offers, its programs and its operator."""

from dataclasses import replace

import pytest
import torch
from norm_recipes import INTERPRETED, MACHINES, SINGLE, machine, random
from pointwise_recipes import TEMPLATE, gelu_residual, one_step, program
from stof_compile.templates.triton_pointwise import POWERS
from template_checks import HOPPER, refusal_of

from stof_compile.fusion.recipe import ACTIVATIONS, BINARY, UNARY


def refused(rec, device=HOPPER):
    return refusal_of(TEMPLATE, rec.recipe(), device)


# -- what is accepted ------------------------------------------------------------------------------


def test_refusals_name_the_reason():
    x, w = (random(*s, dtype=SINGLE, device="cpu") for s in ((4, 6, 8), (8, 8)))
    fine = one_step("neg", x)
    assert TEMPLATE.refusal(fine.recipe(), HOPPER) is None
    assert "CUDA" in refused(fine, machine(90, kind="cpu", runtime="cpu"))
    assert "'linear'" in refused(one_step("linear", x, w))
    assert "'softmax'" in refused(one_step("softmax", x))
    assert "'reshape'" in refused(one_step("reshape", x, shape=(24, 8)))
    assert "exponent" in refused(one_step("pow", x, number=2.5, number_first=False))
    assert "exponent" in refused(one_step("pow", x.abs(), number=2.0, number_first=True))
    assert "exponent" in refused(one_step("pow", x.abs(), x))
    assert "not contiguous" in refused(one_step("neg", x.transpose(0, 1)))
    assert "broadcast inside" in refused(one_step("add", x, x[:, :1].contiguous()))
    assert "float64" in refused(one_step("neg", x.double()))
    assert "empty" in refused(one_step("neg", x[:0]))
    recipe = one_step("add", x, x[0]).recipe()
    elsewhere = (recipe.operands[0], replace(recipe.operands[1], device="meta"))
    assert "others are not" in TEMPLATE.refusal(replace(recipe, operands=elsewhere), HOPPER)


def test_all_steps_of_recipes_are_known():
    x = random(4, 8, dtype=SINGLE, device="cpu")
    for kind in UNARY:
        assert TEMPLATE.refusal(one_step(kind, x).recipe(), HOPPER) is None
    for name in ACTIVATIONS:
        assert TEMPLATE.refusal(one_step("activation", x, name=name).recipe(), HOPPER) is None
    for kind in set(BINARY) - {"pow"}:
        assert TEMPLATE.refusal(one_step(kind, x, x).recipe(), HOPPER) is None
    from stof_compile.kernels import pointwise_program as known

    assert set(known.UNARY) == set(UNARY) and set(known.ACTIVATIONS) == set(ACTIVATIONS)
    assert set(known.BINARY) == set(BINARY) - {"pow"} and set(known.POWERS) == set(POWERS)


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("rows", [1, 33, 128, 4096, 32768])
@pytest.mark.parametrize("n", [8, 768, 3072])
def test_spaces_are_small_and_hold_the_first(target, rows, n):
    recipe = gelu_residual((rows,), n, device="meta").recipe()
    device = machine(target)
    configs = TEMPLATE.space(recipe, device).configs()
    assert 1 <= len(configs) <= 30
    assert TEMPLATE.first(recipe, device) in configs


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "no dtype and steps"),
        ('{"dtype": "float16"}', "no dtype and steps"),
        ('{"dtype": "int8", "steps": [["neg", ["x0"], {}]]}', "dtype must be one of"),
        ('{"dtype": "float16", "steps": []}', "there must be a step"),
        ('{"dtype": "float16", "steps": [["neg", ["x1"], {}]]}', "may read x0 to x0"),
        ('{"dtype": "float16", "steps": [["neg", ["v0"], {}]]}', "may read"),
        ('{"dtype": "float16", "steps": [["neg", ["x0 + exit()"], {}]]}', "may read"),
        ('{"dtype": "float16", "steps": [["__import__", ["x0"], {}]]}', "step must be one of"),
        ('{"dtype": "float16", "steps": [["neg", ["x0", "x0"], {}]]}', "reads 1 values"),
        ('{"dtype": "float16", "steps": [["add", ["x0"], {}]]}', "reads 2 values"),
        ('{"dtype": "float16", "steps": [["activation", ["x0"], {"name": "elu"}]]}', "must be one"),
        ('{"dtype": "float16", "steps": [["cast", ["x0"], {"dtype": "int8"}]]}', "a cast goes to"),
        ('{"dtype": "float16", "steps": [["pow", ["x0"], {"number": 2.5}]]}', "pow must be one of"),
        ('{"dtype": "float16", "steps": [["maximum", ["x0"], {"number": 2}]]}', "a number stands"),
    ],
)
def test_programs_are_checked_before_they_become_code(text, message):
    from stof_compile.kernels.pointwise_program import read_program

    with pytest.raises(ValueError, match=message):
        read_program(text, 1)


def test_it_says_that_it_needs_a_gpu():
    if INTERPRETED:
        pytest.skip("the interpreter runs it on the CPU")
    text = program("neg", "x0", dtype="float32")
    with pytest.raises(ValueError, match="GPU"):
        torch.ops.stof.fused_pointwise([torch.randn(4)], text, [4], [128, 1])


def test_schema_is_the_documented_one():
    assert str(torch.ops.stof.fused_pointwise.default._schema) == (
        "stof::fused_pointwise(Tensor[] operands, str program, SymInt[] shape, SymInt[] config) "
        "-> Tensor"
    )


def test_torch_keys_its_caches_on_the_generated_source():
    """What AOTAutograd's cache reads of an operator's kernels, and that equal sources share one."""
    if INTERPRETED:
        pytest.skip("interpreted kernels have no source")
    from stof_compile.kernels import pointwise
    from torch._inductor.codegen.wrapper import (
        user_defined_triton_kernel_transitive_closure_source_code as source_code,
    )

    from stof_compile.launchers import load_launcher

    load_launcher("stof::fused_pointwise", "pointwise", "pointwise_forward")
    (kernel, _) = torch._library.triton.get_triton_kernels_for_op("stof::fused_pointwise")
    text = source_code(kernel)
    for kind in ("tl.erf", "tl.sqrt_rn", "COUNT3", "INNER2", "tl.bfloat16"):
        assert kind in text
    assert pointwise.kernel_of(
        "import triton\n\n\n@triton.jit\ndef pointwise_kernel(x):\n    pass\n"
    )
    source = "import triton\n\n\n@triton.jit\ndef pointwise_kernel(y):\n    return\n"
    assert pointwise.kernel_of(source) is pointwise.kernel_of(source)
