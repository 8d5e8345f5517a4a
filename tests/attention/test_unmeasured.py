"""Attention that nothing was measured for: by hand on a GPU, and what the decision table says."""

import pytest
import torch
import torch.nn.functional as F
from stof_compile.kernels.reference import attention_reference

from stof_compile import attention_kernel, masks, sparse_attention
from stof_compile.attention import decision_table, functional
from stof_compile.attention.decision_table import decide
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.masks import BlockMask, build_block_mask
from tests.close import assert_close

HALF, SINGLE = torch.float16, torch.float32
CUDA = torch.device("cuda", 0)


def problem(rule, head_dim=128, length=256, dtype=HALF, **kwargs):
    strides = (12 * length * head_dim, head_dim, 12 * head_dim, 1)
    meta = TensorMeta((16, 12, length, head_dim), strides, dtype)
    return AttentionProblem(meta, meta, meta, rule, 0, CUDA, head_dim**-0.5, **kwargs)


@pytest.fixture
def table_on_hopper(monkeypatch):
    """The decision table for a Hopper GPU; masks stay on the CPU."""
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def on_cpu(self, block):
        return build_block_mask(self.spec, self.q_len, self.k_len, block)

    monkeypatch.setattr(AttentionProblem, "block_mask", on_cpu)
    monkeypatch.setattr(decision_table, "_cudnn_serves", lambda problem: False)


@pytest.mark.parametrize(
    ("rule", "facts", "kernel"),
    [
        (masks.causal(), {}, "sdpa"),
        (masks.causal(), {"head_dim": 64}, "sdpa"),  # too few rows for the Hopper kernel
        (masks.causal(), {"head_dim": 64, "length": 1024}, "block"),
        (masks.causal(), {"padding": True}, "block"),
        (masks.causal(lower_right=True), {}, "block"),
        (masks.sliding_window(120), {}, "block"),
        (masks.sliding_window(120), {"dtype": SINGLE}, "sdpa"),
        (masks.sliding_window(4), {"dtype": SINGLE, "head_dim": 64, "length": 1024}, "block"),
    ],
    ids=str,
)
def test_table(table_on_hopper, rule, facts, kernel):
    assert decide(problem(rule, **facts))[0] == kernel


# -- by hand --------------------------------------------------------------------------------------


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


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 300), (100, 300), (300, 100), (1, 50)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gpu_causal_masks_are_left_to_sdpa(sdpa_calls, head_dim, lengths, kv_heads):
    q, k, v = operands(*lengths, head_dim, kv_heads=kv_heads)
    out = sparse_attention(q, k, v, masks.causal(), scale=0.2, enable_gqa=kv_heads != 4)
    assert [call.get("is_causal") for call in sdpa_calls] == [True]
    assert_close(out, expected(q, k, v, masks.causal(), 0.2), HALF)


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_gpu_a_dense_mask_of_fp32_is_made_once(sdpa_calls, monkeypatch):
    made = []
    real = BlockMask.to_dense
    monkeypatch.setattr(BlockMask, "to_dense", lambda self: made.append(1) or real(self))
    rule = masks.sliding_window(150)
    q, k, v = operands(300, 300, 64, dtype=SINGLE)
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
    monkeypatch.setattr(functional, "_KEPT_DENSE", 300 * 300 - 1)
    sparse_attention(q, k, v, rule)
    assert len(made) == 4  # twice for what was expected


@pytest.mark.gpu
def test_gpu_half_types_take_the_block_wise_kernel_of_any_mask(sdpa_calls):
    rule = masks.sliding_window(250)
    q, k, v = operands(300, 300, 128)
    assert_close(sparse_attention(q, k, v, rule), expected(q, k, v, rule), HALF)
    assert not sdpa_calls
