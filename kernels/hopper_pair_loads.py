"""What the producer of ``hopper_pair_kernel.py`` loads: two tile rows of a head at a time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_registers import ROWS
from .hopper_transfers import WORDS, barrier_of_threads, tma_load
from .hopper_units import first_number, next_number, unit_place

KEYS: gl.constexpr = gl.constexpr(128)  # of a tile
SLOTS: gl.constexpr = gl.constexpr(2)  # for the query tiles of a unit
FULL: gl.constexpr = gl.constexpr(-1)  # in place of a part tile's number
OTHERS: gl.constexpr = gl.constexpr(-2)  # a tile that the row does not have
MORE: gl.constexpr = gl.constexpr(4)  # a tile of either row follows; 1, 2: one of that row
FAR: gl.constexpr = gl.constexpr(2**30)  # past every column


@gluon.jit
def _unit(
    number, units, plane_map, plane_stride_b, plane_stride_h, row_order,
    batch_heads, heads, rows, heavy_pairs, last_heads, SINGLE_PLANE: gl.constexpr,
):  # fmt: skip
    """(batch, head, first row of the plane in the lists, first of two rows) of a unit.

    Rows are ordered by pairs; where their number is odd, the one that is alone comes first.
    """
    pairs = (rows + 1) // 2
    light = pairs - heavy_pairs
    b, h, slot = unit_place(number, batch_heads, heads, heavy_pairs, light, last_heads)
    base = 0
    if not SINGLE_PLANE:
        at = plane_map + b * plane_stride_b + h * plane_stride_h
        base = gl.load(at, mask=number < units, other=0) * rows
    place = base + gl.maximum(2 * slot - rows % 2, 0)
    return b, h, base, gl.load(row_order + place, mask=number < units, other=0)


@gluon.jit
def _merged(col_idx, bitmap_id, at_0, middle_0, full_0, stop_0, at_1, middle_1, full_1, stop_1):
    """The next column of two rows, what it is to either, and both places in their lists.

    A row's part tiles are ``at .. middle`` and its full tiles ``full .. stop``.
    """
    part_0 = gl.load(col_idx + at_0, mask=at_0 < middle_0, other=FAR)
    whole_0 = gl.load(col_idx + full_0, mask=full_0 < stop_0, other=FAR)
    part_1 = gl.load(col_idx + at_1, mask=at_1 < middle_1, other=FAR)
    whole_1 = gl.load(col_idx + full_1, mask=full_1 < stop_1, other=FAR)
    tile_0 = gl.load(bitmap_id + at_0, mask=at_0 < middle_0, other=0)
    tile_1 = gl.load(bitmap_id + at_1, mask=at_1 < middle_1, other=0)
    col = gl.minimum(gl.minimum(part_0, whole_0), gl.minimum(part_1, whole_1))
    kind_0 = gl.where(part_0 == col, tile_0, gl.where(whole_0 == col, FULL, OTHERS))
    kind_1 = gl.where(part_1 == col, tile_1, gl.where(whole_1 == col, FULL, OTHERS))
    at_0 += (part_0 == col).to(gl.int32)
    full_0 += (whole_0 == col).to(gl.int32)
    at_1 += (part_1 == col).to(gl.int32)
    full_1 += (whole_1 == col).to(gl.int32)
    return col, kind_0, kind_1, at_0, full_0, at_1, full_1


@gluon.jit
def produce_pairs(
    q_desc, k_desc, v_desc, word_desc,
    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    queue, sides, plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, rows, heavy_pairs, last_heads,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
):  # fmt: skip
    """Take units (two tile rows of a head) from the queue and load what they need.

    What a unit is is asked for while the one before is loaded, and its rows one unit earlier, so
    that no load waits for another.
    """
    ROW_BYTES: gl.constexpr = ROWS * BLOCK_D * 2
    KEY_BYTES: gl.constexpr = KEYS * BLOCK_D * 2
    WORD_BYTES: gl.constexpr = 2 * WORDS * 4
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, 8, layout=lane)
    of_tile = gl.arange(0, 4, layout=lane)
    pairs = (rows + 1) // 2
    units = pairs * batch_heads
    turn = 0
    stage = 0
    phase = 1
    number, side, empty = first_number(queue, sides, batch_heads, pairs)
    after, side, empty = next_number(queue, side, empty, batch_heads, pairs)
    b, h, base, row = _unit(
        number, units, plane_map, plane_stride_b, plane_stride_h, row_order,
        batch_heads, heads, rows, heavy_pairs, last_heads, SINGLE_PLANE,
    )  # fmt: skip
    first = row_ptr + base + row
    known = number < units
    both = known and row + 1 < rows
    at_0 = gl.load(first, mask=known, other=0)
    stop_0 = gl.load(first + 1, mask=known, other=0)
    stop_1 = gl.load(first + 2, mask=both, other=0)
    middle_0 = gl.load(full_start + base + row, mask=known, other=0)
    middle_1 = gl.load(full_start + base + row + 1, mask=both, other=0)
    b_next, h_next, base_next, row_next = _unit(
        after, units, plane_map, plane_stride_b, plane_stride_h, row_order,
        batch_heads, heads, rows, heavy_pairs, last_heads, SINGLE_PLANE,
    )  # fmt: skip
    while number >= 0:
        later, side, empty = next_number(queue, side, empty, batch_heads, pairs)
        valid = number < units
        full_0 = middle_0
        both = valid and row + 1 < rows
        at_1 = gl.where(both, stop_0, 0)
        full_1 = middle_1
        left = (stop_0 - at_0) + (stop_1 - at_1)

        # -- query tiles, with what the consumers have to know ----
        q_slot = turn % SLOTS
        mbarrier.wait(q_empty.index(q_slot), ((turn // SLOTS) & 1) ^ 1)
        first_of = gl.where(left > 0, MORE, 0)
        unit = gl.where(field == 0, first_of, gl.where(field == 2, row, 0))
        unit = gl.where(field == 3, b, gl.where(field == 4, h, unit))
        unit_bufs.index(q_slot).store(gl.where(field == 5, valid.to(gl.int32), unit))
        barrier_of_threads()  # one lane signals for all that wrote
        loaded = q_full.index(q_slot)
        mbarrier.expect(loaded, 2 * ROW_BYTES, pred=valid)
        mbarrier.arrive(loaded, count=1, pred=number >= units)
        tma_load(q_desc, [b, h, row * ROWS, 0], loaded, q_bufs.index(2 * q_slot), pred=valid)
        below = (row + 1) * ROWS
        tma_load(q_desc, [b, h, below, 0], loaded, q_bufs.index(2 * q_slot + 1), pred=valid)
        turn += 1

        # -- the next unit's lists, and the row of the one after it ----
        first = row_ptr + base_next + row_next
        known = after < units
        both = known and row_next + 1 < rows
        at_next = gl.load(first, mask=known, other=0)
        stop_next = gl.load(first + 1, mask=known, other=0)
        end_next = gl.load(first + 2, mask=both, other=0)
        first = full_start + base_next + row_next
        middle_next = gl.load(first, mask=known, other=0)
        below_next = gl.load(first + 1, mask=both, other=0)
        b_later, h_later, base_later, row_later = _unit(
            later, units, plane_map, plane_stride_b, plane_stride_h, row_order,
            batch_heads, heads, rows, heavy_pairs, last_heads, SINGLE_PLANE,
        )  # fmt: skip

        # -- keys, values and mask words of the columns that either row has ----
        kv = h // GROUP
        here = left > 0
        col, kind_0, kind_1, at_0, full_0, at_1, full_1 = _merged(
            col_idx, bitmap_id, at_0, middle_0, full_0, stop_0, at_1, middle_1, full_1, stop_1
        )
        while here:
            # whether a consumer has the tile after this one, too
            left = (middle_0 - at_0) + (stop_0 - full_0) + (middle_1 - at_1) + (stop_1 - full_1)
            col_then, kind_0_then, kind_1_then, at_0, full_0, at_1, full_1 = _merged(
                col_idx, bitmap_id, at_0, middle_0, full_0, stop_0, at_1, middle_1, full_1, stop_1
            )
            owners = (kind_0_then > OTHERS).to(gl.int32) + 2 * (kind_1_then > OTHERS).to(gl.int32)
            owners = gl.where(left > 0, owners + MORE, 0)

            mbarrier.wait(k_empty.index(stage), phase)
            kind = gl.where(of_tile == 0, kind_0, gl.where(of_tile == 1, kind_1, owners))
            kind_bufs.index(stage).store(kind)
            barrier_of_threads()  # one lane signals for all that wrote
            full = k_full.index(stage)
            if HAS_PART:
                parts = (kind_0 >= 0).to(gl.int32) + (kind_1 >= 0).to(gl.int32)
                mbarrier.expect(full, KEY_BYTES, pred=parts == 0)
                mbarrier.expect(full, KEY_BYTES + WORD_BYTES, pred=parts == 1)
                mbarrier.expect(full, KEY_BYTES + 2 * WORD_BYTES, pred=parts == 2)
                for half in gl.static_range(2):
                    at = half * WORDS
                    words = word_bufs.index(4 * stage + half)
                    tma_load(word_desc, [kind_0, at], full, words, pred=kind_0 >= 0)
                    words = word_bufs.index(4 * stage + 2 + half)
                    tma_load(word_desc, [kind_1, at], full, words, pred=kind_1 >= 0)
            else:
                mbarrier.expect(full, KEY_BYTES)
            tma_load(k_desc, [b, kv, col * KEYS, 0], full, k_bufs.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            full = v_full.index(stage)
            mbarrier.expect(full, KEY_BYTES)
            tma_load(v_desc, [b, kv, col * KEYS, 0], full, v_bufs.index(stage))
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
            col = col_then
            kind_0 = kind_0_then
            kind_1 = kind_1_then
            here = left > 0
        number = gl.where(valid, after, -1)
        after = later
        b, h, base, row = b_next, h_next, base_next, row_next
        at_0, middle_0, stop_0, middle_1 = at_next, middle_next, stop_next, below_next
        stop_1 = end_next
        b_next, h_next, base_next, row_next = b_later, h_later, base_later, row_later
