"""The backward kernels compile for GPUs that are not here, without spills and within their memory.

STOF_FULL_COMPILE=1 adds every head dim and dtype everywhere.
"""

import pytest
import torch

pytest.importorskip("triton")

from compile_targets import CUDA, FULL
from compiling import GFX942, compile_kernel, needs
from stof_compile.kernels import limits
from stof_compile.kernels.attention_backward import pieces
from stof_compile.kernels.backward_key_kernel import attention_backward_key_kernel
from stof_compile.kernels.backward_query_kernel import attention_backward_query_kernel
from stof_compile.kernels.problem import band_flags, next_power_of_two, score_constants

pytestmark = pytest.mark.compile_only

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
NAMES = {HALF: "fp16", BRAIN: "bf16", SINGLE: "fp32"}
FAR = 1 << 30
SLIDING = [-32, 32, 0, 0, FAR]
KERNELS = {"query": attention_backward_query_kernel, "key": attention_backward_key_kernel}


def pieces_on(target, head_dim, dtype, tile, few):
    """A build of torch for ROCm reports gfx942 as capability 9.4."""
    with pytest.MonkeyPatch.context() as patch:
        if target == GFX942:
            patch.setattr(torch.version, "hip", "6.4")
        capability = (9, 4) if target == GFX942 else divmod(target, 10)
        sizes = pieces(head_dim, head_dim, dtype, capability, few)
    return [
        piece._replace(block_q=min(piece.block_q, tile[0]), block_k=min(piece.block_k, tile[1]))
        for piece in sizes
    ]


def precision_on(target, dtype, width):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4" if target == GFX942 else None)
        return limits.exact_products(width) if dtype == SINGLE else "ieee"


def compile_backward(kernel, target, head_dim, dtype, band=(), tile=(64, 64), few=False, **changes):
    by_query, by_key = pieces_on(target, head_dim, dtype, tile, few)
    piece = by_query if kernel == "query" else by_key
    width = next_power_of_two(head_dim)
    values = {
        **score_constants(head_dim**-0.5, 0.0, changes.get("HAS_BIAS", False)),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": head_dim,
        "TILE_M": tile[0],
        "TILE_N": tile[1],
        "BLOCK_M": piece.block_q,
        "BLOCK_N": piece.block_k,
        "BLOCK_D": width,
        "BLOCK_DV": width,
        "GROUP": 1,
        "VEC": 4 if dtype == SINGLE else 8,
        "PRECISION": precision_on(target, dtype, width),
        "EVEN_K": True,
        "HAS_PADDING": False,
        "HAS_BIAS": False,
        "SINGLE_PLANE": True,
        "HAS_PART": True,
        **band_flags(list(band)),
        **changes,
    }
    values["STATS_N"] = by_key.stats_per_row
    own = {"HAS_GRAD_LSE": False, "STATS_M": by_key.block_q}
    values |= own if kernel == "query" else {"EVEN_Q": True}
    compiled = compile_kernel(
        KERNELS[kernel], target, NAMES[dtype], values, piece.num_warps, piece.num_stages,
        piece.registers,
    )  # fmt: skip
    return compiled, needs(compiled, target)


def assert_fits(found, target):
    limit = 65536 if target == GFX942 else limits.shared_memory_limit(divmod(target, 10))
    assert found.shared_bytes <= limit
    assert found.spill_bytes == 0, f"{found.spill_bytes} bytes spilled"


@pytest.mark.parametrize("target", [*CUDA, GFX942])
@pytest.mark.parametrize("kernel", KERNELS)
def test_pieces_fit(kernel, target):
    assert_fits(compile_backward(kernel, target, 64, HALF)[1], target)


@pytest.mark.parametrize(
    ("target", "head_dim", "dtype"),
    [
        (80, 128, BRAIN), (90, 128, BRAIN), (100, 128, BRAIN), (90, 80, HALF), (86, 256, HALF),
        (90, 256, HALF), (GFX942, 256, HALF), (90, 64, SINGLE), (90, 256, SINGLE),
        (80, 128, SINGLE), (GFX942, 64, SINGLE),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kernel", KERNELS)
def test_pieces_of_other_operands_fit(kernel, target, head_dim, dtype):
    assert_fits(compile_backward(kernel, target, head_dim, dtype)[1], target)


@pytest.mark.parametrize(("target", "head_dim"), [(80, 64), (90, 64), (90, 96), (90, 128)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_pieces_of_a_band_fit(kernel, target, head_dim):
    assert_fits(compile_backward(kernel, target, head_dim, HALF, SLIDING)[1], target)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("band", [(), SLIDING], ids=["bitmap", "band"])
def test_pieces_of_few_tiles_fit(head_dim, band):
    assert_fits(compile_backward("query", 90, head_dim, HALF, band, few=True)[1], 90)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_smallest_tiles_fit(kernel):
    assert_fits(compile_backward(kernel, 90, 64, HALF, tile=(16, 16))[1], 90)


@pytest.mark.parametrize("target", [80, 90, GFX942])
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_features_at_once(kernel, target):
    changes = {
        "EVEN_K": False, "HAS_PADDING": True, "HAS_BIAS": True, "SINGLE_PLANE": False, "GROUP": 4,
        **score_constants(0.125, 30.0, True),
    }  # fmt: skip
    found = compile_backward(kernel, target, 64, BRAIN, **changes)[1]
    limit = 65536 if target == GFX942 else limits.shared_memory_limit(divmod(target, 10))
    assert found.shared_bytes <= limit


@pytest.mark.parametrize("kernel", KERNELS)
def test_hopper_loads_are_pipelined_and_products_are_of_warp_groups(kernel):
    text = compile_backward(kernel, 90, 64, HALF)[0].asm["ttgir"]
    assert "async_copy_global_to_local" in text and "warp_group_dot" in text


@pytest.mark.skipif(not FULL, reason="takes an hour; set STOF_FULL_COMPILE=1")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", [*CUDA, GFX942])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 80, 96, 128, 192, 256])
def test_everywhere(target, head_dim):
    """Slow: skipped unless STOF_FULL_COMPILE=1 is set. Lists all that fails."""
    failed = []
    for dtype in (HALF, SINGLE):
        for kernel in KERNELS:
            for band in ((), SLIDING):
                found = compile_backward(kernel, target, head_dim, dtype, band)[1]
                try:
                    assert_fits(found, target)
                except AssertionError:
                    failed.append((dtype, kernel, band, found))
    assert not failed, "\n".join(map(str, failed))
