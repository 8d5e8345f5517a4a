"""What the producer of ``hopper_shared_kernel.py`` loads: a tile row for several consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_registers import ROWS
from .hopper_transfers import WORDS, barrier_of_threads, tma_load
from .hopper_units import first_number, next_number, tile_row, unit_place

# What a tile is to a consumer, and where its two bits are in the number of the tile.
PART: gl.constexpr = gl.constexpr(0)
NONE: gl.constexpr = gl.constexpr(2)
KIND_BITS: gl.constexpr = gl.constexpr(24)
WHOLE: gl.constexpr = gl.constexpr(0x15000000)  # a tile that is full for all consumers


@gluon.jit
def kind_of(number, ROW: gl.constexpr):
    """What a tile is to a consumer."""
    return (number >> (KIND_BITS + 2 * ROW)) & 3


@gluon.jit
def _next_tile(col_idx, bitmap_id, part, start, full, middle):
    """(column, number with kinds) of the last tile that is left of a row, and both places.

    Part tiles are left in ``start .. part`` and full ones in ``middle .. full``, ends included.
    """
    part_col = gl.load(col_idx + part, mask=part >= start, other=-1)
    full_col = gl.load(col_idx + full, mask=full >= middle, other=-1)
    number = gl.load(bitmap_id + part, mask=part >= start, other=0)
    takes_part = part_col > full_col
    number = gl.where(takes_part, number, WHOLE)
    col = gl.maximum(part_col, full_col)
    taken = takes_part.to(gl.int32)
    return col, number, part - taken, full - 1 + taken


@gluon.jit
def produce_shared(
    q_desc, k_desc, v_desc, word_desc,
    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
    q_full, q_empty, k_full, v_full, k_empty, v_empty,
    queue, sides, plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, rows, heavy_rows, last_heads,
    BLOCK_D: gl.constexpr, KEY_TILES: gl.constexpr, VALUE_TILES: gl.constexpr,
    CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
):  # fmt: skip
    """Take units (a tile row of a head) from the queue and load what they need, until it is
    empty."""
    TILE_BYTES: gl.constexpr = ROWS * BLOCK_D * 2
    WORD_BYTES: gl.constexpr = WORDS * 4
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, 8, layout=lane)
    units = rows * batch_heads
    turn = 0
    k_slot = 0
    k_phase = 1
    v_slot = 0
    v_phase = 1
    number, side, empty = first_number(queue, sides, batch_heads, rows)
    while number >= 0:
        after, side, empty = next_number(queue, side, empty, batch_heads, rows)
        light = rows - heavy_rows
        b, h, slot = unit_place(number, batch_heads, heads, heavy_rows, light, last_heads)
        valid = number < units
        row, start, middle, stop = tile_row(
            valid, b, h, slot, rows, plane_map, plane_stride_b, plane_stride_h,
            row_order, row_ptr, full_start, SINGLE_PLANE,
        )  # fmt: skip
        col, tile, part, full = _next_tile(
            col_idx, bitmap_id, middle - 1, start, stop - 1, middle
        )  # fmt: skip

        # -- query tiles, with what the consumers have to know ----
        q_slot = turn % Q_SLOTS
        mbarrier.wait(q_empty.index(q_slot), ((turn // Q_SLOTS) & 1) ^ 1)
        unit = gl.where(field == 0, stop - start, gl.where(field == 2, row, 0))
        unit = gl.where(field == 3, b, gl.where(field == 4, h, unit))
        unit_bufs.index(q_slot).store(gl.where(field == 5, valid.to(gl.int32), unit))
        barrier_of_threads()  # one lane signals for all that wrote
        loaded = q_full.index(q_slot)
        mbarrier.expect(loaded, CONSUMERS * TILE_BYTES, pred=valid)
        mbarrier.arrive(loaded, count=1, pred=number >= units)
        for i in gl.static_range(CONSUMERS):
            first_q = (row * CONSUMERS + i) * ROWS
            q_tile = q_bufs.index(q_slot * CONSUMERS + i)
            tma_load(q_desc, [b, h, first_q, 0], loaded, q_tile, pred=valid)
        turn += 1

        # -- keys, values and mask words, from the last column on ----
        kv = h // GROUP
        for _ in range(0, stop - start):
            col_then, tile_then, part, full = _next_tile(
                col_idx, bitmap_id, part, start, full, middle
            )  # fmt: skip
            if KEY_TILES == VALUE_TILES:
                mbarrier.wait(k_empty.index(k_slot), k_phase)
            kind_bufs.index(k_slot).store(gl.where(field >= 0, tile, 0))
            barrier_of_threads()  # one lane signals for all that wrote
            arrived = k_full.index(k_slot)
            if HAS_PART:
                parts = 0
                for i in gl.static_range(CONSUMERS):
                    parts += (kind_of(tile, i) == PART).to(gl.int32)
                for i in gl.static_range(CONSUMERS + 1):
                    mbarrier.expect(arrived, TILE_BYTES + i * WORD_BYTES, pred=parts == i)
                of_part = tile & ((1 << KIND_BITS) - 1)
                for i in gl.static_range(CONSUMERS):
                    words = word_bufs.index(k_slot * CONSUMERS + i)
                    at = i * WORDS
                    has = kind_of(tile, i) == PART
                    tma_load(word_desc, [of_part, at], arrived, words, pred=has)
            else:
                mbarrier.expect(arrived, TILE_BYTES)
            tma_load(k_desc, [b, kv, col * ROWS, 0], arrived, k_bufs.index(k_slot))
            k_slot += 1
            k_phase = gl.where(k_slot == KEY_TILES, k_phase ^ 1, k_phase)
            k_slot = gl.where(k_slot == KEY_TILES, 0, k_slot)
            mbarrier.wait(v_empty.index(v_slot), v_phase)
            arrived = v_full.index(v_slot)
            mbarrier.expect(arrived, TILE_BYTES)
            tma_load(v_desc, [b, kv, col * ROWS, 0], arrived, v_bufs.index(v_slot))
            v_slot += 1
            v_phase = gl.where(v_slot == VALUE_TILES, v_phase ^ 1, v_phase)
            v_slot = gl.where(v_slot == VALUE_TILES, 0, v_slot)
            col = col_then
            tile = tile_then
        number = gl.where(valid, after, -1)
