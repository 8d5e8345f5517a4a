"""What the producer of ``hopper_kernel.py`` loads: a tile row of a head at a time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_registers import ROWS
from .hopper_short import load_short
from .hopper_transfers import WORDS, barrier_of_threads, tma_load
from .hopper_units import next_number, tile_row, unit_place


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, word_desc, q_tail_desc, k_tail_desc, v_tail_desc,
    k_short_desc, v_short_desc, k_short_tail_desc, v_short_tail_desc,
    q_bufs, kv_bufs, word_bufs, unit_bufs, q_tails, kv_tails,
    q_full, q_empty, k_full, v_full, kv_empty,
    queue, plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, rows, heavy_rows, last_heads, pieces,
    BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr, RING: gl.constexpr, Q_SLOTS: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr, SPLIT: gl.constexpr,
    SHIFTED: gl.constexpr,
):  # fmt: skip
    """Take units from the queue and load what they need, until the queue is empty."""
    TILE_BYTES: gl.constexpr = ROWS * (BLOCK_D + TAIL_D) * 2
    STEP: gl.constexpr = 8 if SHIFTED else ROWS  # keys from a column number to the next
    PAIRS: gl.constexpr = (RING + 1) // 2
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, 8, layout=lane)
    units = rows * batch_heads
    heavy_units = heavy_rows * batch_heads
    if SPLIT:  # a unit is a piece of a heavy row, or one of the other rows
        heavy_units *= pieces
        units += heavy_rows * (pieces - 1) * batch_heads
    turn = 0
    step = 0
    asked = units + gl.num_programs(0)  # by each worker for each of its units, and once in vain
    number = gl.program_id(0)
    while number >= 0:
        after = next_number(queue, asked)
        b, h, slot = unit_place(
            number, batch_heads, heads, rows, heavy_rows, heavy_units, last_heads
        )  # fmt: skip
        piece = 0
        if SPLIT:
            piece = slot % pieces
            if number < heavy_units:
                slot = slot // pieces
        valid = number < units
        row, start, middle, stop = tile_row(
            valid, b, h, slot, rows, plane_map, plane_stride_b, plane_stride_h,
            row_order, row_ptr, full_start, SINGLE_PLANE,
        )  # fmt: skip
        short = 0  # of a row whose first tile is a short one, which is loaded last
        if SHIFTED:
            short = gl.where(middle < 0, 1, 0)
            middle = gl.where(middle < 0, -1 - middle, middle)
        if SPLIT and valid and number < heavy_units:
            count = stop - start
            stop = start + count * (piece + 1) // pieces
            start = start + count * piece // pieces
            middle = gl.minimum(gl.maximum(middle, start), stop)
            short = gl.where(piece > 0, 0, short)
        if SHIFTED:  # a tile that is all of a row is as long as any: rows begin in the loop
            short = gl.where(stop - start > 1, short, 0)

        # -- query tile, with what the consumer has to know ----
        q_slot = turn % Q_SLOTS
        mbarrier.wait(q_empty.index(q_slot), ((turn // Q_SLOTS) & 1) ^ 1)
        unit = gl.where(field == 0, stop - start - short, gl.where(field == 1, stop - middle, row))
        unit = gl.where(field == 3, b, gl.where(field == 4, h, unit))
        if SPLIT:
            place = gl.where(number < heavy_units, slot * pieces + piece, -1)
            unit = gl.where(field == 6, place, unit)
        if SHIFTED:
            unit = gl.where(field == 7, short, unit)
        unit_bufs.index(q_slot).store(gl.where(field == 5, valid.to(gl.int32), unit))
        barrier_of_threads()  # one lane signals for all that wrote
        mbarrier.expect(q_full.index(q_slot), TILE_BYTES, pred=valid)
        mbarrier.arrive(q_full.index(q_slot), count=1, pred=number >= units)
        tma_load(
            q_desc, [b, h, row * ROWS, 0], q_full.index(q_slot), q_bufs.index(q_slot), pred=valid
        )
        if TAIL_D > 0:
            tma_load(
                q_tail_desc, [b, h, row * ROWS, BLOCK_D], q_full.index(q_slot),
                q_tails.index(q_slot), pred=valid,
            )  # fmt: skip

        # -- keys, values and mask words, from the last tile on: full ones first ----
        kv = h // GROUP
        for t in range(1 - stop, 1 - start - short):
            first_k = gl.load(col_idx - t) * STEP
            slot = (2 * step) % RING
            if RING % 2 == 0:
                mbarrier.wait(kv_empty.index(step % PAIRS), ((step // PAIRS) & 1) ^ 1)
            full = k_full.index(step % PAIRS)
            if HAS_PART:
                part = -t < middle
                tile_id = gl.load(bitmap_id - t)
                mbarrier.expect(full, TILE_BYTES + WORDS * 4, pred=part)
                mbarrier.expect(full, TILE_BYTES, pred=-t >= middle)
                tma_load(word_desc, [tile_id, 0], full, word_bufs.index(step % PAIRS), pred=part)
            else:
                mbarrier.expect(full, TILE_BYTES)
            tma_load(k_desc, [b, kv, first_k, 0], full, kv_bufs.index(slot))
            if TAIL_D > 0:
                tma_load(k_tail_desc, [b, kv, first_k, BLOCK_D], full, kv_tails.index(slot))
            if RING % 2 == 1:  # the values take the place of the last keys
                last = step + PAIRS - 1
                mbarrier.wait(kv_empty.index(last % PAIRS), ((last // PAIRS) & 1) ^ 1)
            if RING == 2:  # keys and values are given back apart
                mbarrier.wait(kv_empty.index(1), (step & 1) ^ 1)
            slot = (2 * step + 1) % RING
            full = v_full.index(step % PAIRS)
            mbarrier.expect(full, TILE_BYTES)
            tma_load(v_desc, [b, kv, first_k, 0], full, kv_bufs.index(slot))
            if TAIL_D > 0:
                tma_load(v_tail_desc, [b, kv, first_k, BLOCK_D], full, kv_tails.index(slot))
            step += 1
        if SHIFTED:
            if short > 0:
                load_short(
                    k_short_desc, v_short_desc, k_short_tail_desc, v_short_tail_desc, word_desc,
                    kv_bufs, word_bufs, kv_tails, k_full, v_full, kv_empty,
                    b, kv, gl.load(col_idx + start) * STEP, gl.load(bitmap_id + start), step,
                    BLOCK_D, TAIL_D, RING,
                )  # fmt: skip
            step += short
        turn += 1
        number = gl.where(valid, after, -1)
