"""Attention over a block mask on the CPU: three kernels with one signature.

    gather   the kept K/V tiles of a strip of tile rows are copied side by side (or viewed, where
             they are windows), and the library's fused attention runs over (tile row) x (kept keys)
             as if each tile row were a batch entry
    flex     FlexAttention, compiled once or twice per form, reading the same tile lists
    sdpa     the dense mask and F.scaled_dot_product_attention: the exact fallback

The gather kernel compiles nothing; FlexAttention compiles for seconds per form when nothing is
cached. Which of them is taken without measuring: ``preferred_cpu_kernel``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from stof_compile.kernels.attention_cpu_dense import dense_forward
from stof_compile.kernels.attention_cpu_flex import FlexCall, flex_forward, flex_refusal
from stof_compile.kernels.attention_cpu_gather import gather_forward
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNELS = ("gather", "flex", "sdpa")

# Part of the tiles that may be touched before dense attention is the better guess; for half types.
WINS_BELOW = 0.6
HALF_WINS_BELOW = 0.45


class CpuKernel(NamedTuple):
    """One candidate for a problem: its tile size and why it can't run it (None: it can)."""

    kernel: str
    config: tuple[int, ...]  # (block_q, block_k)
    refusal: str | None


def default_block(dtype: torch.dtype) -> tuple[int, int]:
    """Tile size of the gather kernel: half types want taller products to feed the matrix units.

    Tiles of 16 keys waste fewer scores on the edges of a window than tiles of 32.
    """
    return (64, 16) if dtype in (torch.bfloat16, torch.float16) else (32, 16)


def cpu_kernels(
    dtype: torch.dtype,
    q_len: int,
    k_len: int,
    head_dim: int,
    value_dim: int,
    *,
    softcap: float = 0.0,
    has_bias: bool = False,
    return_lse: bool = False,
) -> tuple[CpuKernel, ...]:
    """List the kernels for a problem, the one without compilation first, with refusals' reasons.

    Args:
        dtype: of q, k and v. q_len, k_len: tokens. head_dim, value_dim: channels of q/k and of v.
        softcap: of the scores, 0 for none. has_bias: an additive bias is given.
        return_lse: the log-sum-exp is wanted.
    """
    block = default_block(dtype)
    flex = flex_refusal(dtype, q_len, k_len, head_dim, value_dim, (32, 32), has_bias, return_lse)
    known = None if dtype in DTYPES else f"{dtype} is none of {', '.join(map(str, DTYPES))}"
    return (
        CpuKernel("gather", block, known),
        CpuKernel("flex", (32, 32), known or flex),
        CpuKernel("sdpa", block, known or ("SDPA has no softcap" if softcap > 0 else None)),
    )


