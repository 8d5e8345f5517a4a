"""Device code that the two kernels of the gradient of attention share.

A weight is recomputed from the log-sum-exp of its row: p = exp(x - lse). For rows without keys that
is taken for +inf, so that every weight of theirs is exp(-inf), exactly 0; rows past the end too.
A program takes a piece of a mask tile, since two accumulators and two products hold more registers
than the forward pass needs: a mask tile is TILE_M x TILE_N, a piece BLOCK_M x BLOCK_N.
"""

import triton
import triton.language as tl

from .softmax import LOG2E


@triton.jit
def _bits(octets):
    """Bytes to their bits along a new last dimension, int32, non-zero where set."""
    bit = 1 << tl.arange(0, 8)
    return octets.to(tl.int32)[:, :, None] & bit[None, None, :]


@triton.jit
def kept_by_bitmap(
    bitmap, tile, rows_in_tile, first_column,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Boolean piece of a bitmap, [rows, BLOCK_N], or [BLOCK_N, rows] with KEYS_FIRST.

    See ``bitmap_tile`` for the order of the bytes.
    """
    at = bitmap.to(tl.pointer_type(tl.uint8)) + tile.to(tl.int64) * (TILE_M * (TILE_N // 8))
    group = first_column // 8 + tl.arange(0, BLOCK_N // 8)
    if KEYS_FIRST:
        octets = tl.load(at + (group[:, None] * TILE_M + rows_in_tile[None, :]))
        bits = tl.permute(_bits(octets), (0, 2, 1))
        kept = tl.reshape(bits, (BLOCK_N, rows_in_tile.shape[0]))
    else:
        octets = tl.load(at + (group[None, :] * TILE_M + rows_in_tile[:, None]))
        kept = tl.reshape(_bits(octets), (rows_in_tile.shape[0], BLOCK_N))
    return kept != 0


@triton.jit
def prepared_lse(lse, HAS_BIAS: tl.constexpr):
    """Log-sum-exp of rows as ``weights_of`` adds it to scores; -inf where a row has no keys."""
    less = tl.where(lse == float("-inf"), float("-inf"), -lse)
    return less if HAS_BIAS else less * LOG2E


@triton.jit
def weights_of(s, lse, MULT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Weights of scores; ``lse`` (prepared) broadcasts to them."""
    # with a bias subtract before multiplying: the lowest finite number times log2(e) overflows
    return tl.exp2((s + lse) * MULT) if HAS_BIAS else tl.exp2(tl.fma(s, MULT, lse))


@triton.jit
def _first_half(x, SIZE: tl.constexpr):
    """Of every row of [rows, SIZE] the elements 0, 2, 4 ..."""
    pairs = tl.reshape(x, (x.shape[0], SIZE // 2, 2)) if SIZE > 2 else x
    first, _ = tl.split(pairs)
    return first


@triton.jit
def load_stats(at, STATS_M: tl.constexpr, STATS_N: tl.constexpr):
    """What ``store_stats`` kept of ``STATS_M`` rows: (prepared log-sum-exp, delta).

    With fewer numbers than a program has threads each of them would load by itself all it needs, so
    ``STATS_N`` numbers of a row are loaded, 2 or more.
    """
    kept = tl.load(at + tl.arange(0, STATS_N * STATS_M))
    kept = tl.trans(tl.reshape(kept, (STATS_N, STATS_M)))
    lse, delta = tl.split(tl.reshape(kept, (STATS_M, STATS_N // 2, 2)) if STATS_N > 2 else kept)
    for times in tl.static_range(1, 4):  # 2, 4, 8 or 16 of a row
        if STATS_N >> times > 1:
            lse = _first_half(lse, STATS_N >> times)
            delta = _first_half(delta, STATS_N >> times)
    return lse, delta


@triton.jit
def store_stats(
    stats, rows, lse, delta, STATS_M: tl.constexpr, STATS_N: tl.constexpr
):  # fmt: skip
    """Keep the prepared log-sum-exp and delta of rows: by ``STATS_M`` rows, first one, then the
    other, so that the second kernel loads both of a piece at once.
    """
    at = stats + (rows // STATS_M * (STATS_N * STATS_M) + rows % STATS_M)
    tl.store(at, lse)
    tl.store(at + STATS_M, delta)


@triton.jit
def softcap_slope(s, SOFTCAP: tl.constexpr):
    """Derivative of the softcap at a capped score: 1 - tanh^2."""
    tanh = s * (1.0 / SOFTCAP)
    return 1.0 - tanh * tanh
