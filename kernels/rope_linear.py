"""Linear layer with rotary embeddings: Q/K/V of one product, Q and K rotated in its epilogue.

    y = x @ weight.T + bias;  each head of the first columns:  h cos + (-h_high, h_low) sin

Here: how the kernel of ``rope_linear_kernel.py`` is configured and launched.
Source: the rotation in halves of GPT-NeoX ("rotate_half" of Hugging Face's LLaMA).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .linear import LinearConfig
from .linear_handoff import MAX_PARTS
from .linear_problem import (
    describable,
    ensure_scratch_allocator,
    honest_parts,
    pieces,
    precision_of,
    processors,
)
from .operand_checks import (
    Rows,
    bias_of,
    check_input,
    check_operand,
    check_power_of_two,
    require,
    rows_of,
    weight_of,
)
from .problem import launchable, on_device
from .rope_linear_kernel import rope_linear_kernel

KERNELS = (rope_linear_kernel,)
_NAME = "stof::fused_rope_linear"
_HEAD_DIMS = (16, 256)  # least and most
_CHUNK_WIDTH = 16  # least


def fused_rope_linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    rotated: int,
    config: Sequence[int],
) -> Tensor:
    """Launch the linear layer with rotary embeddings.

    Args:
        x: [..., K], fp16, bf16 or fp32, any strides (copied unless its rows have one stride).
        weight: [N, K], unit stride along K or along N; N is a multiple of ``head_dim``.
        bias: [N] or None.
        cos, sin: tables [T, head_dim] of x's dtype; row r of the result reads row r % T, and the
            rows of x are a multiple of T.
        head_dim: D, a power of two in 16..256.
        rotated: columns that are rotated, from the first on; a multiple of D.
        config: fields of LinearConfig (kernels/linear.py); block_n is a multiple of D.

    Returns:
        [..., N], contiguous, dtype of x. Sums and rotation are fp32, rounded once.

    Raises:
        ValueError: an argument does not fit the others.
    """
    how = LinearConfig(*config)
    check_input(x, _NAME)
    check_power_of_two(_NAME, 16, block_m=how.block_m, block_n=how.block_n, block_k=how.block_k)
    check_power_of_two(_NAME, _HEAD_DIMS[0], head_dim=head_dim)
    require(head_dim <= _HEAD_DIMS[1], _NAME, f"head_dim must be <= {_HEAD_DIMS[1]}", head_dim)
    rule = f"block_n must be a multiple of head_dim ({head_dim})"
    require(how.block_n % head_dim == 0, _NAME, rule, how.block_n)
    require(
        1 <= how.split_k <= MAX_PARTS and not (how.split_k > 1 and how.persistent),
        _NAME,
        f"split_k must be in 1..{MAX_PARTS}, and 1 for persistent programs",
        (how.split_k, how.persistent),
    )
    k = x.shape[-1]
    w = weight_of("weight", weight, x, k, _NAME)
    if how.depth_first and w.kn:
        weight = weight.contiguous()
        w = weight_of("weight", weight, x, k, _NAME)
    n = weight.shape[0]
    require(n % head_dim == 0, _NAME, f"N must be a multiple of head_dim ({head_dim})", n)
    rule = f"rotated must be a multiple of head_dim ({head_dim}) in {head_dim}..{n}"
    require(0 < rotated <= n and rotated % head_dim == 0, _NAME, rule, rotated)
    rows = rows_of("x", x, x, k, _NAME)
    bias = bias_of("bias", bias, x, n, _NAME)
    m = rows.tensor.shape[0]
    cosines = _table("cos", cos, x, m, head_dim)
    sines = _table("sin", sin, x, m, head_dim)
    rule = "sin must have as many rows as cos"
    require(sin.shape[0] == cos.shape[0], _NAME, rule, (sin.shape[0], cos.shape[0]))
    out = x.new_empty((m, n))
    if out.numel() == 0:
        return out.view(*x.shape[:-1], n)
    tma = bool(how.tma) and describable(rows.tensor, rows.stride) and describable(weight, w.stride)
    if tma:
        ensure_scratch_allocator()
    tiles = -(-m // how.block_m) * -(-n // how.block_n)
    split = honest_parts(-(-k // how.block_k), how.split_k)
    parts, flags = rows.tensor, rows.tensor  # of no use without parts
    if split > 1:
        # memory of this launch alone: linear_handoff.py says why it needs no zeros
        parts = x.new_empty((tiles * (split - 1), how.block_m * how.block_n), dtype=torch.float32)
        flags = x.new_empty((tiles * (split - 1),), dtype=torch.int64)
    programs = tiles * split
    if how.persistent:
        programs = min(tiles, how.persistent * processors(x))
    finished, chunks = _pieces(how, head_dim, split > 1)
    with on_device(x):
        launchable(rope_linear_kernel, x)[(programs,)](
            rows.tensor, weight,
            rows.tensor if bias is None else bias,
            cosines.tensor, sines.tensor, out, parts, flags, m, cos.shape[0],
            stride_x=rows.stride,
            stride_w=w.stride,
            stride_cos=cosines.stride,
            stride_sin=sines.stride,
            N=n,
            K=k,
            HEAD_DIM=head_dim,
            ROTATED=rotated,
            WEIGHT_KN=w.kn,
            HAS_BIAS=bias is not None,
            WRAPS=cos.shape[0] != m,
            BLOCK_M=how.block_m,
            BLOCK_N=how.block_n,
            BLOCK_K=how.block_k,
            GROUP_M=how.group_m,
            SPLIT_K=split,
            PERSISTENT=bool(how.persistent),
            TMA=tma,
            PIECES=finished,
            CHUNKS=chunks,
            EVEN_M=m % how.block_m == 0,
            EVEN_N=n % how.block_n == 0,
            EVEN_K=k % how.block_k == 0,
            PRECISION=precision_of(x),
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], n)


def rope_linear_flops(rows: int, n: int, k: int) -> int:
    """Multiplications and additions of the product; the rotation adds 3 to 2 k of a column."""
    return 2 * rows * n * k


def rope_linear_bytes(x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor) -> int:
    """Bytes moved if every operand and the result pass memory once."""
    bias_size = 0 if bias is None else bias.numel()
    out = x.numel() // x.shape[-1] * weight.shape[0]
    return (x.numel() + weight.numel() + bias_size + 2 * cos.numel() + out) * x.element_size()


def _pieces(how: LinearConfig, head_dim: int, split: bool) -> tuple[int, int]:
    """In how many pieces of whole heads a tile is finished, and in how many chunks their halves.

    A piece holds its halves, both tables and the results beside all sums.
    """
    per_thread = how.block_m * how.block_n // (32 * how.num_warps)
    wanted = pieces(how.block_m, how.block_n, how.num_warps, bool(how.persistent), True, split)
    if per_thread >= 64:
        wanted = max(wanted, 2)
    of_heads = min(wanted, how.block_n // head_dim)
    return of_heads, max(1, min(wanted // of_heads, head_dim // 2 // _CHUNK_WIDTH))


def _table(name: str, table: Tensor, x: Tensor, rows: int, head_dim: int) -> Rows:
    """Check a table [T, head_dim] and give it unit stride along its rows."""
    fits = table.dim() == 2 and table.shape[1] == head_dim
    require(fits, _NAME, f"{name} must be [T, {head_dim}]", tuple(table.shape))
    count = table.shape[0]
    rule = f"x must have a multiple of the rows of {name} ({count})"
    require(rows == 0 or (count > 0 and rows % count == 0), _NAME, rule, rows)
    check_operand(name, table, x, _NAME)
    if table.stride(1) != 1:
        table = table.contiguous()
    return Rows(table, table.stride(0) if count > 1 else head_dim)
