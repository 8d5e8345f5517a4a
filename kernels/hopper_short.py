"""The short tile that ends a row of shifted tiles: 32 keys, for what else were a tile of 64.

Source: ours; the steps are those of a tile in ``hopper_kernel.py``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_registers import (
    ROWS,
    SHORT,
    fragment_layout,
    kept_scores,
    rescaled,
    spread,
    weighed,
    without,
)
from .hopper_transfers import WORDS, next_place, reinterpreted, tma_load


@gluon.jit
def short_view(buffer, WIDTH: gl.constexpr):
    """The first half of a buffer of 64 keys as one of 32."""
    return reinterpreted(buffer, buffer.dtype, [1, 1, SHORT, WIDTH], buffer.layout)


@gluon.jit
def attend_short(
    q_tile, q_tail, k_buf, v_buf, k_tail_buf, v_tail_buf, word_buf, k_full, v_full, phase,
    acc, acc_tail, offset, total,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """(result, its other columns, offset, sums) with the keys of a short tile."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHORT, 16])
    tail_layout: gl.constexpr = acc_tail.type.layout
    weights: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    tail_weights: gl.constexpr = gl.DotOperandLayout(0, tail_layout, 2)
    word_layout: gl.constexpr = without(fragment_layout(), [1, 3, 5])
    zero = gl.zeros([ROWS, SHORT], gl.float32, scores)
    mbarrier.wait(k_full, phase)
    k_tile = short_view(k_buf, BLOCK_D).reshape([SHORT, BLOCK_D]).permute((1, 0))
    s = warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)
    if TAIL_D > 0:
        k_tail = short_view(k_tail_buf, TAIL_D).reshape([SHORT, TAIL_D]).permute((1, 0))
        s = warpgroup_mma(q_tail, k_tail, s, is_async=True)
    words = word_buf.reshape([4, 8, 4]).load(word_layout)
    s = warpgroup_mma_wait(0, deps=(s,))
    s = kept_scores(s, words)
    p, offset, total, alpha = weighed(s, offset, total, MULT, dtype)
    acc = rescaled(acc, alpha, BLOCK_D)
    if TAIL_D == ROWS:
        acc_tail = rescaled(acc_tail, alpha, TAIL_D)
    elif TAIL_D > 0:
        acc_tail = acc_tail * spread(alpha, TAIL_D, tail_layout)
    p = gl.convert_layout(p, weights, assert_trivial=True)
    mbarrier.wait(v_full, phase)
    v_tile = short_view(v_buf, BLOCK_D).reshape([SHORT, BLOCK_D])
    acc = warpgroup_mma(p, v_tile, acc, is_async=True)
    if TAIL_D > 0:
        v_tail = short_view(v_tail_buf, TAIL_D).reshape([SHORT, TAIL_D])
        p = gl.convert_layout(p, tail_weights, assert_trivial=True)
        acc_tail = warpgroup_mma(p, v_tail, acc_tail, is_async=True)
        acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, acc_tail, offset, total


@gluon.jit
def load_short(
    k_desc, v_desc, k_tail_desc, v_tail_desc, word_desc,
    kv_bufs, word_bufs, kv_tails, k_full, v_full, kv_empty,
    b, kv, first_k, tile_id, pair, phase, slot,
    BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Load the keys, values and mask words of a short tile to a place of the ring."""
    BYTES: gl.constexpr = SHORT * (BLOCK_D + TAIL_D) * 2
    if RING % 2 == 0:
        slot = 2 * pair
        mbarrier.wait(kv_empty.index(pair), phase)
    full = k_full.index(pair)
    mbarrier.expect(full, BYTES + WORDS * 4)
    tma_load(word_desc, [tile_id, 0], full, word_bufs.index(pair))
    tma_load(k_desc, [b, kv, first_k, 0], full, short_view(kv_bufs.index(slot), BLOCK_D))
    if TAIL_D > 0:
        tail = short_view(kv_tails.index(slot), TAIL_D)
        tma_load(k_tail_desc, [b, kv, first_k, BLOCK_D], full, tail)
    if RING == 3:  # the values take the place of the last keys
        mbarrier.wait(kv_empty.index(pair ^ 1), phase ^ pair)
    slot = next_place(slot, RING)
    full = v_full.index(pair)
    mbarrier.expect(full, BYTES)
    tma_load(v_desc, [b, kv, first_k, 0], full, short_view(kv_bufs.index(slot), BLOCK_D))
    if TAIL_D > 0:
        tail = short_view(kv_tails.index(slot), TAIL_D)
        tma_load(v_tail_desc, [b, kv, first_k, BLOCK_D], full, tail)
