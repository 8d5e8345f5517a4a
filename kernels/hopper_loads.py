"""What the two loading warps of ``hopper_kernel.py`` do: one takes units and loads their queries,
the other loads keys, values and mask words."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_registers import ROWS
from .hopper_short import load_short
from .hopper_transfers import WORDS, barrier_of_threads, next_pair, next_place, tma_load
from .hopper_units import first_number, next_number, tile_row, unit_place


@gluon.jit
def load_queries(
    q_desc, q_tail_desc, q_bufs, q_tails, unit_bufs, key_bufs, unit_full, q_full, q_empty,
    queue, sides, plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, row_order,
    batch_heads, heads, rows, heavy_rows, last_heads, pieces,
    BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, Q_SLOTS: gl.constexpr, GROUP: gl.constexpr,
    SINGLE_PLANE: gl.constexpr, SPLIT: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """Take units from the queue, say what they are and load their queries, until the queue is
    empty."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, 8, layout=lane)
    heavy = heavy_rows  # units of a head: rows, or pieces of them
    if SPLIT:
        heavy = heavy_rows * pieces
    of_head = rows - heavy_rows + heavy
    number, side, empty = first_number(queue, sides, batch_heads, of_head)
    turn = 0
    going = 1
    while going > 0:
        q_slot = turn % Q_SLOTS
        if Q_SLOTS == 2:  # what no worker has taken yet may still go to another one
            mbarrier.wait(q_empty.index(q_slot), ((turn // Q_SLOTS) & 1) ^ 1)
        if turn > 0:
            number, side, empty = next_number(queue, side, empty, batch_heads, of_head)
        b, h, slot = unit_place(
            number, batch_heads, heads, heavy, rows - heavy_rows, last_heads
        )  # fmt: skip
        valid = number < batch_heads * of_head
        in_pieces = slot < heavy
        piece = 0
        if SPLIT:
            piece = slot % pieces
            slot = gl.where(in_pieces, slot // pieces, slot - heavy + heavy_rows)
        row, start, middle, stop = tile_row(
            valid, b, h, slot, rows, plane_map, plane_stride_b, plane_stride_h,
            row_order, row_ptr, full_start, SINGLE_PLANE,
        )  # fmt: skip
        short = 0  # of a row whose first tile is a short one, which is loaded last
        if SHIFTED:
            short = gl.where(middle < 0, 1, 0)
            middle = gl.where(middle < 0, -1 - middle, middle)
        if SPLIT and valid and in_pieces:
            tiles = stop - start
            stop = start + tiles * (piece + 1) // pieces
            start = start + tiles * piece // pieces
            middle = gl.minimum(gl.maximum(middle, start), stop)
            short = gl.where(piece > 0, 0, short)
        if SHIFTED:  # a tile that is all of a row is as long as any: rows begin in the loop
            short = gl.where(stop - start > 1, short, 0)
        unit = gl.where(field == 0, stop - start - short, gl.where(field == 1, stop - middle, row))
        unit = gl.where(field == 3, b, gl.where(field == 4, h, unit))
        if SPLIT:
            place = gl.where(in_pieces, slot * pieces + piece, -1)
            unit = gl.where(field == 6, place, unit)
        if SHIFTED:
            unit = gl.where(field == 7, short, unit)
        of_keys = gl.where(field == 2, stop, unit)
        of_keys = gl.where(field == 4, h // GROUP, of_keys)
        if Q_SLOTS == 1:  # all is known when the slot is free
            mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        unit_bufs.index(q_slot).store(gl.where(field == 5, valid.to(gl.int32), unit))
        key_bufs.index(q_slot).store(gl.where(field == 5, valid.to(gl.int32), of_keys))
        going = valid.to(gl.int32)
        barrier_of_threads()  # one lane signals for all that wrote
        mbarrier.arrive(unit_full.index(q_slot), count=1)
        mbarrier.expect(q_full.index(q_slot), ROWS * (BLOCK_D + TAIL_D) * 2, pred=valid)
        mbarrier.arrive(q_full.index(q_slot), count=1, pred=going == 0)
        tma_load(
            q_desc, [b, h, row * ROWS, 0], q_full.index(q_slot), q_bufs.index(q_slot), pred=valid
        )
        if TAIL_D > 0:
            tma_load(
                q_tail_desc, [b, h, row * ROWS, BLOCK_D], q_full.index(q_slot),
                q_tails.index(q_slot), pred=valid,
            )  # fmt: skip
        turn += 1


@gluon.jit
def load_keys(
    k_desc, v_desc, word_desc, k_tail_desc, v_tail_desc,
    k_short_desc, v_short_desc, k_short_tail_desc, v_short_tail_desc,
    kv_bufs, word_bufs, key_bufs, kv_tails,
    unit_full, q_empty, k_full, v_full, kv_empty,
    col_idx, bitmap_id,
    BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, RING: gl.constexpr, Q_SLOTS: gl.constexpr,
    HAS_PART: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """Load keys, values and mask words of the units in turn, until one is not valid."""
    TILE_BYTES: gl.constexpr = ROWS * (BLOCK_D + TAIL_D) * 2
    STEP: gl.constexpr = 8 if SHIFTED else ROWS  # keys from a column number to the next
    PAIRS: gl.constexpr = (RING + 1) // 2
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    field = gl.arange(0, 8, layout=everywhere)
    gl.static_assert(RING % 2 == 0 or RING == 3, "of an odd ring the last keys' place is one on")
    turn = 0
    pair = 0
    phase = 1
    slot = 0
    going = 1
    while going > 0:
        q_slot = turn % Q_SLOTS
        mbarrier.wait(unit_full.index(q_slot), (turn // Q_SLOTS) & 1)
        unit = key_bufs.index(q_slot).load(everywhere)
        count = gl.sum(gl.where(field == 0, unit, 0), 0)
        whole = gl.sum(gl.where(field == 1, unit, 0), 0)
        at = gl.sum(gl.where(field == 2, unit, 0), 0)
        b = gl.sum(gl.where(field == 3, unit, 0), 0)
        kv = gl.sum(gl.where(field == 4, unit, 0), 0)
        going = gl.sum(gl.where(field == 5, unit, 0), 0)
        short = gl.sum(gl.where(field == 7, unit, 0), 0)
        barrier_of_threads()  # one lane signals for all that read
        mbarrier.arrive(q_empty.index(q_slot), count=1)

        # -- keys, values and mask words, from the last tile on: full ones first ----
        for t in range(0, count):
            at = at - 1
            first_k = gl.load(col_idx + at) * STEP
            tile_id = 0
            if HAS_PART:
                tile_id = gl.load(bitmap_id + at)
            if RING % 2 == 0:
                slot = 2 * pair
                mbarrier.wait(kv_empty.index(pair), phase)
            full = k_full.index(pair)
            if HAS_PART:
                part = t >= whole
                mbarrier.expect(full, TILE_BYTES + WORDS * 4, pred=part)
                mbarrier.expect(full, TILE_BYTES, pred=t < whole)
                tma_load(word_desc, [tile_id, 0], full, word_bufs.index(pair), pred=part)
            else:
                mbarrier.expect(full, TILE_BYTES)
            tma_load(k_desc, [b, kv, first_k, 0], full, kv_bufs.index(slot))
            if TAIL_D > 0:
                tma_load(k_tail_desc, [b, kv, first_k, BLOCK_D], full, kv_tails.index(slot))
            if RING == 3:  # the values take the place of the last keys
                mbarrier.wait(kv_empty.index(pair ^ 1), phase ^ pair)
            if RING == 2:  # keys and values are given back apart
                mbarrier.wait(kv_empty.index(1), phase)
            slot = next_place(slot, RING)
            full = v_full.index(pair)
            mbarrier.expect(full, TILE_BYTES)
            tma_load(v_desc, [b, kv, first_k, 0], full, kv_bufs.index(slot))
            if TAIL_D > 0:
                tma_load(v_tail_desc, [b, kv, first_k, BLOCK_D], full, kv_tails.index(slot))
            slot = next_place(slot, RING)
            pair, phase = next_pair(pair, phase, PAIRS)
        if SHIFTED:  # noqa: SIM102  (known to the compiler, the next one is not)
            if short > 0:
                load_short(
                    k_short_desc, v_short_desc, k_short_tail_desc, v_short_tail_desc, word_desc,
                    kv_bufs, word_bufs, kv_tails, k_full, v_full, kv_empty,
                    b, kv, gl.load(col_idx + at - 1) * STEP, gl.load(bitmap_id + at - 1),
                    pair, phase, slot, BLOCK_D, TAIL_D, RING,
                )  # fmt: skip
                slot = next_place(next_place(slot, RING), RING)
                pair, phase = next_pair(pair, phase, PAIRS)
        turn += 1
