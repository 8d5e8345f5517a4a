"""Argument checks and launch facts that the attention launchers share."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .memo import remember
from .overlap import ARGUMENT, OverlappingKernel
from .rounding import E4M3, KEY_STEP
from .settled_keys import settle_key

# A piece of a band is absent when its number is at least this far from zero (global counts: when
# 0).
FAR = 1 << 30
LOG2E = 1.4426950408889634
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


class TileMask(NamedTuple):
    """The arrays of a block mask, in the order of the operators' arguments.

    Tile row r of plane p is entry ``p * rows + r``; its part tiles are
    ``col_idx[row_ptr[i]:full_start[i]]`` and its full tiles ``col_idx[full_start[i]:row_ptr[i +
    1]]``.
    """

    plane_map: Tensor  # int32 [1 or batch, 1 or heads]
    row_ptr: Tensor  # int32 [planes * rows + 1]
    full_start: Tensor  # int32 [planes * rows]
    col_idx: Tensor  # int32 [tiles]
    bitmap_id: Tensor  # int32 [tiles]
    bitmap: Tensor  # int64 [unique, block_q / 8 * block_k / 8]
    row_order: Tensor  # int32 [planes * rows], heavy rows first in each plane


class Rounded(NamedTuple):
    """Scales of operands that were rounded to e4m3, the dtype they had, and all of v."""

    q_scale: Tensor  # fp32 [batch, heads], contiguous
    k_scale: Tensor  # fp32 [batch, kv_heads], contiguous
    v_scale: Tensor  # fp32 [batch, kv_heads], contiguous
    dtype: torch.dtype  # of the result
    # [batch, kv_heads, value_dim + ONES, keys with what fills up]: kernels take this and no view of
    # a part, of which a compiler may make a tensor of its own that has nothing behind it
    values: Tensor


@dataclass(frozen=True)
class AttentionProblem:
    """Checked sizes and the operands as a kernel takes them.

    The head dimension has unit stride; that of e4m3 values does not, their keys have.
    """

    q: Tensor  # [batch, heads, q_len, head_dim]
    k: Tensor  # [batch, kv_heads, k_len, head_dim]
    v: Tensor  # [batch, kv_heads, k_len, value_dim]
    key_keep: Tensor | None  # bool [batch or 1, k_len], unit stride
    bias: Tensor | None  # [batch or 1, heads or 1, q_len or 1, k_len or 1]
    batch: int
    heads: int
    group: int
    q_len: int
    k_len: int
    head_dim: int
    value_dim: int
    rows: int  # tile rows of one plane
    single_plane: bool
    vec: int  # every stride of q, k, v is a multiple of this many elements (16 bytes, or 1)


_known: dict[tuple[Any, ...], AttentionProblem] = {}  # without their tensors


def check_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: TileMask,
    key_keep: Tensor | None,
    bias: Tensor | None,
    block_q: int,
    block_k: int,
    fragments: bool = False,
    rounded: Rounded | None = None,
) -> AttentionProblem:
    """Check shapes, dtypes and tile sizes, with messages that say what was wrong.

    What was checked before is recognised by shapes, strides, dtypes and devices of all tensors: a
    check takes several times as long as that.

    Args:
        q: [batch, heads, q_len, head_dim], fp16, bf16 or fp32, any strides.
        k: [batch, kv_heads, k_len, head_dim]; heads is a multiple of kv_heads.
        v: [batch, kv_heads, k_len, value_dim].
        mask: arrays of the block mask with tiles of block_q x block_k.
        key_keep: bool [batch or 1, k_len], True where the key may be attended, or None.
        bias: added to the scores, broadcastable to [batch, heads, q_len, k_len], or None.
        block_q: query rows of a tile.
        block_k: keys of a tile.
        fragments: the bitmap is the mask's fragments, int32 [tiles, block_q * block_k / 32], for
            Hopper; block_q is a multiple of 64.
        rounded: q, k and v are e4m3 with these scales, and the keys of v have unit stride.

    Raises:
        ValueError: an argument does not fit the others.
    """
    given = q, k, v
    asked: tuple[Any, ...] | None = None
    if key_keep is None and bias is None and type(q) is Tensor:  # no tensor that is only traced
        scales = () if rounded is None else rounded[:3]
        asked = (block_q, block_k, fragments, *map(_layout, (*given, *mask, *scales)))
        known = _known.get(asked)
        if known is not None:
            return replace(known, q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _require(tensor.dim() == 4, f"{name} must be [batch, heads, length, dim]", tensor.shape)
        if rounded is None:
            _require(tensor.dtype in DTYPES, f"{name} must be fp16, bf16 or fp32", tensor.dtype)
        else:
            _require(tensor.dtype == E4M3, f"{name} must be e4m3", tensor.dtype)
        _require(
            tensor.dtype == q.dtype, f"{name} must have the dtype of q ({q.dtype})", tensor.dtype
        )
        _require(tensor.device == q.device, f"{name} must be on {q.device}", tensor.device)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, k_len = k.shape[1], k.shape[2]
    value_dim = v.shape[3]
    _require(
        k.shape[0] == batch and v.shape[:3] == k.shape[:3] and k.shape[3] == head_dim,
        "q [B,H,Q,D], k [B,G,K,D] and v [B,G,K,E] must agree",
        (tuple(q.shape), tuple(k.shape), tuple(v.shape)),
    )
    _require(kv_heads > 0 and heads % kv_heads == 0, "heads must be a multiple of k's", q.shape)
    _require(
        0 < head_dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM,
        f"head dimensions must be in 1..{MAX_HEAD_DIM}",
        (head_dim, value_dim),
    )
    if rounded is not None:
        _check_scales(rounded, q, kv_heads)
        _require(
            32 <= block_k <= KEY_STEP, f"a tile of e4m3 operands has 32 to {KEY_STEP} keys", block_k
        )
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if not (fragments and block % 64 == 0):
            power = block >= 16 and block & (block - 1) == 0
            _require(power, f"{name} must be a power of two >= 16", block)
    rows = -(-q_len // block_q)
    words = (
        (torch.int32, block_q * block_k // 32)
        if fragments
        else (torch.int64, block_q // 8 * (block_k // 8))
    )
    single_plane = _check_mask(mask, q, rows, block_q, words)
    if rounded is None:
        q, k, v = (_with_unit_stride(t) for t in (q, k, v))
    else:
        q, k = _with_unit_stride(q), _with_unit_stride(k)
    lanes = 16 // q.element_size()
    values = v if rounded is None else v.transpose(2, 3)
    aligned = all(stride % lanes == 0 for t in (q, k, values) for stride in outer_strides(t))
    problem = AttentionProblem(
        q=q,
        k=k,
        v=v,
        key_keep=_check_key_keep(key_keep, q, k_len),
        bias=_check_bias(bias, q, k_len),
        batch=batch,
        heads=heads,
        group=heads // kv_heads,
        q_len=q_len,
        k_len=k_len,
        head_dim=head_dim,
        value_dim=value_dim,
        rows=rows,
        single_plane=single_plane,
        vec=lanes if aligned else 1,
    )
    copied = any(a is not b for a, b in zip((q, k, v), given, strict=True))
    if asked is not None and not copied:
        nothing: Any = None
        remember(_known, asked, replace(problem, q=nothing, k=nothing, v=nothing))
    return problem


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def outer_strides(tensor: Tensor) -> list[int]:
    """Strides of all dimensions but the last, 0 where the size is 1."""
    return broadcast_strides(tensor)[:-1]


def broadcast_strides(tensor: Tensor) -> list[int]:
    """All strides, 0 where the size is 1."""
    return [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]


def empty_result(
    q: Tensor, value_dim: int, return_lse: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Allocate the memory of out, [batch, q_len, heads, value_dim], and lse (fp32 [B,H,Q], or [0]).

    Kernels get this memory itself, not the transposed view callers see: a write to a view costs a
        copy
    when torch.compile makes the graph functional.
    """
    batch, heads, q_len, _ = q.shape
    out = q.new_empty((batch, q_len, heads, value_dim), dtype=dtype)
    lse_shape = (batch, heads, q_len) if return_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def band_arguments(band: Sequence[int]) -> Sequence[int]:
    """The five numbers of a band as a kernel takes them, zeros where there is none."""
    return band or (0, 0, 0, 0, 0)