def preferred_cpu_kernel(
    dtype: torch.dtype,
    tile_density: float,
    *,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> str:
    """Choose a kernel from a problem's facts, where nothing may be measured.

    Milliseconds of one thread of a Xeon with AMX (batch 1, 12 heads of 64, token-major operands),
    compiled SDPA with a bool mask / gather at ``default_block`` / FlexAttention with 32-tiles;
    medians of interleaved rounds give the same order:

        mask                      S     fp32                  bf16
        window 32 + 16 global    512    8.4 /  4.7 /  8.1     3.4 /  2.6 /  3.5
                                2048    135 /   18 /   39      53 /   12 /   16
                                4096    576 /   38 /   79     237 /   23 /   32
        causal window 32        2048    131 /   10 /   21      46 /    7 /    9
        BigBird (0.1 random)     512    8.5 /  5.9 /  9.2     3.6 /  3.0 /  3.9
                                4096    584 /  154 /  217     224 /   71 /   75
        causal (half the tiles) 1024     34 /   26 /   49      14 /   16 /   18
                                4096    586 /  486 /  779     236 /  278 /  242

    FlexAttention won nowhere by more than the seconds it takes to compile, so it is left to
    measuring. Half types have faster dense products, which moves the limit; below 128 queries over
    as many keys the two are even, but one query over 2048 keys of a window takes gather 0.19 ms and
    SDPA 0.54: the part of the tiles decides, not the length.

    Args:
        dtype: of q, k and v.
        tile_density: touched / all tiles of the mask, at ``default_block(dtype)`` or coarser.
        softcap: of the scores, 0 for none. return_lse: the log-sum-exp is wanted. Both are what
            SDPA has not.

    Returns:
        "gather" or "sdpa"; the config is the one ``cpu_kernels`` lists for it.
    """
    if softcap > 0 or return_lse:
        return "gather"
    half = dtype in (torch.bfloat16, torch.float16)
    return "gather" if tile_density <= (HALF_WINS_BELOW if half else WINS_BELOW) else "sdpa"


def attention_cpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    block: tuple[int, int],
    return_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Attend under a block mask on the CPU.

    Args:
        q: [batch, heads, q_len, head_dim], fp16, bf16, fp32 or fp64, any strides.
        k: [batch, kv_heads, k_len, head_dim]; heads is a multiple of kv_heads.
        v: [batch, kv_heads, k_len, value_dim].
        mask: the seven arrays of the block mask (plane_map, row_ptr, full_start, col_idx,
            bitmap_id, bitmap, row_order).
        key_keep: bool [batch or 1, k_len], True where the key may be attended, or None.
        bias: added to the scores, float, broadcastable to [batch, heads, q_len, k_len], or None.
        scale: factor of the dot products. softcap: c > 0 turns a scaled score x into c * tanh(x /
            c).
        q_offset: position of the first query; band: arithmetic form of the part tiles, or empty.
        block: (block_q, block_k) of the mask.
        return_lse: also compute the log-sum-exp.
        kernel: "gather", "flex" or "sdpa".

    Returns:
        out: [batch, heads, q_len, value_dim] over [batch, q_len, heads, value_dim] memory, 0 on
        rows without keys; lse: fp32 [batch, heads, q_len], -inf on such rows, or [0].

    Raises:
        ValueError: arguments that do not fit, or a kernel that cannot run them.
    """
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    _check(q, k, v, mask, key_keep, bias, block)
    if kernel not in KERNELS:
        raise ValueError(
            f"attention kernel on the CPU: one of {', '.join(KERNELS)}; got {kernel!r}"
        )
    if kernel == "sdpa" and softcap > 0:
        raise ValueError("attention kernel 'sdpa': SDPA has no softcap; take 'gather'")
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse = torch.full(q.shape[:3] if return_lse else (0,), -torch.inf, dtype=torch.float32)
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), lse
    # the library's fused kernel steps through head dims with unit stride
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    if kernel == "flex":
        refusal = flex_refusal(
            q.dtype,
            q.shape[2],
            k.shape[2],
            q.shape[3],
            v.shape[3],
            block,
            bias is not None,
            return_lse,
        )
        if refusal is not None:
            raise ValueError(f"attention kernel 'flex': {refusal}; take 'gather'")
        call = FlexCall(q, k, v, mask, key_keep, scale, softcap, q_offset, band, block)
        out.copy_(flex_forward(call))
    elif kernel == "sdpa":
        dense_forward(out, lse, q, k, v, mask, key_keep, bias, scale, q_offset, band, block)
    else:
        gather_forward(out, lse, q, k, v, mask, key_keep, bias, scale, softcap, block)
    return out, lse


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    block: tuple[int, int],
) -> None:
    """Check what would otherwise give wrong numbers or an error deep inside."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        _require(t.dim() == 4, f"{name} must be [batch, heads, length, dim]", tuple(t.shape))
        _require(t.dtype in DTYPES, f"{name} must be fp16, bf16, fp32 or fp64", t.dtype)
        _require(t.dtype == q.dtype, f"{name} must have the dtype of q ({q.dtype})", t.dtype)
        _require(t.device.type == "cpu", f"{name} must be on the CPU", t.device)
    batch, heads, q_len, head_dim = q.shape
    _require(
        k.shape[0] == batch and v.shape[:3] == k.shape[:3] and k.shape[3] == head_dim,
        "q [B,H,Q,D], k [B,G,K,D] and v [B,G,K,E] must agree",
        (tuple(q.shape), tuple(k.shape), tuple(v.shape)),
    )
    _require(k.shape[1] > 0 and heads % k.shape[1] == 0, "heads must be a multiple of k's", heads)
    plane_map, row_ptr, full_start = mask[:3]
    rows = -(-q_len // block[0])
    _require(
        row_ptr.shape[0] == full_start.shape[0] + 1 and full_start.shape[0] % max(1, rows) == 0,
        f"the mask must cover {rows} tile rows of {block[0]} per plane",
        full_start.shape[0],
    )
    _require(
        mask[5].shape[1] == block[0] // 8 * (block[1] // 8),
        f"bitmaps must be of {block[0]} x {block[1]} tiles",
        tuple(mask[5].shape),
    )
    _require(
        plane_map.shape[0] in (1, batch) and plane_map.shape[1] in (1, heads),
        f"plane_map must be [1 or {batch}, 1 or {heads}]",
        tuple(plane_map.shape),
    )
    if key_keep is not None:
        _require(
            key_keep.dtype == torch.bool
            and key_keep.dim() == 2
            and key_keep.shape[0] in (1, batch)
            and key_keep.shape[1] == k.shape[2],
            f"key_keep must be bool [1 or {batch}, {k.shape[2]}]",
            (key_keep.dtype, tuple(key_keep.shape)),
        )
    if bias is not None:
        full = (batch, heads, q_len, k.shape[2])
        _require(
            bias.is_floating_point()
            and bias.dim() == 4
            and all(n in (1, m) for n, m in zip(bias.shape, full, strict=True)),
            f"bias must be float and broadcast to {full}",
            (bias.dtype, tuple(bias.shape)),
        )


def _require(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"attention kernel: {rule}; got {got}")
