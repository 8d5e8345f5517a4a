"""The linear template for Hopper: what it takes, its code, and on a GPU its results."""

import itertools

import pytest
import torch
from close import assert_close
from recipes import A100, H200, linear_recipe, random_operands
from stof_compile.templates.hopper_linear import DIMS, HopperLinear

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


@pytest.mark.parametrize("k", [64, 72, 768])
def test_the_first_config_is_in_the_space_and_the_kernel_takes_all(k):
    from stof_compile.kernels.hopper_linear import TILES, HopperLinearConfig, config_refusal

    recipe = linear_recipe(m=4096, n=768, k=k, activation="gelu")
    assert TEMPLATE.refusal(recipe, H200) is None
    configs = TEMPLATE.space(recipe, H200).configs()
    assert TEMPLATE.first(recipe, H200) in configs
    chosen = [HopperLinearConfig(*TEMPLATE.build(recipe, c).args[-1]) for c in configs]
    assert [config_refusal(c) for c in chosen] == [None] * len(chosen)
    assert {c[:2] for c in chosen} == set(TILES)
    # nor is any left out that the kernel takes
    every = itertools.product(*DIMS.values())
    taken = [c for c in every if config_refusal(HopperLinearConfig(*c)) is None]
    assert sorted(taken) == sorted(chosen)


# -- on a GPU -------------------------------------------------------------------------------------

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
# tiles of 128 x 128 on 132 programs, for instance: five or six for each, or none for most
CASES = {
    "gelu": {"activation": "gelu"},
    "residual": {"residual": True},
    "plain": {"bias": False},
    "relu, tiles for few programs": {"m": 520, "n": 264, "activation": "relu"},
    "many tiles of two steps": {"m": 9000, "n": 2304, "k": 72, "activation": "silu"},
    "one step, residual": {"m": 4097, "n": 1032, "k": 64, "residual": True, "bias": False},
    "silu, residual, [K, N]": {"activation": "silu", "residual": True, "kn": True},
    "ragged": {"m": 1000, "n": 776, "k": 328, "activation": "gelu_tanh", "bias": False},
    "narrow, [K, N]": {"m": 20000, "n": 72, "k": 200, "activation": "gelu", "kn": True},
}


def poisoned(shape, dtype):
    """Leave NaN in the memory that the next result of this size gets."""
    junk = torch.full(shape, torch.nan, device="cuda", dtype=dtype)
    del junk


def deep(recipe):
    """The config with the deepest ring of each tile."""
    space = TEMPLATE.space(recipe, H200).configs()
    return {(c["block_m"], c["block_n"]): c for c in space if c["group_m"] == 8}.values()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_results(case, dtype):
    recipe = linear_recipe(**{"m": 4096, "n": 3072, "k": 768, "dtype": dtype, **CASES[case]})
    assert TEMPLATE.refusal(recipe, H200) is None
    operands = random_operands(recipe)
    expected = run_recipe(recipe, operands, torch.float64)
    for config in deep(recipe):
        poisoned(expected.shape, dtype)
        out = TEMPLATE.build(recipe, config).run(operands)
        assert_close(out, expected, dtype, scale=2.0)


@pytest.mark.gpu
@on_hopper
def test_every_run_of_every_config_gives_the_same():
    """The sums are added in one order: a difference is a race."""
    recipe = linear_recipe(m=4096, n=2304, k=768, activation="gelu", residual=True)
    operands = random_operands(recipe)
    expected = run_recipe(recipe, operands, torch.float64)
    for config in TEMPLATE.space(recipe, H200).configs():
        call = TEMPLATE.build(recipe, config)
        first = call.run(operands)
        assert_close(first, expected, torch.float16, scale=2.0)
        for _ in range(20):
            poisoned(expected.shape, torch.float16)
            assert torch.equal(call.run(operands), first), config


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
def test_infinities_and_not_a_number(activation):
    recipe = linear_recipe(m=1024, n=768, k=768, activation=activation, dtype=torch.bfloat16)
    operands = random_operands(recipe)
    operands[2][:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -3e4])
    operands[0][7] = torch.nan
    out = TEMPLATE.build(recipe, TEMPLATE.first(recipe, H200)).run(operands)
    assert_close(out, run_recipe(recipe, operands, torch.float64), scale=2.0)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", ["plain", "one step, residual", "ragged"])
def test_marks(case):
    """The same result, and a word that is written where it holds an infinity."""
    form = {"m": 4096, "n": 3072, "k": 768, **CASES[case], "bias": False}
    recipe = linear_recipe(**form)
    operands = random_operands(recipe)
    rows, columns = form["m"], form["n"]
    for config in deep(recipe):
        call = TEMPLATE.build(recipe, config)
        x, weight, *residual = operands
        how = (form.get("activation", ""), list(config.values()))
        for place in (None, (0, 0), (rows - 1, columns - 1), (rows // 2, 1)):
            given = [x.clone(), weight]
            if place is not None:
                given[0][place[0]] = torch.where(weight[place[1]] >= 0, 6e4, -6e4).to(x.dtype)
            for mark in (0, 32, 32):
                marks = torch.zeros(48, dtype=torch.int32, device="cuda")
                poisoned((rows, columns), x.dtype)
                out = torch.ops.stof.hopper_linear_marked(
                    *given, residual[0] if residual else None, *how, marks, mark
                )
                assert torch.equal(out, call.run([*given, *residual]))
                seen = bool(out.isinf().any())
                assert seen == (place is not None)
                assert marks.nonzero().flatten().tolist() == [mark] * seen


@pytest.mark.gpu
@on_hopper
def test_operands_that_tma_cannot_address():
    recipe = linear_recipe(m=1000, n=776, k=776, activation="gelu", residual=True)
    operands = random_operands(recipe)
    expected = run_recipe(recipe, operands, torch.float64)
    x, weight, bias, residual = operands
    shifted = [torch.cat([t[..., :1], t], -1)[..., 1:] for t in operands]
    wide = [torch.cat([t, t[..., :1]], -1)[..., :-1] for t in operands]
    sideways = [t.t().contiguous().t() for t in (x, weight, residual)]
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, H200))
    bias_apart = bias.repeat_interleave(2)[::2]
    for strange in (shifted, wide, [*sideways[:2], bias_apart, sideways[2]]):
        assert_close(call.run(strange), expected, torch.float16, scale=2.0)


