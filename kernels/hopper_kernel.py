"""Device code of block-wise attention on Hopper GPUs; ``attention_hopper.py`` launches it.

A program is a persistent worker of one consumer warp group, which computes, and one producer warp,
which loads. Work is a queue of units (one tile row of one head); the producer takes the next unit
and loads its query tile and its first keys while the consumer still works on the last one, so no
load waits for the end of a row. Everything travels through shared memory by TMA: query tiles in
slots of their own, keys, values and mask words in a ring.

Shared memory is handed over with barriers: ``full`` ones count the bytes that arrived, ``empty``
ones one arrival of the consumer. A barrier's n-th use has phase parity n % 2.

The mask of a part tile comes as one 32-bit word per thread (``masks/fragments.py``): bit i keeps
the i-th score the thread holds, so that masking costs two instructions a score and no addresses.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# newer Triton renamed the copies and the barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier_of_threads = getattr(gl, "barrier", None) or gl.thread_barrier

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)  # query rows of a unit and keys of a tile
WORDS: gl.constexpr = gl.constexpr(128)  # mask words of a tile, one per consumer thread


@gluon.constexpr_function
def fragment_layout():
    """Where the consumer's threads hold a 64 x 64 tile of scores, as six factors of row and column:
    [warp, half of its 16 rows, lane row, column octet, lane pair, column of the pair]."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0],
            [0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0], [0, 0, 0, 4, 0, 0],
        ],
        lane_bases=[
            [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0],
            [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 4, 0, 0, 0],
        ],
        warp_bases=[[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]],
        block_bases=[],
        shape=[4, 2, 8, 8, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def without(layout, dims):
    """The layout with some of its dimensions left out."""
    for dim in sorted(dims, reverse=True):
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.jit
def kept_scores(words, scores: gl.constexpr):
    """Boolean [64, 64] in the layout ``scores`` from mask words [4, 8, 4], one per thread."""
    whole: gl.constexpr = fragment_layout()
    half = gl.arange(0, 2, layout=without(whole, [0, 2, 3, 4, 5]))
    octet = gl.arange(0, 8, layout=without(whole, [0, 1, 2, 4, 5]))
    column = gl.arange(0, 2, layout=without(whole, [0, 1, 2, 3, 4]))
    bit = (
        half[None, :, None, None, None, None] * 16
        + octet[None, None, None, :, None, None] * 2
        + column[None, None, None, None, None, :]
    )
    word = words[:, None, :, :][:, :, :, None, :][:, :, :, :, :, None]
    kept = gl.reshape((word >> bit) & 1, [ROWS, ROWS])
    return gl.convert_layout(kept, scores, assert_trivial=True) != 0


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, word_desc,
    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs,
    q_full, q_empty, k_full, v_full, kv_empty,
    queue, plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, rows, heavy_rows,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
):  # fmt: skip
    """Take units from the queue and load what they need, until the queue is empty."""
    TILE_BYTES: gl.constexpr = ROWS * BLOCK_D * 2
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, 8, layout=lane)
    units = rows * batch_heads
    heavy_units = heavy_rows * batch_heads
    light_rows = gl.maximum(rows - heavy_rows, 1)
    turn = 0
    step = 0
    number = gl.program_id(0)  # the queue hands out what follows the first unit of every worker
    while number >= 0:
        # -- unit: the heavy rows of all heads, then the others head by head ----
        after = gl.atomic_add(queue, 1, sem="relaxed") + gl.num_programs(0)
        slot = number // batch_heads
        bh = number - slot * batch_heads
        if number >= heavy_units:
            bh = (number - heavy_units) // light_rows
            slot = heavy_rows + (number - heavy_units) - bh * light_rows
        b = bh // heads
        h = bh - b * heads
        valid = number < units
        row = 0
        start = 0
        middle = 0
        stop = 0
        if valid:
            base = 0
            if not SINGLE_PLANE:
                base = gl.load(plane_map + b * plane_stride_b + h * plane_stride_h) * rows
            row = gl.load(row_order + base + slot)
            start = gl.load(row_ptr + base + row)
            middle = gl.load(full_start + base + row)
            stop = gl.load(row_ptr + base + row + 1)

        # -- query tile, with what the consumer has to know ----
        q_slot = turn % Q_SLOTS
        mbarrier.wait(q_empty.index(q_slot), ((turn // Q_SLOTS) & 1) ^ 1)
        unit = gl.where(field == 0, stop - start, gl.where(field == 1, middle - start, row))
        unit = gl.where(field == 3, b, gl.where(field == 4, h, unit))
        unit_bufs.index(q_slot).store(gl.where(field == 5, valid.to(gl.int32), unit))
        barrier_of_threads()  # one lane signals for all that wrote
        mbarrier.expect(q_full.index(q_slot), TILE_BYTES, pred=valid)
        mbarrier.arrive(q_full.index(q_slot), count=1, pred=number >= units)
        tma_load(
            q_desc, [b, h, row * ROWS, 0], q_full.index(q_slot), q_bufs.index(q_slot), pred=valid
        )

        # -- keys, values and mask words ----
        kv = h // GROUP
        for t in range(start, stop):
            first_k = gl.load(col_idx + t) * ROWS
            stage = step % STAGES
            mbarrier.wait(kv_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if HAS_PART:
                part = t < middle
                tile_id = gl.load(bitmap_id + t)
                mbarrier.expect(k_full.index(stage), TILE_BYTES + WORDS * 4, pred=part)
                mbarrier.expect(k_full.index(stage), TILE_BYTES, pred=t >= middle)
                tma_load(
                    word_desc, [tile_id, 0], k_full.index(stage), word_bufs.index(stage), pred=part
                )
            else:
                mbarrier.expect(k_full.index(stage), TILE_BYTES)
            tma_load(k_desc, [b, kv, first_k, 0], k_full.index(stage), k_bufs.index(stage))
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            tma_load(v_desc, [b, kv, first_k, 0], v_full.index(stage), v_bufs.index(stage))
            step += 1
        turn += 1
        number = gl.where(valid, after, -1)


@gluon.jit
def consume(
    o_desc, lse,
    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, o_buf,
    q_full, q_empty, k_full, v_full, kv_empty,
    heads, q_len,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    RETURN_LSE: gl.constexpr, HAS_PART: gl.constexpr,
):  # fmt: skip
    """Attend unit by unit; the same online softmax as the portable kernel (``softmax.py``)."""
    dtype: gl.constexpr = o_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    result_rows: gl.constexpr = gl.SliceLayout(1, result)
    word_layout: gl.constexpr = without(fragment_layout(), [1, 3, 5])
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    field = gl.arange(0, 8, layout=everywhere)
    zero = gl.zeros([ROWS, ROWS], gl.float32, scores)
    turn = 0
    step = 0
    going = 1
    while going > 0:
        q_slot = turn % Q_SLOTS
        mbarrier.wait(q_full.index(q_slot), (turn // Q_SLOTS) & 1)
        unit = unit_bufs.index(q_slot).load(everywhere)
        count = gl.sum(gl.where(field == 0, unit, 0), 0)
        parts = gl.sum(gl.where(field == 1, unit, 0), 0)
        row = gl.sum(gl.where(field == 2, unit, 0), 0)
        b = gl.sum(gl.where(field == 3, unit, 0), 0)
        h = gl.sum(gl.where(field == 4, unit, 0), 0)
        going = gl.sum(gl.where(field == 5, unit, 0), 0)
        if going > 0:
            q_tile = q_bufs.index(q_slot).reshape([ROWS, BLOCK_D])
            maximum = gl.full([ROWS], -1.0e30, gl.float32, score_rows)
            total = gl.full([ROWS], 0.0, gl.float32, score_rows)
            acc = gl.zeros([ROWS, BLOCK_D], gl.float32, result)
            for t in range(0, count):
                stage = step % STAGES
                phase = (step // STAGES) & 1

                # -- scores ----
                mbarrier.wait(k_full.index(stage), phase)
                k_tile = k_bufs.index(stage).reshape([ROWS, BLOCK_D]).permute((1, 0))
                s = warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)
                if HAS_PART:  # read while the product runs; not used on full tiles
                    words = word_bufs.index(stage).reshape([4, 8, 4]).load(word_layout)
                s = warpgroup_mma_wait(0, deps=(s,))

                # -- mask ----
                if HAS_PART:  # noqa: SIM102  (known to the compiler, the next one is not)
                    if t < parts:
                        s = gl.where(kept_scores(words, scores), s, float("-inf"))

                # -- online softmax ----
                new = gl.maximum(maximum, gl.max(s, 1))
                shift = (new * -MULT)[:, None].broadcast_to(s.shape)
                p = gl.exp2(gl.fma(s, gl.full_like(s, MULT), shift))
                alpha = gl.exp2((maximum - new) * MULT)
                maximum = new
                total = total * alpha + gl.sum(p, 1)
                acc = acc * gl.convert_layout(alpha, result_rows)[:, None]

                # -- values ----
                p = gl.convert_layout(p.to(dtype), weights)
                mbarrier.wait(v_full.index(stage), phase)
                v_tile = v_bufs.index(stage).reshape([ROWS, BLOCK_D])
                acc = warpgroup_mma(p, v_tile, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(kv_empty.index(stage), count=1)
                step += 1
            mbarrier.arrive(q_empty.index(q_slot), count=1)

            # -- result ----
            empty = total == 0.0
            filled = gl.where(empty, 1.0, total)
            acc = acc * gl.convert_layout(1.0 / filled, result_rows)[:, None]
            tma.store_wait(0)  # the last unit's tile has left the buffer
            o_buf.reshape([ROWS, BLOCK_D]).store(acc.to(dtype))
            fence_async_shared()
            tma_store(o_desc, [b, h, row * ROWS, 0], o_buf)
            if RETURN_LSE:
                log_sum = gl.where(empty, float("-inf"), maximum * (MULT * LN2) + gl.log(filled))
                q_row = row * ROWS + gl.arange(0, ROWS, layout=score_rows)
                lse_row = lse + (b * heads + h).to(gl.int64) * q_len
                gl.store(lse_row + q_row, log_sum, mask=q_row < q_len)
        turn += 1
    tma.store_wait(0)


_NUMBERS = [
    "plane_stride_b", "plane_stride_h", "batch_heads", "heads", "q_len", "rows", "heavy_rows",
]  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def attention_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, word_desc, lse, queue,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, q_len, rows, heavy_rows,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
    RETURN_LSE: gl.constexpr,
):  # fmt: skip
    """A worker; the grid is as many as the GPU holds at once."""
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [Q_SLOTS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, ROWS, BLOCK_D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, ROWS, BLOCK_D], v_desc.layout)
    o_buf = gl.allocate_shared_memory(o_desc.dtype, [1, 1, ROWS, BLOCK_D], o_desc.layout)
    word_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 1, WORDS], word_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    unit_bufs = gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 8], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
    fence_async_shared()
    gdc_wait()  # of the kernel before (overlap.py); nothing above touches global memory
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    o_desc, lse,
                    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, o_buf,
                    q_full, q_empty, k_full, v_full, kv_empty,
                    heads, q_len,
                    MULT, BLOCK_D, STAGES, Q_SLOTS, RETURN_LSE, HAS_PART,
                ),
            ),
            (
                produce,
                (
                    q_desc, k_desc, v_desc, word_desc,
                    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs,
                    q_full, q_empty, k_full, v_full, kv_empty,
                    queue, plane_map, plane_stride_b, plane_stride_h,
                    row_ptr, full_start, col_idx, bitmap_id, row_order,
                    batch_heads, heads, rows, heavy_rows,
                    BLOCK_D, STAGES, Q_SLOTS, GROUP, SINGLE_PLANE, HAS_PART,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
