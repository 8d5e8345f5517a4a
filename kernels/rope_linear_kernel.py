"""Device code of the linear layer with rotary embeddings; ``rope_linear.py`` says what it computes.

The sums are those of any linear layer, in the three forms of ``linear_kernel.py``. A tile holds
whole heads, so both halves of every head are at hand when it is finished. In the layouts of the
matrix units a thread owns the elements ``j`` and ``j + HEAD_DIM / 2`` of a head alike: taking the
halves apart moves no data.
"""

import triton
import triton.language as tl

from .linear_epilogue import load_row
from .linear_handoff import add_parts, give_part, wait_for_parts
from .linear_tiles import (
    describe_weight,
    describe_x,
    described_or_plain_sums,
    tile_position,
)
from .overlap_kernel import fetch_early, start_after_previous


@triton.jit
def rope_linear_kernel(
    x, weight, bias, cos, sin, out, parts, flags, M, T,
    stride_x: tl.constexpr, stride_w: tl.constexpr,
    stride_cos: tl.constexpr, stride_sin: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
    WEIGHT_KN: tl.constexpr, HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, PERSISTENT: tl.constexpr, TMA: tl.constexpr, PIECES: tl.constexpr,
    CHUNKS: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """T: rows of the tables. WRAPS: they are fewer than M and begin anew at every multiple of T."""
    fetch_early(PDL, weight, N, K, stride_w, WEIGHT_KN)
    start_after_previous(PDL)
    tl.static_assert(BLOCK_N % HEAD_DIM == 0, "a tile holds whole heads")
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    x_view, w_view = x, weight
    if TMA:
        x_view = describe_x(x, M, stride_x, K, BLOCK_M, BLOCK_K)
        w_view = describe_weight(weight, stride_w, N, K, WEIGHT_KN, BLOCK_N, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * TILES_N
    program = tl.program_id(0)
    if PERSISTENT:
        tl.static_assert(SPLIT_K == 1, "persistent programs do not split K")
        for tile in tl.range(program, tiles, tl.num_programs(0), flatten=True):
            first_m, column = tile_position(tile, M, BLOCK_M, TILES_N, GROUP_M)
            first_n = column * BLOCK_N
            sums = described_or_plain_sums(
                x_view, w_view, first_m, first_n, tile * 0, STEPS, M, stride_x, stride_w, N, K,
                WEIGHT_KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_M, EVEN_N, EVEN_K, PRECISION,
            )  # fmt: skip
            finish_heads(
                sums, first_m, first_n, bias, cos, sin, out, parts, M, T, stride_cos, stride_sin,
                N, HEAD_DIM, ROTATED, BLOCK_M, BLOCK_N, PIECES, CHUNKS, 0, BLOCK_N, EVEN_M,
                EVEN_N, HAS_BIAS, WRAPS,
            )  # fmt: skip
    else:
        # with SPLIT_K the programs of one part are neighbours and the last part's come last
        part = program // tiles
        tile = program - part * tiles
        first_m, column = tile_position(tile, M, BLOCK_M, TILES_N, GROUP_M)
        first_n = column * BLOCK_N
        PART_STEPS: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
        steps = STEPS
        first_k = program * 0
        if SPLIT_K > 1:
            steps = tl.minimum(PART_STEPS, STEPS - part * PART_STEPS)
            first_k = part * (PART_STEPS * BLOCK_K)
        sums = described_or_plain_sums(
            x_view, w_view, first_m, first_n, first_k, steps, M, stride_x, stride_w, N, K,
            WEIGHT_KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_M, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
        if SPLIT_K > 1:
            slot = tile * (SPLIT_K - 1)
            if part < SPLIT_K - 1:
                give_part(sums, parts, flags, slot + part, BLOCK_M, BLOCK_N)
            else:
                wait_for_parts(flags, slot, SPLIT_K - 1)
                finish_heads(
                    sums, first_m, first_n, bias, cos, sin, out,
                    parts + slot.to(tl.int64) * (BLOCK_M * BLOCK_N), M, T, stride_cos, stride_sin,
                    N, HEAD_DIM, ROTATED, BLOCK_M, BLOCK_N, PIECES, CHUNKS, SPLIT_K - 1, BLOCK_N,
                    EVEN_M, EVEN_N, HAS_BIAS, WRAPS,
                )  # fmt: skip
        else:
            finish_heads(
                sums, first_m, first_n, bias, cos, sin, out, parts, M, T, stride_cos, stride_sin,
                N, HEAD_DIM, ROTATED, BLOCK_M, BLOCK_N, PIECES, CHUNKS, 0, BLOCK_N, EVEN_M,
                EVEN_N, HAS_BIAS, WRAPS,
            )  # fmt: skip


@triton.jit
def finish_heads(
    sums, first_m, first_n, bias, cos, sin, out, parts, M, T,
    stride_cos: tl.constexpr, stride_sin: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, PITCH: tl.constexpr, EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr, HAS_BIAS: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Rotate and store a tile of heads, in pieces side by side, as ``finish_tile`` does.

    PARTS, PITCH: as of ``finish_tile`` (linear_epilogue.py). CHUNKS: of ``rotate_halves``.
    """
    if PIECES > 1:
        HALF_N: tl.constexpr = BLOCK_N // 2
        left, right = tl.split(tl.permute(tl.reshape(sums, (BLOCK_M, 2, HALF_N)), (0, 2, 1)))
        finish_heads(
            left, first_m, first_n, bias, cos, sin, out, parts, M, T, stride_cos, stride_sin, N,
            HEAD_DIM, ROTATED, BLOCK_M, HALF_N, PIECES // 2, CHUNKS, PARTS, PITCH, EVEN_M, EVEN_N,
            HAS_BIAS, WRAPS,
        )  # fmt: skip
        finish_heads(
            right, first_m, first_n + HALF_N, bias, cos, sin, out, parts + HALF_N, M, T,
            stride_cos, stride_sin, N, HEAD_DIM, ROTATED, BLOCK_M, HALF_N, PIECES // 2, CHUNKS,
            PARTS, PITCH, EVEN_M, EVEN_N, HAS_BIAS, WRAPS,
        )  # fmt: skip
    else:
        if PARTS > 0:
            sums = add_parts(sums, parts, PARTS, BLOCK_M, BLOCK_N, PITCH)
        if HAS_BIAS:
            sums += load_row(bias, first_n, N, BLOCK_N, EVEN_N).to(tl.float32)[None, :]
        HEADS: tl.constexpr = BLOCK_N // HEAD_DIM
        halves = tl.reshape(sums, (BLOCK_M, HEADS, 2, HEAD_DIM // 2))
        low, high = tl.split(tl.permute(halves, (0, 1, 3, 2)))
        rotate_halves(
            low, high, 0, first_m, first_n, cos, sin, out, M, T, stride_cos, stride_sin, N,
            HEAD_DIM, ROTATED, BLOCK_M, HEADS, HEAD_DIM // 2, CHUNKS, EVEN_M, EVEN_N, WRAPS,
        )  # fmt: skip


@triton.jit
def rotate_halves(
    low, high, first_j: tl.constexpr, first_m, first_n, cos, sin, out, M, T,
    stride_cos: tl.constexpr, stride_sin: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Rotate and store WIDTH elements of both halves of some heads, from ``first_j`` on.

    low, high: sums [BLOCK_M, HEADS, WIDTH]. In CHUNKS one after another, which saves registers.
    """
    if CHUNKS > 1:
        HALF: tl.constexpr = WIDTH // 2
        low_left, low_right = tl.split(
            tl.permute(tl.reshape(low, (BLOCK_M, HEADS, 2, HALF)), (0, 1, 3, 2))
        )
        high_left, high_right = tl.split(
            tl.permute(tl.reshape(high, (BLOCK_M, HEADS, 2, HALF)), (0, 1, 3, 2))
        )
        rotate_halves(
            low_left, high_left, first_j, first_m, first_n, cos, sin, out, M, T, stride_cos,
            stride_sin, N, HEAD_DIM, ROTATED, BLOCK_M, HEADS, HALF, CHUNKS // 2, EVEN_M, EVEN_N,
            WRAPS,
        )  # fmt: skip
        rotate_halves(
            low_right, high_right, first_j + HALF, first_m, first_n, cos, sin, out, M, T,
            stride_cos, stride_sin, N, HEAD_DIM, ROTATED, BLOCK_M, HEADS, HALF, CHUNKS // 2,
            EVEN_M, EVEN_N, WRAPS,
        )  # fmt: skip
    else:
        APART: tl.constexpr = HEAD_DIM // 2
        j = first_j + tl.arange(0, WIDTH)
        head = first_n + tl.arange(0, HEADS) * HEAD_DIM  # first column of each
        column = head[:, None] + j[None, :]
        # -- x cos + (-x_high, x_low) sin; what is not rotated stays, NaN and infinities too -------
        row = first_m + tl.arange(0, BLOCK_M)
        if not EVEN_M:
            row = tl.minimum(row, M - 1)
        if WRAPS:
            row = row % T
        # tables are read for tiles with a rotated head only
        wanted = (tl.zeros((WIDTH,), tl.int32) + first_n < ROTATED)[None, :]
        cos_at = cos + row.to(tl.int64)[:, None] * stride_cos + j[None, :]
        sin_at = sin + row.to(tl.int64)[:, None] * stride_sin + j[None, :]
        turned = (head < ROTATED)[None, :, None]
        new = low * _table(cos_at, wanted) - high * _table(sin_at, wanted)
        _store_half(
            tl.where(turned, new, low), first_m, column, head, out, M, N, BLOCK_M, EVEN_M, EVEN_N
        )
        new = high * _table(cos_at + APART, wanted) + low * _table(sin_at + APART, wanted)
        _store_half(
            tl.where(turned, new, high), first_m, column + APART, head, out, M, N, BLOCK_M, EVEN_M,
            EVEN_N,
        )  # fmt: skip


@triton.jit
def _table(pointers, wanted):
    """Half a table [rows, HALF] for every head, [rows, 1, HALF]."""
    return tl.load(pointers, mask=wanted, other=0.0).to(tl.float32)[:, None, :]


@triton.jit
def _store_half(
    values, first_m, column, head, out, M, N: tl.constexpr, BLOCK_M: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Round one half of some heads [rows, heads, HALF] and store what lies inside."""
    m_idx = tl.arange(0, BLOCK_M)
    corner = out + first_m.to(tl.int64) * N  # rows times columns may pass 2^31
    pointers = corner + (m_idx[:, None, None] * N + column[None, :, :])
    rounded = values.to(out.dtype.element_ty)
    if EVEN_M and EVEN_N:
        tl.store(pointers, rounded)
    else:
        inside = (m_idx[:, None, None] < M - first_m) & (head[None, :, None] < N)
        tl.store(pointers, rounded, mask=inside)
