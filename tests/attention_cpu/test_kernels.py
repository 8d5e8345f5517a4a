"""The CPU kernels against the fp64 definition: shapes, dtypes, masks, all that joins the scores."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stof_compile.kernels.attention_cpu import attention_cpu_forward, cpu_kernels, default_block
from stof_compile.kernels.attention_cpu_strips import STRIP_BYTES, plane_plan
from stof_compile.kernels.reference import attention_reference

import stof_compile.ops_cpu  # noqa: F401
from stof_compile import attention_kernel, masks, sparse_attention
from stof_compile.masks import MaskSpec
from tests.close import assert_close

MASKS: dict[str, MaskSpec] = {
    "causal": masks.causal(),
    "longformer": masks.longformer(20, 5),
    "bigbird": masks.bigbird(20, 5, 0.2, random_block=32),
    "dense": masks.dense(),
    "nothing": ~masks.dense(),
    "window": masks.sliding_window(20),
    "causal-window": masks.sliding_window(30, causal=True),
    "rows-without-keys": masks.sliding_window(7) & ~masks.global_tokens(3),
    "per-head": masks.per_head(
        [masks.causal(), masks.longformer(3, 2), masks.causal(), masks.causal()]
    ),
    "per-batch": masks.document(torch.arange(2 * 300).reshape(2, 300) // 70),
}
LENGTHS = [(257, 257), (33, 257), (257, 33), (1, 100)]
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding": True},
    "full-bias": {"bias": (1, 1, 1, 1)},
    "head-bias-padding": {"bias": (0, 1, 0, 1), "padding": True},
    "softcap": {"softcap": 2.0},
    "softcap-bias": {"softcap": 2.0, "bias": (0, 0, 1, 1)},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "bf16-tall-tiles": {"dtype": torch.bfloat16, "block": (64, 16), "padding": True},
    "cut-rows": {"block": (64, 16), "bias": (0, 1, 1, 1), "token_major": True},
    "fp64-tall-tiles": {"dtype": torch.float64, "block": (64, 32)},
    "value-dim-larger": {"value_dim": 24},
    "head-dim-larger": {"head_dim": 24},
    "token-major": {"token_major": True, "padding": True},
    "one-kv-head": {"kv_heads": 1, "block": (64, 16), "token_major": True},
    "no-groups": {"kv_heads": 4},
    "not-contiguous": {"step": 2},
}


def run(kernel: str, spec: MaskSpec, q_len: int, k_len: int, **facts: Any) -> None:
    """Run a kernel on random operands and compare out and lse with the reference."""
    heads, kv_heads, head_dim = 4, facts.get("kv_heads", 2), facts.get("head_dim", 16)
    dtype, block, step = (
        facts.get("dtype", torch.float32),
        facts.get("block", (32, 32)),
        facts.get("step", 1),
    )
    return_lse = kernel != "flex"
    generator = torch.Generator().manual_seed(0)

    def operand(heads: int, length: int, dim: int) -> torch.Tensor:
        t = torch.randn(2, heads, length, dim * step, generator=generator).to(dtype)[..., ::step]
        return t.transpose(1, 2).contiguous().transpose(1, 2) if facts.get("token_major") else t

    q, k = operand(heads, q_len, head_dim), operand(kv_heads, k_len, head_dim)
    v = operand(kv_heads, k_len, facts.get("value_dim", 16))
    key_keep = bias = None
    if facts.get("padding"):
        key_keep = torch.arange(k_len)[None] < torch.tensor([k_len // 2 + 1, k_len - 3])[:, None]
    if "bias" in facts:
        sizes = [
            n if own else 1 for n, own in zip((2, heads, q_len, k_len), facts["bias"], strict=True)
        ]
        bias = torch.randn(sizes, generator=generator).to(dtype)
        bias.masked_fill_(torch.rand(sizes, generator=generator) < 0.1, -torch.inf)
    block_mask = masks.build_block_mask(spec, q_len, k_len, block, batch=2, heads=heads)
    band = [] if block_mask.band is None else block_mask.band.as_ints()
    softcap = facts.get("softcap", 0.0)
    out, lse = attention_cpu_forward(
        q,
        k,
        v,
        block_mask.tensors,
        key_keep,
        bias,
        0.3,
        softcap,
        0,
        band,
        block,
        return_lse,
        kernel,
    )
    wide = [t.double() for t in (q, k, v)]
    wide_bias = None if bias is None else bias.double()
    expected, expected_lse = attention_reference(
        *wide, block_mask.to_dense(), key_keep, wide_bias, 0.3, softcap, True
    )
    assert out.transpose(1, 2).is_contiguous()
    assert_close(out, expected, dtype)
    if return_lse:
        assert_close(lse, expected_lse, torch.float32 if dtype == torch.float64 else dtype)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", ["gather", "sdpa"])
def test_kernel_equals_reference(kernel: str, mask: str, lengths: tuple[int, int]) -> None:
    for facts in EXTRAS.values():
        if kernel == "gather" or "softcap" not in facts:
            run(kernel, MASKS[mask], *lengths, **facts)


@pytest.mark.parametrize("mask", ["causal", "per-batch"])
def test_flex_equals_reference(mask: str, fresh_dynamo: None) -> None:
    run("flex", MASKS[mask], 257, 257)
    run("flex", MASKS[mask], 150, 150)  # another length, the same compiled callable


def test_strips_of_a_long_sequence() -> None:
    # more than one strip in a bucket
    assert STRIP_BYTES < 1500 * 4 * 256 * 4
    run("gather", masks.longformer(100, 10), 1500, 1500, kv_heads=4, head_dim=256, value_dim=256)


def attend(block_mask: masks.BlockMask, arrays: Sequence[torch.Tensor]) -> None:
    """Compare the gather kernel over ``arrays`` with the dense form of ``block_mask``."""
    q = torch.randn(1, 2, block_mask.q_len, 16, generator=torch.Generator().manual_seed(0))
    block = (block_mask.block_q, block_mask.block_k)
    out, _ = attention_cpu_forward(
        q, q, q, arrays, None, None, 0.25, 0.0, 0, [], block, False, "gather"
    )
    assert_close(out, attention_reference(*(q.double(),) * 3, block_mask.to_dense(), scale=0.25))


def test_plan_follows_the_arrays_contents() -> None:
    # masks with equal shapes, one after the other at the same addresses
    first, second = (
        masks.build_block_mask(masks.from_tensor(keep), 128, 128, (32, 16))
        for keep in (torch.ones(128, 128).tril().bool(), torch.ones(128, 128).triu().bool())
    )
    arrays = [t.clone() for t in first.tensors]
    attend(first, arrays)
    for held, new in zip(arrays, second.tensors, strict=True):
        held.copy_(new)
    attend(second, arrays)
    attend(first, [t.clone() for t in first.tensors])
    with torch.inference_mode():
        arrays = [t.clone() for t in first.tensors]
        attend(first, arrays)
        for held, new in zip(arrays, second.tensors, strict=True):
            held.copy_(new)
        attend(second, arrays)
    attend(first, first.tensors)


def test_windows_are_read_in_place() -> None:
    block_mask = masks.build_block_mask(masks.sliding_window(32), 1024, 1024, (32, 16))
    plan = plane_plan(block_mask.tensors[1:6], 0, 32, 64, (32, 16), torch.float32, 4096)
    assert plan.complete
    assert sum(s.rows.shape[0] for s in plan.strips if s.run is not None) == 32
    assert len(plan.strips) <= 5
    mixed = masks.build_block_mask(masks.longformer(32, 16), 1024, 1024, (64, 16))
    plan = plane_plan(mixed.tensors[1:6], 0, 16, 64, (64, 16), torch.float32, 4096)
    # the 16 global queries alone read every key
    assert [s.height for s in plan.strips if s.whole] == [16]


@pytest.mark.parametrize("lengths", [(1, 256), (256, 1), (1, 1)])
def test_one_token_of_any_stride(lengths: tuple[int, int]) -> None:
    """The stride of a dimension of size 1 says nothing; 1 makes memory look like channels-last."""

    def operand(length: int) -> torch.Tensor:
        t = torch.randn(1, 2, length, 64)
        return t.as_strided(t.shape, (128, 64, 1, 1)) if length == 1 else t

    q, k, v = map(operand, (lengths[0], lengths[1], lengths[1]))
    rule = masks.global_tokens(3) | masks.sliding_window(8)
    dense = masks.build_block_mask(rule, *lengths, (32, 32), batch=1, heads=2).to_dense()
    with attention_kernel("gather"):
        out = sparse_attention(q, k, v, rule, scale=0.3)
    wide = [t.double() for t in (q, k, v)]
    expected, _ = attention_reference(*wide, dense, None, None, 0.3, 0.0, True)
    assert_close(out, expected)


def test_query_offset_shifts_the_mask() -> None:
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16)
    block_mask = masks.build_block_mask(
        masks.sliding_window(9, causal=True), 5, 90, 32, q_offset=85
    )
    for kernel in ("gather", "sdpa"):
        out, _ = attention_cpu_forward(
            q, k, v, block_mask.tensors, None, None, 0.25, 0.0, 85, [], (32, 32), False, kernel
        )
        d = torch.arange(85, 90)[:, None] - torch.arange(90)
        assert_close(
            out,
            attention_reference(*(t.double() for t in (q, k, v)), (d >= 0) & (d < 9), scale=0.25),
        )


def test_lowest_finite_bias_keeps_the_uniform_mean() -> None:
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    bias = torch.full((1, 1, 64, 64), torch.finfo(torch.float32).min)
    block_mask = masks.build_block_mask(masks.dense(), 64, 64, 32)
    out, _ = attention_cpu_forward(
        q, k, v, block_mask.tensors, None, bias, 0.25, 0.0, 0, [], (32, 32), False, "gather"
    )
    assert_close(out, v.double().mean(2, keepdim=True).expand(1, 1, 64, 16))


@pytest.mark.parametrize(
    "sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=["batch", "q_len", "k_len"]
)
def test_nothing_to_do(sizes: tuple[int, int, int]) -> None:
    batch, q_len, k_len = sizes
    q, k = torch.randn(batch, 2, q_len, 16), torch.randn(batch, 2, k_len, 16)
    block_mask = masks.build_block_mask(masks.causal(), q_len, k_len, 32)
    out, lse = attention_cpu_forward(
        q, k, k, block_mask.tensors, None, None, 0.25, 0.0, 0, [], (32, 32), True, "gather"
    )
    assert out.shape == q.shape and not out.any()
    assert lse.shape == q.shape[:3] and bool((lse == -torch.inf).all())


def test_refusals_are_reasons() -> None:
    found = {
        c.kernel: c for c in cpu_kernels(torch.float32, 64, 64, 16, 24, softcap=1.0, has_bias=True)
    }
    assert found["gather"].refusal is None
    assert found["gather"].config == default_block(torch.float32)
    assert "bias" in str(found["flex"].refusal)
    assert "softcap" in str(found["sdpa"].refusal)
    q, block_mask = torch.randn(1, 2, 64, 16), masks.build_block_mask(masks.causal(), 64, 64, 32)
    rest = (None, None, 0.25)
    with pytest.raises(ValueError, match="log-sum-exp"):
        attention_cpu_forward(
            q, q, q, block_mask.tensors, *rest, 0.0, 0, [], (32, 32), True, "flex"
        )
    with pytest.raises(ValueError, match="softcap"):
        attention_cpu_forward(
            q, q, q, block_mask.tensors, *rest, 1.0, 0, [], (32, 32), False, "sdpa"
        )
    with pytest.raises(ValueError, match="bitmaps must be of 64 x 64"):
        attention_cpu_forward(
            q,
            q,
            q,
            block_mask.tensors[:1] + _one_row(),
            *rest,
            0.0,
            0,
            [],
            (64, 64),
            False,
            "gather",
        )


def _one_row() -> tuple[torch.Tensor, ...]:
    return masks.build_block_mask(masks.causal(), 64, 64, (64, 32)).tensors[1:]


def test_gradients_equal_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    block_mask = masks.build_block_mask(masks.longformer(9, 3), 70, 70, 32)
    q, k, v = (
        torch.randn(2, h, 70, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (4, 2, 2)
    )
    bias = torch.randn(1, 4, 70, 70, generator=generator, dtype=torch.float64, requires_grad=True)
    leaves = (q, k, v, bias)
    out, lse = torch.ops.stof.attention_cpu(
        q, k, v, *block_mask.tensors, None, bias, 0.25, 3.0, 0, [], [32, 32], True, "gather"
    )
    expected, expected_lse = attention_reference(
        q, k, v, block_mask.to_dense(), None, bias, 0.25, 3.0, True
    )
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad((out * weight).sum() + lse.double().sum(), leaves)
    expected_grads = torch.autograd.grad((expected * weight).sum() + expected_lse.sum(), leaves)
    for got, wanted in zip(grads, expected_grads, strict=True):
        assert_close(got, wanted, torch.float32)  # the lse, and so its gradient, is fp32


def test_operator_passes_opcheck() -> None:
    block_mask = masks.build_block_mask(masks.causal(), 40, 40, 32)
    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    arguments = (
        q,
        q,
        q,
        *block_mask.tensors,
        None,
        None,
        0.25,
        0.0,
        0,
        [],
        [32, 32],
        True,
        "gather",
    )
    torch.library.opcheck(torch.ops.stof.attention_cpu.default, arguments)
