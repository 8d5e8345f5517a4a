"""The linear template for Hopper: what it takes, its code, and on a GPU its results."""

import pytest
import torch
from close import assert_close
from recipes import A100, H200, linear_recipe, random_operands
from stof_compile.templates.hopper_linear import HopperLinear

from stof_compile.fusion.recipe import run_recipe

TEMPLATE = HopperLinear()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"m": 64}, "idle"),
        ({"n": 36}, "steps of 8"),
        ({"dtype": torch.float32}, "fp16"),
        ({"activation": "tanh"}, "epilogue"),
    ],
)
def test_what_it_refuses(changes, words):
    recipe = linear_recipe(**{"m": 1024, "n": 768, "k": 768, **changes})
    assert words in TEMPLATE.refusal(recipe, H200)


def test_other_gpus_are_refused():
    assert "Hopper" in TEMPLATE.refusal(linear_recipe(m=1024, n=768, k=768), A100)


@pytest.mark.parametrize("k", [128, 192, 768])
@pytest.mark.parametrize("activation", ["", "gelu"])
def test_the_first_config_is_in_the_space_and_the_kernel_takes_all(k, activation):
    from stof_compile.kernels.hopper_linear import HopperLinearConfig, config_refusal

    recipe = linear_recipe(m=4096, n=768, k=k, activation=activation)
    assert TEMPLATE.refusal(recipe, H200) is None
    configs = TEMPLATE.space(recipe, H200).configs()
    assert TEMPLATE.first(recipe, H200) in configs
    for config in configs:
        values = TEMPLATE.build(recipe, config).args[-1]
        assert config_refusal(HopperLinearConfig(*values), k, activation != "") is None


CASES = {
    "gelu": {"activation": "gelu"},
    "residual": {"residual": True},
    "plain": {"bias": False},
    "silu, residual, [K, N]": {"activation": "silu", "residual": True, "kn": True},
    "ragged": {"m": 1000, "n": 776, "k": 328, "activation": "gelu_tanh", "bias": False},
}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_results(case, dtype):
    recipe = linear_recipe(**{"m": 4096, "n": 3072, "k": 768, "dtype": dtype, **CASES[case]})
    assert TEMPLATE.refusal(recipe, H200) is None
    operands = random_operands(recipe)
    expected = run_recipe(recipe, operands, torch.float64)
    for config in TEMPLATE.space(recipe, H200).configs():
        junk = torch.full_like(expected, torch.nan, dtype=dtype)
        del junk  # its memory is the result's
        out = TEMPLATE.build(recipe, config).run(operands)
        assert_close(out, expected, dtype, scale=2.0)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
def test_compiled_and_not_a_number():
    recipe = linear_recipe(m=2048, n=768, k=768, activation="relu", residual=True)
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, H200))
    operands = random_operands(recipe)
    operands[0][5] = torch.nan
    compiled = torch.compile(lambda *o: call.run(o), fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        out = compiled(*operands)
    assert out[5].isnan().all() and out[:5].isfinite().all() and out[6:].isfinite().all()


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("block_m", "stages", "activation", "residual"),
    [(128, 5, "gelu", False), (128, 5, "", True), (256, 3, "silu", False), (128, 6, "", False)],
)
def test_it_compiles_without_spills(block_m, stages, activation, residual):
    pytest.importorskip("triton")
    from compiling import compile_descriptors, needs
    from stof_compile.kernels.hopper_linear import _REGISTERS, HopperLinearConfig, apart
    from stof_compile.kernels.hopper_linear_kernel import hopper_linear_kernel
    from triton.experimental.gluon import language as gl

    tiles, vector = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(0, 16, rank=2)
    blocks = {
        "x_desc": (block_m, 64, tiles), "w_desc": (128, 64, tiles),
        "bias_desc": (1, 128, vector), "out_desc": (block_m, 128, tiles),
    }  # fmt: skip
    config = HopperLinearConfig(block_m, 128, stages, 8)
    separate = apart(config, activation != "" or residual)
    finishers = 8 if separate else 4
    registers, finisher_registers = _REGISTERS[finishers]
    constants = {
        "BLOCK_M": block_m, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": stages, "GROUP_M": 8,
        "ACTIVATION": activation, "HAS_BIAS": True, "HAS_RESIDUAL": residual, "WEIGHT_KN": False,
        "APART": separate, "FINISHERS": finishers, "REGISTERS": finisher_registers,
    }  # fmt: skip
    compiled = compile_descriptors(
        hopper_linear_kernel, 90, blocks, {"residual": "*fp16"}, constants, 8, registers
    )
    found = needs(compiled, 90)
    assert found.spill_bytes == 0 and found.shared_bytes <= 232448
