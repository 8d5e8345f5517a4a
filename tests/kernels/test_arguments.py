"""What the launchers refuse, and what they offer to be timed."""

import pytest
import torch
from stof_compile.kernels import limits
from stof_compile.kernels.problem import (
    TileMask,
    attention_bytes,
    attention_flops,
    band_flags,
    check_problem,
    score_constants,
)

from stof_compile import masks

Q = torch.randn(2, 4, 40, 16)
K = torch.randn(2, 2, 50, 16)
STORED = masks.build_block_mask(masks.causal(), 40, 50, 16)
ARRAYS = TileMask(*STORED.tensors)


def problem(q=Q, k=K, v=K, mask=ARRAYS, key_keep=None, bias=None, block=(16, 16)):
    return check_problem(q, k, v, mask, key_keep, bias, *block)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, "q must be"),
        ({"q": Q.double()}, "fp16, bf16 or fp32"),
        ({"k": K.half()}, "dtype of q"),
        ({"k": K[:, :, :, :8]}, "must agree"),
        ({"k": K[:1], "v": K[:1]}, "must agree"),
        ({"q": Q[:, :3]}, "multiple of k's"),
        ({"block": (24, 16)}, "power of two"),
        ({"block": (32, 16)}, "tile rows"),
        ({"block": (16, 32)}, "bitmap must be"),
        ({"mask": ARRAYS._replace(col_idx=ARRAYS.col_idx.long())}, "col_idx must be"),
        ({"mask": ARRAYS._replace(plane_map=torch.zeros(3, 1, dtype=torch.int32))}, "plane_map"),
        ({"key_keep": torch.ones(2, 50)}, "key_keep must be bool"),
        ({"key_keep": torch.ones(2, 40, dtype=torch.bool)}, "key_keep must be"),
        ({"bias": torch.ones(3, 1, 40, 50)}, "broadcast"),
        ({"bias": torch.ones(40, 50, dtype=torch.int32)}, "float"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        problem(**change)


def test_views_are_taken_without_a_copy():
    packed = torch.randn(2, 40, 3, 4, 16).permute(2, 0, 3, 1, 4)
    square = TileMask(*masks.build_block_mask(masks.causal(), 40, 40, 16).tensors)
    found = problem(*packed, mask=square)
    assert [t.data_ptr() for t in (found.q, found.k, found.v)] == [t.data_ptr() for t in packed]
    assert found.vec == 4
    assert problem(q=torch.randn(2, 4, 16, 40).transpose(2, 3)).q.is_contiguous()
    bias = torch.randn(1, 4, 40, 50)
    assert problem(bias=bias).bias is bias  # Inductor would copy what is indexed
    assert problem(bias=bias[0]).bias.shape == bias.shape
    odd = torch.randn(2, 4, 40, 18)
    assert problem(q=odd, k=torch.randn(2, 2, 50, 18), v=K).vec == 1


def test_band_flags_and_score_constants():
    far = 1 << 30
    assert not band_flags([])["BAND"]
    assert band_flags([-far, 0, 0, 4, far]) == {
        "BAND": True, "HAS_LO": False, "HAS_HI": True, "HAS_GLOBAL_Q": False,
        "HAS_GLOBAL_K": True, "HAS_CAP": False,
    }  # fmt: skip
    assert score_constants(0.5, 0.0, False)["LINEAR"]
    assert not score_constants(-0.5, 0.0, False)["LINEAR"]
    assert not score_constants(0.5, 30.0, False)["LINEAR"]


def test_work_and_traffic():
    assert attention_flops(2, 4, 10, 16) == 2 * 2 * 4 * 10 * 32
    expected = 2 * Q.numel() * 4 + 2 * K.numel() * 4 + STORED.nbytes
    assert attention_bytes(Q, K, K, ARRAYS) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 96, 128, 152, 192, 256])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_configs_fit_the_device(head_dim, dtype, capability):
    pytest.importorskip("triton")
    from stof_compile.kernels import attention_blockwise, attention_rowwise

    offered = attention_blockwise.configs(head_dim, dtype, capability)
    assert offered and len(set(offered)) == len(offered)
    width = sum(limits.product_widths(head_dim, capability, dtype.itemsize))
    for config in offered:
        used = limits.shared_memory_bytes(
            config.block_q, config.block_k, width, width, config.num_stages, dtype.itemsize
        )
        assert used <= limits.shared_memory_limit(capability)
    assert {
        c.loops for c in attention_blockwise.configs(64, dtype, capability, has_full=False)
    } == {1}
    assert {
        c.loops for c in attention_blockwise.configs(64, dtype, capability, has_part=False)
    } == {2}
    decode = attention_blockwise.configs(head_dim, dtype, capability, q_len=1)
    assert {c.block_q for c in decode} == {16}
    assert attention_rowwise.configs(head_dim, dtype, capability)


@pytest.mark.parametrize(
    ("dim", "widths"),
    [(64, (64, 0)), (128, (128, 0)), (129, (128, 16)), (152, (128, 32)), (192, (128, 64)),
     (193, (256, 0)), (256, (256, 0)), (300, (256, 64)), (500, (512, 0))],
)  # fmt: skip
def test_widths_of_products(dim, widths, monkeypatch):
    pytest.importorskip("triton")
    from stof_compile.kernels.limits import product_widths

    whole = sum(widths) if not widths[1] else 2 * widths[0]
    assert product_widths(dim, (9, 0)) == product_widths(dim, (10, 0)) == widths
    assert product_widths(dim, (8, 9)) == product_widths(dim, (12, 0)) == (whole, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert product_widths(dim, (9, 4)) == (whole, 0)


@pytest.mark.parametrize("kernel", ["block", "row"])
def test_configs_known_to_spill_are_not_offered(kernel):
    from stof_compile.kernels import attention_blockwise, attention_rowwise, limits

    module = {"block": attention_blockwise, "row": attention_rowwise}[kernel]
    dtypes = {1: torch.float8_e4m3fn, 2: torch.float16, 4: torch.float32}
    for (capability, head_dim, itemsize), spilling in limits._SPILLS[kernel].items():
        offered = module.configs(head_dim, dtypes[itemsize], capability)
        assert offered
        for config in offered:
            assert not any(tuple(config[: len(start)]) == start for start in spilling)
