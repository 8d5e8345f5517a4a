"""The kernels compile for GPUs that are not here, without spills and within their shared memory."""

import pytest
import torch

pytest.importorskip("triton")

from compiling import GFX942, compile_kernel, needs
from stof_compile.kernels import attention_blockwise, attention_rowwise, blockwise_kernel, limits
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.problem import band_flags, next_power_of_two, score_constants

pytestmark = pytest.mark.compile_only

CUDA = (80, 86, 89, 90, 100)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
NAMES = {HALF: "fp16", BRAIN: "bf16", SINGLE: "fp32"}
FAR = 1 << 30
SLIDING = [-32, 32, 0, 0, FAR]


def constants(head_dim, block_q, block_k, **changes):
    width = next_power_of_two(head_dim)
    return {
        **score_constants(head_dim**-0.5, 0.0, changes.get("HAS_BIAS", False)),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": head_dim,
        "BLOCK_M": block_q,
        "BLOCK_N": block_k,
        "BLOCK_D": width,
        "BLOCK_DV": width,
        "GROUP": 1,
        "VEC": 8,
        "PRECISION": "ieee",
        "HAS_PADDING": False,
        "HAS_BIAS": False,
        "RETURN_LSE": False,
        "SINGLE_PLANE": True,
        "HEADS_FAST": False,
        **band_flags([]),
        **changes,
    }


def compile_block(target, head_dim, dtype, config, **changes):
    changes = {"EVEN_Q": True, "EVEN_K": True, "HEAVY_FIRST": bool(config.heavy_first), **changes}
    values = constants(head_dim, config.block_q, config.block_k, **changes)
    values |= {"LOOPS": config.loops, "PREFETCH": bool(config.prefetch)}
    compiled = compile_kernel(
        blockwise_kernel.attention_block_kernel, target, NAMES[dtype], values,
        config.num_warps, config.num_stages,
    )  # fmt: skip
    return compiled, needs(compiled, target)


def assert_fits(found, target):
    limit = 65536 if target == GFX942 else limits.shared_memory_limit(divmod(target, 10))
    assert found.shared_bytes <= limit
    assert found.spill_bytes == 0, f"{found.spill_bytes} bytes spilled"


@pytest.mark.parametrize("target", [*CUDA, GFX942])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, HALF), (80, BRAIN), (256, HALF), (64, SINGLE)]
)
def test_first_block_config(target, head_dim, dtype):
    capability = (8, 6) if target == GFX942 else divmod(target, 10)
    config = attention_blockwise.configs(head_dim, dtype, capability)[0]
    assert_fits(compile_block(target, head_dim, dtype, config)[1], target)


KINDS = {
    "lists": ({}, []),
    "band": ({"is_band": True}, SLIDING),
    "few rows": ({"is_band": True, "q_len": 128, "planes": 12}, [-32, 32, 32, 32, FAR]),
}


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_every_offered_block_config(target, head_dim, kind):
    facts, band = KINDS[kind]
    offered = attention_blockwise.configs(head_dim, HALF, divmod(target, 10), **facts)
    for config in dict.fromkeys(config._replace(heads_fast=0) for config in offered):
        found = compile_block(target, head_dim, HALF, config, **band_flags(band))[1]
        assert_fits(found, target)


@pytest.mark.parametrize("loops", [1, 2, 3, 4, 5, 6, 7])
def test_hopper_loads_are_pipelined_and_masks_stay_in_registers(loops):
    config = BlockConfig(64, 64, 4, 2, loops)
    compiled, found = compile_block(
        90, 64, HALF, config, **band_flags(SLIDING if loops > 5 else [])
    )
    assert_fits(found, 90)
    text = compiled.asm["ttgir"]
    assert "async_copy_global_to_local" in text and "warp_group_dot" in text
    # four programs of 128 threads share a multiprocessor's 65,536 registers; three with a branch
    assert found.registers <= (168 if loops in (5, 7) else 128)


@pytest.mark.parametrize("target", [80, 90, GFX942])
def test_all_features_at_once(target):
    changes = {
        "EVEN_Q": False, "EVEN_K": False, "HAS_PADDING": True, "HAS_BIAS": True,
        "RETURN_LSE": True, "SINGLE_PLANE": False, "GROUP": 4,
        **score_constants(0.125, 30.0, True),
    }  # fmt: skip
    found = compile_block(target, 64, BRAIN, BlockConfig(64, 64, 8, 2, 4), **changes)[1]
    limit = 65536 if target == GFX942 else limits.shared_memory_limit(divmod(target, 10))
    assert found.shared_bytes <= limit


@pytest.mark.parametrize("target", [80, 90, 100, GFX942])
@pytest.mark.parametrize(("group", "dtype"), [(1, HALF), (4, BRAIN)])
def test_first_row_config(target, group, dtype):
    config = attention_rowwise.configs(64, dtype, (8, 0))[0]
    values = constants(64, config.block_q, config.block_k, GROUP=group) | {
        "TILES": config.tiles,
        "KV_SHARE": 1,
        "LANES": 1 if group == 1 else next_power_of_two(group),
    }
    compiled = compile_kernel(
        attention_rowwise._attention_row_kernel, target, NAMES[dtype], values, config.num_warps,
        config.num_stages,
    )  # fmt: skip
    assert_fits(needs(compiled, target), target)


@pytest.mark.parametrize("kernel", ["block", "row"])
def test_torch_sees_that_only_the_results_are_written(kernel, monkeypatch):
    """A tensor taken for written would be cloned at every call of a compiled graph."""
    import triton
    from torch._higher_order_ops import triton_kernel_wrap as wrap
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    if kernel == "block":
        function = blockwise_kernel.attention_block_kernel
        values = constants(64, 64, 64, SINGLE_PLANE=False, RETURN_LSE=True) | {
            "EVEN_Q": False, "EVEN_K": False, "HEAVY_FIRST": True, "LOOPS": 4, "PREFETCH": True,
        }  # fmt: skip
    else:
        function = attention_rowwise._attention_row_kernel
        values = constants(64, 16, 16, SINGLE_PLANE=False, RETURN_LSE=True, GROUP=4)
        values |= {"TILES": 2, "KV_SHARE": 1, "LANES": 16}
    kinds = {"lse": torch.float32, "key_keep": torch.bool, "bitmap": torch.int64}
    with torch._subclasses.FakeTensorMode():
        arguments = {}
        for name in function.arg_names:
            if name in values:
                arguments[name] = values[name]
            elif name in ("q", "k", "v", "out", "bias"):
                arguments[name] = torch.empty(4, 4, dtype=HALF)
            elif name in kinds:
                arguments[name] = torch.empty(4, dtype=kinds[name])
            elif name.endswith(("_map", "_ptr", "_start", "_idx", "_id", "_order")):
                arguments[name] = torch.empty(4, dtype=torch.int32)
            else:
                arguments[name] = 64
        if hasattr(wrap, "identify_accessed_tensors"):
            accesses = wrap.identify_accessed_tensors(function, arguments, {})
            written = {dependency.name for dependency in accesses.read_writes.writes}
        else:
            written = set(wrap.identify_mutated_tensors(function, arguments, {}))
    assert written == {"out", "lse"}
