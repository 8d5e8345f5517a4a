"""The producer of both kernels of the gradient on Hopper GPUs; the kernels say what it loads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_registers import ROWS
from .hopper_transfers import WORDS, barrier_of_threads, tma_load
from .hopper_units import first_number, next_number, tile_row, unit_place
from .softmax import LOG2E


@gluon.jit
def produce_gradient(
    own_desc, own_desc_2, out_desc, met_desc, met_desc_2, word_desc, stat_desc,
    own_bufs, own_bufs_2, met_bufs, met_bufs_2, word_bufs, stat_bufs, unit_bufs, row_bufs,
    unit_full, unit_empty, met_full, met_full_2, met_empty,
    lse, grad_lse, queue, sides, plane_map, plane_stride_b, plane_stride_h,
    tile_ptr, full_start, tile_idx, bitmap_id, order,
    batch_heads, heads, q_len, rows, met_rows, heavy_rows, last_heads,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
    BY_QUERY: gl.constexpr, HAS_GRAD_LSE: gl.constexpr,
):  # fmt: skip
    """Take units from the queue and load what they need, until the queue is empty.

    A unit is a tile row (BY_QUERY) or a tile column of one head, with two tiles of its own, and two
    for each tile of the mask it meets: a row has q and dO, gets its log-sum-exp and the tile of
    ``out`` first, in the place of values, and meets k and v; a column has k and v and meets q and
    dO, with what the first kernel left of those rows, for each query head of its group.
    """
    TILE_BYTES: gl.constexpr = ROWS * WIDTH * 2
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    two: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    field = gl.arange(0, 8, layout=lane)
    units = rows * batch_heads
    turn = 0
    step = 0
    number, side, empty = first_number(queue, sides, batch_heads, rows)
    while number >= 0:
        after, side, empty = next_number(queue, side, empty, batch_heads, rows)
        light = rows - heavy_rows
        b, h, slot = unit_place(number, batch_heads, heads, heavy_rows, light, last_heads)
        valid = number < units
        # with more planes than one GROUP is 1, or rows are asked for
        row, start, middle, stop = tile_row(
            valid, b, h, slot, rows, plane_map, plane_stride_b, plane_stride_h,
            order, tile_ptr, full_start, SINGLE_PLANE,
        )  # fmt: skip

        # -- tiles of its own, with what the consumer has to know ----
        slot = turn % SLOTS
        mbarrier.wait(unit_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        unit = gl.where(field == 0, stop - start, gl.where(field == 1, middle - start, row))
        unit = gl.where(field == 3, b, gl.where(field == 4, h, unit))
        unit_bufs.index(slot).store(gl.where(field == 5, valid.to(gl.int32), unit))
        if BY_QUERY:
            q_row = row * ROWS + gl.arange(0, ROWS, layout=two)
            here = valid & (q_row < q_len)
            at = (b * heads + h).to(gl.int64) * q_len + q_row
            log_sum = gl.load(lse + at, mask=here, other=float("-inf"))
            # without keys, and past the end: for +inf, so that all weights are exp(-inf)
            less = gl.where(log_sum == float("-inf"), float("-inf"), log_sum * -LOG2E)
            row_bufs.index(2 * slot).store(less)
            if HAS_GRAD_LSE:  # may be NaN where there are no keys
                seen = here & (log_sum != float("-inf"))
                row_bufs.index(2 * slot + 1).store(gl.load(grad_lse + at, mask=seen, other=0.0))
        barrier_of_threads()  # one lane signals for all that wrote
        full = unit_full.index(slot)
        mbarrier.expect(full, 2 * TILE_BYTES, pred=valid)
        mbarrier.arrive(full, count=1, pred=number >= units)
        at_row = row * ROWS
        tma_load(own_desc, [b, h, at_row, 0], full, own_bufs.index(slot), pred=valid)
        tma_load(own_desc_2, [b, h, at_row, 0], full, own_bufs_2.index(slot), pred=valid)
        if BY_QUERY:  # noqa: SIM102  (known to the compiler, the next one is not)
            if valid:
                stage = step % STAGES
                mbarrier.wait(met_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.arrive(met_full.index(stage), count=1)  # no keys come with it
                full = met_full_2.index(stage)
                mbarrier.expect(full, TILE_BYTES)
                tma_load(out_desc, [b, h, at_row, 0], full, met_bufs_2.index(stage))
                step += 1

        # -- tiles it meets ----
        MEMBERS: gl.constexpr = 1 if BY_QUERY else GROUP
        for member in range(0, MEMBERS):
            other = h // GROUP if BY_QUERY else h * GROUP + member
            stat_row = (b * heads * GROUP + other) * met_rows
            for t in range(start, stop):
                tile = gl.load(tile_idx + t)
                stage = step % STAGES
                mbarrier.wait(met_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                full = met_full.index(stage)
                WITH_STATS: gl.constexpr = TILE_BYTES if BY_QUERY else TILE_BYTES + 8 * ROWS
                if HAS_PART:
                    part = t < middle
                    tile_id = gl.load(bitmap_id + t)
                    mbarrier.expect(full, WITH_STATS + WORDS * 4, pred=part)
                    mbarrier.expect(full, WITH_STATS, pred=t >= middle)
                    tma_load(word_desc, [tile_id, 0], full, word_bufs.index(stage), pred=part)
                else:
                    mbarrier.expect(full, WITH_STATS)
                tma_load(met_desc, [b, other, tile * ROWS, 0], full, met_bufs.index(stage))
                if not BY_QUERY:
                    tma_load(stat_desc, [stat_row + tile, 0], full, stat_bufs.index(stage))
                full = met_full_2.index(stage)
                mbarrier.expect(full, TILE_BYTES)
                tma_load(met_desc_2, [b, other, tile * ROWS, 0], full, met_bufs_2.index(stage))
                step += 1
        turn += 1
        number = gl.where(valid, after, -1)