def band_flags(band: Sequence[int]) -> dict[str, Any]:
    """Which pieces of a band (lo, hi, global_q, global_k, cap) exist, as constexpr flags."""
    if not band:
        band = [-FAR, FAR, 0, 0, FAR]
        return {"BAND": False, **_pieces(band)}
    _require(len(band) == 5, "band must be [] or [lo, hi, global_q, global_k, cap]", band)
    return {"BAND": True, **_pieces(band)}


def score_constants(scale: float, softcap: float, has_bias: bool) -> dict[str, Any]:
    """SCALE, SOFTCAP, MULT and LINEAR of kernels/softmax.py.

    The plain case leaves the dot products alone (LINEAR) and folds the scale into MULT, which needs
    a
    positive scale: the largest dot product must be the largest score.
    """
    linear = scale > 0 and softcap == 0 and not has_bias
    return {
        "SCALE": float(scale),
        "SOFTCAP": float(softcap),
        "MULT": float(scale) * LOG2E if linear else LOG2E,
        "LINEAR": linear,
    }


def launchable(kernel: Any, tensor: Tensor, again: bool = False) -> Any:  # JIT or interpreted
    """The kernel in the form that tracing sees; under Triton's interpreter the kernel itself.

    With ``again`` one that overlaps gives back its launch: see ``OverlappingKernel``.

    torch 2.11 refuses to wrap an interpreted kernel, torch 2.13 returns it unchanged.
    """
    from triton.runtime.jit import JITFunction

    if isinstance(kernel, JITFunction):
        _require(
            tensor.is_cuda,
            "Triton kernels run on a GPU (or under TRITON_INTERPRET=1); use stof::attention_cpu",
            tensor.device,
        )
        settle_key(kernel)
        if ARGUMENT in kernel.arg_names:
            return OverlappingKernel(kernel, tensor.device, again)
        return torch.library.wrap_triton(kernel)
    return kernel


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's GPU current: Triton launches on the current device, not the tensors'."""
    if tensor.is_cuda and torch.cuda.is_available():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= n and >= 16, the least a matrix product takes."""
    return max(16, 1 << (n - 1).bit_length())


