"""Device functions that turn the stored mask of one tile into a boolean tile in registers.

A part tile is masked either from its bitmap (64-bit words of 8x8 elements) or from arithmetic on
positions (a band). Both are written so that the work per element is one or two comparisons;
whatever depends only on the row of a tile is kept in vectors of one value per row.
"""

import triton
import triton.language as tl


@triton.jit
def split_program_id(slots, batch_heads, heads, HEADS_FAST: tl.constexpr):
    """Program id to (batch, head, slot); slots are tile rows or query rows, ``slots`` of them."""
    pid = tl.program_id(0)
    if HEADS_FAST:
        slot = pid // batch_heads
        bh = pid % batch_heads
    else:
        bh = pid // slots
        slot = pid % slots
    return bh // heads, bh % heads, slot


@triton.jit
def grouped_program_id(pid, slots, planes, heads, heavy, together):
    """Program id to (batch, head, slot): the first ``heavy`` slots of all heads, then the others,
    for ``together`` neighbouring heads at a time.
    """
    rest = pid - heavy * planes
    others = tl.maximum(slots - heavy, 1)  # all may be heavy
    first = rest // (others * together) * together
    inner = rest % (others * together)
    count = tl.maximum(tl.minimum(together, planes - first), 1)
    plane = tl.where(rest < 0, pid % planes, first + inner % count)
    slot = tl.where(rest < 0, pid // planes, heavy + inner // count)
    return plane // heads, plane % heads, slot


@triton.jit
def bitmap_tile(
    bitmap, tile_id, rows_in_tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Expand the bitmap of one tile to int32 [len(rows_in_tile), BLOCK_N], non-zero where kept.

    Words are column-major in the tile and bits row-major in the 8x8, least significant first; read
    as little-endian bytes, byte ``group * BLOCK_M + row`` therefore holds columns 8*group ..
    8*group+7 of ``row``. One byte is loaded per row and 8 columns, never one per element.
    """
    first = bitmap.to(tl.pointer_type(tl.uint8)) + tile_id.to(tl.int64) * (BLOCK_M * (BLOCK_N // 8))
    group = tl.arange(0, BLOCK_N // 8)
    octets = tl.load(first + (group[None, :] * BLOCK_M + rows_in_tile[:, None])).to(tl.int32)
    bit = 1 << tl.arange(0, 8)
    kept = octets[:, :, None] & bit[None, None, :]
    return tl.reshape(kept, (rows_in_tile.shape[0], BLOCK_N))


@triton.jit
def band_bounds(
    q_pos, k_len, lo, hi, global_q, global_k, cap,
    HAS_LO: tl.constexpr, HAS_HI: tl.constexpr, HAS_GLOBAL_Q: tl.constexpr,
    HAS_GLOBAL_K: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Key range of each query row under a band: (lower, upper, head), int32 [rows].

    Row q keeps key k when lower <= k <= upper or k < head; the cap and the end of the keys are
    folded into the bounds, so the tile needs no further comparison for them.
    """
    lower = q_pos * 0
    upper = lower + (k_len - 1)
    head = lower
    if HAS_LO:
        lower = q_pos + lo
    if HAS_HI:
        upper = tl.minimum(upper, q_pos + hi)
    if HAS_GLOBAL_Q:
        sees_all = q_pos < global_q
        lower = tl.where(sees_all, 0, lower)
        upper = tl.where(sees_all, k_len - 1, upper)
    if HAS_GLOBAL_K:
        head = head + tl.minimum(global_k, k_len)
    if HAS_CAP:
        upper = tl.minimum(upper, q_pos + cap)
        if HAS_GLOBAL_K:
            head = tl.minimum(head, q_pos + (cap + 1))
    return lower, upper, head


@triton.jit
def band_tile(
    lower, upper, head, first_key, BLOCK_N: tl.constexpr,
    USE_LOWER: tl.constexpr, USE_UPPER: tl.constexpr, USE_HEAD: tl.constexpr,
):  # fmt: skip
    """Boolean [rows, BLOCK_N] of a band on the tile whose first key is ``first_key``.

    The bounds move with the tile (one subtraction per row) and the column numbers stay constant.
    """
    n = tl.arange(0, BLOCK_N)[None, :]
    if USE_UPPER:
        keep = n <= (upper - first_key)[:, None]
        if USE_LOWER:
            keep = keep & (n >= (lower - first_key)[:, None])
    else:
        keep = n >= (lower - first_key)[:, None]
    if USE_HEAD:
        keep = keep | (n < (head - first_key)[:, None])
    return keep


@triton.jit
def mask_part_tile(
    s, t, middle, first_k, lower, upper, head, bitmap_id, bitmap, m_idx, k_len,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_K: tl.constexpr, LOOPS: tl.constexpr,
    BAND: tl.constexpr, HAS_LO: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_HEAD: tl.constexpr,
):  # fmt: skip
    """Set the scores of masked elements of a tile to -inf; entries from ``middle`` on are full."""
    if BAND:
        low = lower
        high = upper
        if LOOPS == 4:
            low = tl.where(t < middle, lower, 0)
            high = tl.where(t < middle, upper, k_len)
        keep = band_tile(low, high, head, first_k, BLOCK_N, HAS_LO, HAS_UPPER, HAS_HEAD)
    else:
        kept = bitmap_tile(bitmap, tl.load(bitmap_id + t), m_idx, BLOCK_M, BLOCK_N)
        if LOOPS == 4:
            kept = kept | (t >= middle).to(tl.int32)
        keep = kept != 0
    return tl.where(keep, s, float("-inf"))
