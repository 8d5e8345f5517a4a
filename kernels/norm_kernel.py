"""Device code of norms over whole rows, with what is added to a row before."""

import triton
import triton.language as tl

from .overlap_kernel import start_after_previous


@triton.jit
def load_tile(pointers, valid, MASKED: tl.constexpr):
    """A tile in fp32, 0 where it is not valid; plain loads where all of it is."""
    tile = tl.load(pointers, mask=valid, other=0.0) if MASKED else tl.load(pointers)
    return tile.to(tl.float32)


@triton.jit
def norm_rows_kernel(
    x, bias, residual, norm_weight, norm_bias, out, rows,
    STRIDE_X: tl.constexpr, STRIDE_R: tl.constexpr, PARTIALS: tl.constexpr,
    N: tl.constexpr, EPS: tl.constexpr, RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_ROWS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """ROWS rows of ``norm(sum of the PARTIALS planes of x + bias + residual)`` a program.

    x is [PARTIALS, rows, N]; planes are added in their order, so a result can be repeated. Strides
    are constants: they tell the compiler which loads take 16 bytes.
    """
    start_after_previous(PDL)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_N)
    WIDE: tl.constexpr = BLOCK_N != N
    MASKED: tl.constexpr = WIDE or not EVEN_ROWS
    in_row = col < N
    valid = in_row[None, :] & (row < rows - first)[:, None]

    # all loads stand before the first reduction: one trip to memory, not three
    x_at = x + first * STRIDE_X + (row[:, None] * STRIDE_X + col[None, :])
    h = load_tile(x_at, valid, MASKED)
    plane = (first * 0 + rows) * STRIDE_X
    for i in tl.static_range(1, PARTIALS):
        h += load_tile(x_at + plane * i, valid, MASKED)
    if HAS_RESIDUAL:
        r_at = residual + first * STRIDE_R + (row[:, None] * STRIDE_R + col[None, :])
        h += load_tile(r_at, valid, MASKED)
    if HAS_BIAS:
        h += load_tile(bias + col, in_row, WIDE)[None, :]
    if HAS_WEIGHT:
        weight = load_tile(norm_weight + col, in_row, WIDE)
    if HAS_NORM_BIAS:
        shift = load_tile(norm_bias + col, in_row, WIDE)

    # -- statistics: the mean first, then the variance around it ----
    if not RMS:
        h = h - (tl.sum(h, 1) / N)[:, None]
        if WIDE:
            h = tl.where(in_row[None, :], h, 0.0)
    y = h * tl.rsqrt(tl.sum(h * h, 1) / N + EPS)[:, None]
    if HAS_WEIGHT:
        y = y * weight[None, :]
    if HAS_NORM_BIAS:
        y = y + shift[None, :]

    out_at = out + first * N + (row[:, None] * N + col[None, :])
    y = y.to(out.dtype.element_ty)
    if MASKED:
        tl.store(out_at, y, mask=valid)
    else:
        tl.store(out_at, y)
