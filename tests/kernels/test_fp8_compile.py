"""The block-wise kernel on e4m3 operands compiles for GPUs that are not here, without spills."""

import re

import pytest
import torch

pytest.importorskip("triton")

from compile_targets import FULL
from compiling import assert_fits, compile_block, offered_on
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.block_tiles import NARROW
from stof_compile.kernels.problem import band_flags, score_constants

pytestmark = pytest.mark.compile_only

E4M3 = torch.float8_e4m3fn
FAR = 1 << 30
SLIDING = [-32, 32, 0, 0, FAR]
KINDS = {
    "lists": ({"narrow": True}, []),
    "lists of a band": ({}, [-22, 22, 22, 22, FAR]),
    "band": ({"is_band": True, "narrow": True}, SLIDING),
    "few rows": ({"is_band": True, "q_len": 128, "planes": 12}, [-32, 32, 32, 32, FAR]),
}
TARGETS = (89, 90, 100)


def needed(target, head_dim, config, **changes):
    return compile_block(target, head_dim, E4M3, config, **changes)[1]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_offered_configs(target, head_dim, kind):
    """All of them on sm_90; else one of each tile, the deepest pipeline, to save time."""
    facts, band = KINDS[kind]
    offered = offered_on(target, head_dim, E4M3, **facts)
    if not FULL and target != 90:
        deepest = sorted(offered, key=lambda config: -config.num_stages)
        offered = list({config[:3]: config for config in reversed(deepest)}.values())
    for config in offered:
        assert_fits(needed(target, head_dim, config, **band_flags(band)), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [16, 48, 80, 96])
def test_first_config_of_other_head_dims(target, head_dim):
    config = offered_on(target, head_dim, E4M3)[0]
    assert_fits(needed(target, head_dim, config), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("loops", [3, 5])
def test_in_pieces(target, head_dim, loops):
    if loops == 5 and head_dim > 64:
        pytest.skip("the launcher takes loops 3 there")
    config = offered_on(target, head_dim, E4M3)[0]._replace(loops=loops)
    assert_fits(needed(target, head_dim, config, SPLIT=True), target)


@pytest.mark.parametrize("target", TARGETS)
def test_all_features_at_once(target):
    changes = {
        "EVEN_Q": False, "EVEN_K": False, "HAS_PADDING": True, "HAS_BIAS": True,
        "RETURN_LSE": True, "SINGLE_PLANE": False, "GROUP": 4,
        **score_constants(0.125, 30.0, True),
    }  # fmt: skip
    assert_fits(needed(target, 64, BlockConfig(64, 64, 8, 2, 3), **changes), target)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile", [(64, 64, 4), (128, 64, 8), NARROW])
@pytest.mark.parametrize("even", [True, False], ids=["even", "ragged"])
def test_hopper_multiplies_e4m3_as_it_lies_in_memory(head_dim, tile, even):
    """Both products are of e4m3; k and v come in 16 bytes at a time and are never put in order."""
    config = BlockConfig(*tile, 2, 3)
    compiled, found = compile_block(90, head_dim, E4M3, config, EVEN_Q=even, EVEN_K=even)
    assert_fits(found, 90)
    products = set(re.findall(r"wgmma\.mma_async\S+", compiled.asm["ptx"]))
    sizes = f"n{tile[1]}k32", f"n{head_dim}k32", "n16k32"  # the last adds up weights
    assert products == {f"wgmma.mma_async.sync.aligned.m64{size}.f32.e4m3.e4m3" for size in sizes}
    code = compiled.asm["ttgir"]
    loads = [line for line in code.splitlines() if "async_copy_global_to_local" in line]
    wide = [line for line in loads if "f8E4M3FN" in line and "x16x!tt.ptr" not in line]
    assert len(wide) >= 4 and all("contiguity = 16" in line for line in wide)
    ones = [line for line in loads if "x16x!tt.ptr<f8E4M3FN>" in line]  # too few for 16 bytes each
    assert len(ones) >= 2
    for line in code.splitlines():
        if "f8E4M3FN" in line:  # the weights alone pass from registers to registers
            assert "local_store" not in line and "tt.trans" not in line
            assert "local_load" not in line