def attention_flops(
    batch: int, heads: int, kept: float, head_dim: int, value_dim: int | None = None
) -> float:
    """FLOP of both matrix products over ``kept`` score elements per (batch, head)."""
    return 2.0 * batch * heads * kept * (head_dim + (value_dim or head_dim))


def attention_bytes(
    q: Tensor, k: Tensor, v: Tensor, mask: TileMask, bias: Tensor | None = None
) -> int:
    """Bytes moved if q, k, v, out, the mask and the bias each pass memory once."""
    out = q.numel() // max(1, q.shape[3]) * v.shape[3] * q.element_size()
    operands = [q, k, v, *mask] + ([] if bias is None else [bias])
    return out + sum(t.numel() * t.element_size() for t in operands)


def _pieces(band: Sequence[int]) -> dict[str, bool]:
    lo, hi, global_q, global_k, cap = band
    return {
        "HAS_LO": lo > -FAR,
        "HAS_HI": hi < FAR,
        "HAS_GLOBAL_Q": global_q > 0,
        "HAS_GLOBAL_K": global_k > 0,
        "HAS_CAP": cap < FAR,
    }


def _with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _check_scales(rounded: Rounded, q: Tensor, kv_heads: int) -> None:
    for name, scale in zip(("q", "k", "v"), rounded[:3], strict=True):
        wanted = (q.shape[0], q.shape[1] if name == "q" else kv_heads)
        _require(
            scale.dtype == torch.float32 and scale.shape == wanted and scale.device == q.device,
            f"the scale of {name} must be fp32 {wanted} on {q.device}",
            (scale.dtype, tuple(scale.shape), scale.device),
        )