@pytest.mark.gpu
@on_hopper
def test_in_a_cuda_graph():
    recipe = linear_recipe(m=2048, n=768, k=768, activation="gelu", residual=True)
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, H200))
    operands = random_operands(recipe)
    call.run(operands)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(operands)
    for seed in (1, 2):
        for held, new in zip(operands, random_operands(recipe, seed=seed), strict=True):
            held.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, run_recipe(recipe, operands, torch.float64), torch.float16, scale=2.0)


@pytest.mark.gpu
@on_hopper
def test_compiled_and_not_a_number():
    recipe = linear_recipe(m=2048, n=768, k=768, activation="relu", residual=True)
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, H200))
    operands = random_operands(recipe)
    operands[0][5] = torch.nan
    compiled = torch.compile(lambda *o: call.run(o), fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        out = compiled(*operands)
    assert out[5].isnan().all() and out[:5].isfinite().all() and out[6:].isfinite().all()


# -- without one ----------------------------------------------------------------------------------


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("block_m", "block_n", "stages", "activation", "residual", "kn", "bias", "dtype"),
    [
        (128, 128, 5, "gelu", False, False, True, "fp16"),
        (128, 128, 5, "gelu", False, False, False, "bf16"),
        (128, 128, 5, "gelu", True, False, True, "bf16"),
        (128, 128, 5, "gelu_tanh", True, False, True, "fp16"),
        (128, 128, 5, "", True, True, True, "fp16"),
        (64, 256, 4, "gelu", True, False, True, "fp16"),
        (64, 128, 6, "silu", True, False, True, "fp16"),
    ],
)
def test_it_compiles_without_spills(
    block_m, block_n, stages, activation, residual, kn, bias, dtype
):
    pytest.importorskip("triton")
    from compiling import compile_descriptors, needs
    from stof_compile.kernels.hopper_linear import CONSUMER_REGISTERS, REGISTERS
    from stof_compile.kernels.hopper_linear_kernel import hopper_linear_kernel
    from triton.experimental.gluon import language as gl

    tiles, vector = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(0, 16, rank=2)
    half = block_n // 2
    blocks = {
        "x_desc": (block_m, 64, tiles),
        "w_desc": (64, block_n, tiles) if kn else (block_n, 64, tiles),
        "bias_desc": (1, half, vector),
        "residual_desc": (block_m, half, tiles),
        "out_desc": (block_m, half, tiles),
    }
    constants = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64, "STAGES": stages,
        "ACTIVATION": activation, "HAS_BIAS": bias, "HAS_RESIDUAL": residual, "WEIGHT_KN": kn,
        "REGISTERS": CONSUMER_REGISTERS,
    }  # fmt: skip
    compiled = compile_descriptors(
        hopper_linear_kernel, 90, blocks, {}, constants, 4, REGISTERS, dtype
    )
    found = needs(compiled, 90)
    assert found.spill_bytes == 0 and found.shared_bytes <= 232448


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("block_m", "block_n", "stages", "residual", "kn"),
    [(128, 128, 5, True, False), (64, 256, 4, True, True), (64, 128, 6, False, False)],
)
def test_it_marks_without_spills(block_m, block_n, stages, residual, kn):
    pytest.importorskip("triton")
    from compiling import compile_descriptors, needs
    from stof_compile.kernels.hopper_linear import CONSUMER_REGISTERS, REGISTERS
    from stof_compile.kernels.hopper_linear_kernel import hopper_linear_marking_kernel
    from triton.experimental.gluon import language as gl

    tiles, half = gl.NVMMASharedLayout(128, 16, rank=2), block_n // 2
    blocks = {
        "x_desc": (block_m, 64, tiles),
        "w_desc": (64, block_n, tiles) if kn else (block_n, 64, tiles),
        "residual_desc": (block_m, half, tiles),
        "out_desc": (block_m, half, tiles),
    }
    constants = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64, "STAGES": stages, "ACTIVATION": "",
        "HAS_RESIDUAL": residual, "WEIGHT_KN": kn, "REGISTERS": CONSUMER_REGISTERS,
    }  # fmt: skip
    compiled = compile_descriptors(
        hopper_linear_marking_kernel, 90, blocks, {"mark": "*i32"}, constants, 4, REGISTERS
    )
    assert "global.gpu.relaxed.or" in compiled.asm["ptx"]
    found = needs(compiled, 90)
    assert found.spill_bytes == 0 and found.shared_bytes <= 232448
