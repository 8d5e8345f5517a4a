"""Attention by hand that nothing was measured for, on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from stof_compile.kernels.reference import attention_reference

from stof_compile import attention_kernel, masks, sparse_attention
from stof_compile.attention import functional
from stof_compile.masks import BlockMask, build_block_mask, dense_tensor
from tests.close import assert_close

pytestmark = pytest.mark.gpu
HALF, SINGLE = torch.float16, torch.float32


@pytest.fixture
def sdpa_calls(monkeypatch):
    """What SDPA was asked for, by keyword."""
    calls = []
    real = F.scaled_dot_product_attention

    def ask(*operands, **how):
        calls.append(how)
        return real(*operands, **how)

    monkeypatch.setattr(functional.F, "scaled_dot_product_attention", ask)
    return calls


def operands(q_len, k_len, head_dim, heads=4, kv_heads=4, dtype=HALF):
    q = torch.randn(2, heads, q_len, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, k_len, head_dim, device="cuda", dtype=dtype)
    return q, k, v


def expected(q, k, v, rule, scale=None):
    keep = build_block_mask(rule, q.shape[2], k.shape[2], 64, device="cuda").to_dense()
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return attention_reference(q.double(), k.double(), v.double(), keep, None, None, scale)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 300), (100, 300), (300, 100), (1, 50)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gpu_causal_masks_are_left_to_sdpa(sdpa_calls, head_dim, lengths, kv_heads):
    q, k, v = operands(*lengths, head_dim, kv_heads=kv_heads)
    out = sparse_attention(q, k, v, masks.causal(), scale=0.2, enable_gqa=kv_heads != 4)
    left = kv_heads == 4 or lengths[0] == lengths[1]  # else SDPA has no fused kernel
    assert any(call.get("is_causal") for call in sdpa_calls) == left
    assert_close(out, expected(q, k, v, masks.causal(), 0.2), HALF)


def test_gpu_causal_masks_with_more_stay_with_the_kernels(sdpa_calls):
    q, k, v = operands(300, 300, 128)
    keep = torch.ones(2, 300, dtype=torch.bool, device="cuda")
    sparse_attention(q, k, v, masks.causal(), key_keep=keep)
    sparse_attention(q, k, v, masks.causal(), return_lse=True)
    sparse_attention(q, k, v, masks.causal(), softcap=3.0)
    sparse_attention(q, k, v, masks.causal(), scale=-0.1)
    sparse_attention(q, k, v, masks.causal(lower_right=True))
    with attention_kernel("block"):
        sparse_attention(q, k, v, masks.causal())
    assert not sdpa_calls
    with attention_kernel("sdpa"):
        out = sparse_attention(q, k, v, masks.causal())
    assert sdpa_calls.pop()["is_causal"]
    assert_close(out, expected(q, k, v, masks.causal()), HALF)


def test_gpu_a_dense_mask_of_fp32_is_made_once(sdpa_calls, monkeypatch):
    made = []
    real = BlockMask.to_dense
    monkeypatch.setattr(BlockMask, "to_dense", lambda self: made.append(1) or real(self))
    rule = masks.sliding_window(149)  # of no other test
    q, k, v = operands(300, 300, 256, dtype=SINGLE)
    for _ in range(3):
        out = sparse_attention(q, k, v, rule)
    assert len(sdpa_calls) == 3 and len(made) == 1
    assert_close(out, expected(q, k, v, rule), SINGLE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_attention(q, k, v, rule)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert_close(out, expected(q, k, v, rule), SINGLE)
    monkeypatch.setattr(dense_tensor, "MOST_KEPT", 300 * 300 - 1)
    sparse_attention(q, k, v, rule)
    assert len(made) == 4  # twice for what was expected


def test_gpu_half_types_take_the_block_wise_kernel_of_any_mask(sdpa_calls):
    rule = masks.sliding_window(250)
    q, k, v = operands(300, 300, 128)
    assert_close(sparse_attention(q, k, v, rule), expected(q, k, v, rule), HALF)
    assert not sdpa_calls
