"""Device code that the two kernels of the gradient of attention share.

A weight is recomputed from the log-sum-exp of its row: p = exp(x - lse). Rows without keys get
+inf for their -inf, so that every weight of theirs is exp(-inf), exactly 0; rows past the end too.
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
def weights_of(s, lse, MULT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Weights of scores; ``lse`` (natural) broadcasts to them."""
    # with a bias subtract before multiplying: the lowest finite number times log2(e) overflows
    return tl.exp2((s - lse) * MULT) if HAS_BIAS else tl.exp2(tl.fma(s, MULT, lse * -LOG2E))


@triton.jit
def softcap_slope(s, SOFTCAP: tl.constexpr):
    """Derivative of the softcap at a capped score: 1 - tanh^2."""
    tanh = s * (1.0 / SOFTCAP)
    return 1.0 - tanh * tanh