def _check_mask(
    mask: TileMask, q: Tensor, rows: int, block_q: int, words: tuple[torch.dtype, int]
) -> bool:
    """Check the arrays against the tile grid; True when there is one plane only.

    ``words`` is what the bitmap holds for a tile: a dtype and how many.
    """
    for name, array in mask._asdict().items():
        wanted = words[0] if name == "bitmap" else torch.int32
        _require(array.dtype == wanted, f"mask array {name} must be {wanted}", array.dtype)
        _require(array.device == q.device, f"mask array {name} must be on {q.device}", array.device)
        _require(array.is_contiguous(), f"mask array {name} must be contiguous", array.stride())
    planes = mask.full_start.shape[0] // max(1, rows)
    _require(
        mask.full_start.shape[0] == planes * rows
        and mask.row_ptr.shape[0] == planes * rows + 1
        and mask.row_order.shape[0] == planes * rows,
        f"row_ptr, full_start and row_order must cover {rows} tile rows of {block_q} per plane",
        (mask.row_ptr.shape[0], mask.full_start.shape[0], mask.row_order.shape[0]),
    )
    _require(
        mask.bitmap.dim() == 2 and mask.bitmap.shape[1] == words[1],
        f"bitmap must be {words[0]} [tiles, {words[1]}]",
        tuple(mask.bitmap.shape),
    )
    _require(
        mask.plane_map.dim() == 2
        and mask.plane_map.shape[0] in (1, q.shape[0])
        and mask.plane_map.shape[1] in (1, q.shape[1]),
        f"plane_map must be [1 or {q.shape[0]}, 1 or {q.shape[1]}]",
        tuple(mask.plane_map.shape),
    )
    return planes == 1


def _check_key_keep(key_keep: Tensor | None, q: Tensor, k_len: int) -> Tensor | None:
    if key_keep is None:
        return None
    _require(key_keep.dtype == torch.bool, "key_keep must be bool", key_keep.dtype)
    _require(
        key_keep.dim() == 2 and key_keep.shape[0] in (1, q.shape[0]) and key_keep.shape[1] == k_len,
        f"key_keep must be [1 or {q.shape[0]}, {k_len}]",
        tuple(key_keep.shape),
    )
    _require(key_keep.device == q.device, f"key_keep must be on {q.device}", key_keep.device)
    return key_keep if key_keep.stride(1) == 1 else key_keep.contiguous()


def _check_bias(bias: Tensor | None, q: Tensor, k_len: int) -> Tensor | None:
    if bias is None:
        return None
    _require(bias.is_floating_point(), "bias must be a float tensor", bias.dtype)
    _require(bias.dim() <= 4, "bias must have at most 4 dimensions", tuple(bias.shape))
    if bias.dim() < 4:  # to Inductor an index is a copy, even one of nothing: once for each layer
        bias = bias[(None,) * (4 - bias.dim())]
    full = (q.shape[0], q.shape[1], q.shape[2], k_len)
    _require(
        all(size in (1, wanted) for size, wanted in zip(bias.shape, full, strict=True)),
        f"bias must broadcast to {full}",
        tuple(bias.shape),
    )
    _require(bias.device == q.device, f"bias must be on {q.device}", bias.device)
    return bias


def _require(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"attention kernel: {rule}; got {got}")
