"""Property: whatever mask, lengths, head dims, groups and dtype, attention equals the oracle.

On the CPU the gather and SDPA kernels are drawn, on a GPU the block-wise and row-wise ones (their
interpreter tests are in tests/kernels). FlexAttention compiles for every shape and has its own,
fixed cases in tests/attention_cpu.
"""

import pytest
import torch
from close import assert_close, assert_close_lse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks, sparse_attention
from stof_compile.attention.functional import attention_kernel

HEAD_DIMS = (16, 24, 32, 64, 72, 80, 96, 128)


@st.composite
def rules(draw, depth=2):
    """A rule, possibly combined; never one that is tied to fixed lengths."""
    width = draw(st.integers(0, 40))
    leaves = (
        masks.dense(),
        masks.causal(),
        masks.causal(lower_right=True),
        masks.sliding_window(width),
        masks.sliding_window(width + 1, causal=True),
        masks.longformer(width, draw(st.integers(1, 20))),
        masks.bigbird(width, 8, 0.2, seed=draw(st.integers(0, 9)), random_block=16),
        masks.block_diagonal(draw(st.integers(1, 50))),
        masks.dilated(4, 3),
        masks.strided(draw(st.integers(1, 9))),
        masks.prefix_lm(draw(st.integers(0, 30))),
    )
    rule = draw(st.sampled_from(leaves))
    if depth:
        kind = draw(st.sampled_from(("leaf", "and", "or", "not")))
        if kind == "and":
            return rule & draw(rules(depth=depth - 1))
        if kind == "or":
            return rule | draw(rules(depth=depth - 1))
        if kind == "not":
            return ~rule
    return rule


@st.composite
def problems(draw, kernel, dtypes):
    """Keyword arguments of one attention problem."""
    group = draw(st.sampled_from((1, 2, 4)))
    return {
        "rule": draw(rules()),
        "q_len": draw(st.integers(1, 150)),
        "k_len": draw(st.integers(1, 150)),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "value_dim": draw(st.sampled_from((16, 64, 80))),
        "kv_heads": draw(st.integers(1, 2)),
        "group": group,
        "dtype": draw(st.sampled_from(dtypes)),
        "padding": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "softcap": 0.0 if kernel == "sdpa" else draw(st.sampled_from((0.0, 0.0, 5.0))),
        "lse": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def check(problem, kernel, device):
    generator = torch.Generator(device=device).manual_seed(problem["seed"])

    def randn(*shape):
        return torch.randn(shape, device=device, generator=generator).to(problem["dtype"])

    heads, q_len, k_len = problem["kv_heads"] * problem["group"], problem["q_len"], problem["k_len"]
    q = randn(2, q_len, heads, problem["head_dim"]).transpose(1, 2)
    k = randn(2, problem["kv_heads"], k_len, problem["head_dim"])
    v = randn(2, problem["kv_heads"], k_len, problem["value_dim"])
    key_keep = None
    if problem["padding"]:
        ends = torch.tensor([[k_len], [max(1, k_len // 2)]], device=device)
        key_keep = torch.arange(k_len, device=device) < ends
    bias = randn(1, heads, q_len, k_len) if problem["bias"] else None
    spec = problem["rule"].bind(q_len, k_len)
    b, h = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    rows, columns = (torch.arange(n, device=device) for n in (q_len, k_len))
    keep = spec.to(device).keep(b, h, rows[:, None], columns[None, :])
    keep = keep.expand(q_len, k_len)[None, None]
    expected, expected_lse = attention_reference(
        q.double(),
        k.double(),
        v.double(),
        keep,
        key_keep,
        None if bias is None else bias.double(),
        problem["head_dim"] ** -0.5,
        problem["softcap"],
        True,
    )
    with attention_kernel(kernel):
        found = sparse_attention(
            q,
            k,
            v,
            problem["rule"],
            key_keep=key_keep,
            bias=bias,
            softcap=problem["softcap"],
            enable_gqa=problem["group"] > 1,
            return_lse=problem["lse"],
        )
    out, lse = found if problem["lse"] else (found, None)
    assert_close(out, expected, problem["dtype"])
    if lse is not None:
        assert_close_lse(lse, expected_lse, 2e-5 if problem["dtype"] is torch.float32 else 5e-3)


QUIET = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@pytest.mark.parametrize("kernel", ["gather", "sdpa"])
@settings(max_examples=60, **QUIET)
@given(data=st.data())
def test_cpu(kernel, data):
    check(data.draw(problems(kernel, (torch.float32, torch.bfloat16))), kernel, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["block", "row"])
@settings(max_examples=40, **QUIET)
@given(data=st.data())
def test_gpu(kernel, data):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    check(data.draw(problems(kernel, dtypes)), kernel, "cuda")
