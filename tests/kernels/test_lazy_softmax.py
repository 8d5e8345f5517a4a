"""The block-wise kernel with a maximum that lags behind: its code for Hopper, and its results."""

import re

import pytest
import torch
from close import assert_close
from stof_compile.kernels import softmax
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.problem import band_flags
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.masks.block_mask import build_block_mask

HALF, BRAIN, FAR = torch.float16, torch.bfloat16, 1 << 30
BANDS = {5: [], 3: [], 6: [-32, 32, 0, 0, FAR], 7: [-32, 32, 32, 32, FAR]}


def limit(block_k, loops):
    """Registers: five programs at a time, four, three."""
    return 88 if block_k == 32 else 128 if loops == 5 else 168


LAYOUT = re.compile(r"#(\w+) = #ttg.nvidia_mma<\{versionMajor = 3, .*warpsPerCTA = \[4, 1\]")


def test_torch_can_copy_the_assembly_into_its_code():
    """Between quotes that are not raw."""
    for text in (softmax.RESCALE_32, softmax.RESCALE_64):
        assert "\\" not in repr(text.value)


@pytest.mark.compile_only
@pytest.mark.parametrize("loops", BANDS)
@pytest.mark.parametrize("block_k", [32, 64])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_code(block_k, loops, dtype):
    """Nothing is spilled, a warp has 16 rows of the result, and sums cross no threads in a loop."""
    from compiling import assert_fits, compile_block

    config = BlockConfig(64, block_k, 4, 3, loops, registers=limit(block_k, loops))
    compiled, found = compile_block(90, 64, dtype, config, **band_flags(BANDS[loops]))
    assert_fits(found, 90)
    assert found.registers <= limit(block_k, loops)
    text = compiled.asm["ttgir"]
    rows_by_warp = set(LAYOUT.findall(text))
    rescaled = [line for line in text.splitlines() if "tt.elementwise_inline_asm" in line]
    rescaled = [line for line in rescaled if "vote.sync" in line]
    assert rescaled and all(
        re.search(r"-> tensor<64x64xf32, #(\w+)>", line).group(1) in rows_by_warp
        for line in rescaled
    )
    code = compiled.asm["ptx"]
    assert code.count("vote.sync.any") == len(rescaled)
    # maxima of two rows over the four threads that hold them, sums once at the end; no conversion
    assert code.count("shfl.sync.bfly") == 4 * len(rescaled) + 4 and "shfl.sync.idx" not in code


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["sliding", "bigbird", "causal window", "planes"])
@pytest.mark.parametrize("block_k", [32, 64])
@pytest.mark.parametrize(("head_dim", "group", "dtype"), [(64, 1, HALF), (48, 4, BRAIN)])
@pytest.mark.parametrize("heads_fast", [0, 1])
def test_gpu(rule, block_k, head_dim, group, dtype, heads_fast):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    batch, heads, length = 2, 4, 384
    device = torch.device("cuda")
    keep = torch.rand(batch, heads, length, length) < 0.05
    keep[:, :, 70:90] = False  # rows without keys
    spec = {
        "sliding": masks.sliding_window(33),
        "bigbird": masks.bigbird(window=24, global_tokens=17, random_fill=0.2),
        "causal window": masks.sliding_window(40) & masks.causal(),
        "planes": masks.from_tensor(keep),
    }[rule]
    mask = build_block_mask(
        spec, length, length, (64, block_k), batch=batch, heads=heads, device=device
    )
    rule = mask.band
    band = [] if rule is None else [rule.lo, rule.hi, rule.global_q, rule.global_k, rule.cap]
    dense = mask.to_dense()
    for loops in (3, 5, 7) if mask.is_band else (3, 5):
        asked = BlockConfig(
            64, block_k, 4, 3, loops, heads_fast=heads_fast, registers=limit(block_k, loops)
        )
        config = honest_config(mask, asked, batch * heads)
        arrays = mask_arrays(mask, config).values()
        for number in range(3):
            q = torch.randn(batch, heads, length, head_dim, device=device, dtype=dtype)
            if number == 1:
                q *= 16  # maxima that grow beyond the slack, tile after tile
            k, v = torch.randn(
                2, batch, heads // group, length, head_dim, device=device, dtype=dtype
            )
            if number == 2:  # of single rows, late
                k[:, :, -64:] *= 8
                q[:, :, ::16] *= 8
            expected = attention_reference(
                q.double(), k.double(), v.double(), dense, None, None, head_dim**-0.5
            )
            out, _ = torch.ops.stof.attention_block(
                q, k, v, *arrays, None, None, head_dim**-0.5, 0.0, 0, band, config, False
            )
            assert_close(out, expected, dtype)
