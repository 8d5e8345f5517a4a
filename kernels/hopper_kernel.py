"""Device code of block-wise attention on Hopper GPUs; ``attention_hopper.py`` launches it.

A program is a persistent worker of one consumer warp group, which computes, and two warps that
load (``hopper_loads.py``). Work is a queue of units (one tile row of one head); one warp takes the
next unit and loads its query tile, the other its first keys, while the consumer still works on the
last one, so with two query slots no load waits for the end of a row. Everything travels through
shared memory by TMA: query tiles in slots of their own, which the results leave through, keys,
values and mask words in a ring. A ring of one key and one value tile, for heads of over 192 dims,
gives keys back by themselves, so that the next ones come while the last product runs.

Shared memory is handed over with barriers: ``full`` ones count the bytes that arrived, ``empty``
ones one arrival of the consumer; a query slot, with the numbers of its unit, is given back by the
keys' warp, too, which reads these behind ``unit_full``. A barrier's n-th use has phase parity
n % 2.

The mask of a part tile comes as one 32-bit word per thread (``masks/fragments.py``) with a bit for
each score the thread holds, so that masking costs little more than one instruction a score.
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

from .hopper_loads import load_keys, load_queries
from .hopper_registers import (
    ROWS,
    cleared,
    fragment_layout,
    kept_scores,
    octet_layout,
    reciprocal,
    rescaled,
    spread,
    weighed,
    weighed_and_both_scaled,
    weighed_and_scaled,
    without,
)
from .hopper_short import attend_short
from .hopper_transfers import WORDS, barrier_of_threads, next_pair, next_place, tma_store
from .hopper_weights import NO_OFFSET
from .softmax import LN2


@gluon.jit
def consume(
    o_desc, o_tail_desc, lse,
    q_bufs, kv_bufs, word_bufs, unit_bufs, q_tails, kv_tails,
    q_full, q_empty, k_full, v_full, kv_empty,
    heads, q_len, heavy_rows, pieces, partial, partial_stats,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr,
    RING: gl.constexpr, Q_SLOTS: gl.constexpr, RETURN_LSE: gl.constexpr, HAS_PART: gl.constexpr,
    SPLIT: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """Attend unit by unit.

    Weights are relative to an earlier maximum of the row until their sums show that scores exceed
    it by too much; then sums and result are scaled (``hopper_weights.weights_code``).
    """
    dtype: gl.constexpr = o_desc.dtype
    PAIRS: gl.constexpr = (RING + 1) // 2
    VALUES: gl.constexpr = 1 if RING == 2 else 0  # keys have a barrier of their own in front
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    tail: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(TAIL_D, 16), 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    tail_weights: gl.constexpr = gl.DotOperandLayout(0, tail, 2)
    tail_rows: gl.constexpr = gl.SliceLayout(1, tail)
    own_rows: gl.constexpr = without(octet_layout(8), [1, 3])
    result_rows: gl.constexpr = gl.SliceLayout(1, result)
    word_layout: gl.constexpr = without(fragment_layout(), [1, 3, 5])
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    field = gl.arange(0, 8, layout=everywhere)
    zero = gl.zeros([ROWS, ROWS], gl.float32, scores)
    turn = 0
    q_slot = 0
    q_phase = 0
    slot = 0
    phase = 0
    pair = 0
    before = 0
    going = 1
    while going > 0:
        mbarrier.wait(q_full.index(q_slot), q_phase)
        unit = unit_bufs.index(q_slot).load(everywhere)
        count = gl.sum(gl.where(field == 0, unit, 0), 0)
        whole = gl.sum(gl.where(field == 1, unit, 0), 0)
        going = gl.sum(gl.where(field == 5, unit, 0), 0)
        if going > 0:
            q_tile = q_bufs.index(q_slot).reshape([ROWS, BLOCK_D])
            q_tail = q_tile
            offset = gl.full([ROWS, 4], NO_OFFSET, gl.float32, own_rows)
            total = gl.zeros([ROWS, 4], gl.float32, own_rows)
            acc = cleared(gl.zeros([ROWS, BLOCK_D], gl.float32, result))
            acc_tail = acc
            if TAIL_D > 0:
                q_tail = q_tails.index(q_slot).reshape([ROWS, TAIL_D])
                acc_tail = gl.zeros([ROWS, TAIL_D], gl.float32, tail)
            if Q_SLOTS == 2:
                tma.store_wait(0)  # the last unit's result has left its slot
                mbarrier.arrive(q_empty.index(q_slot ^ 1), count=1, pred=turn > 0)
            barrier_of_threads()  # here, or the compiler puts one into the loop
            for t in range(0, count):  # full tiles, then part ones
                # -- scores ----
                mbarrier.wait(k_full.index(pair), phase)
                if RING % 2 == 0:
                    slot = 2 * pair
                k_tile = kv_bufs.index(slot).reshape([ROWS, BLOCK_D]).permute((1, 0))
                s = warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)
                if TAIL_D > 0:
                    k_tail = kv_tails.index(slot).reshape([ROWS, TAIL_D]).permute((1, 0))
                    s = warpgroup_mma(q_tail, k_tail, s, is_async=True)
                # the tile before is given back while the product runs, which hides the barriers
                mbarrier.arrive(kv_empty.index(before + VALUES), count=1, pred=t > 0)
                barrier_of_threads()
                if HAS_PART:  # read while the product runs; not used on full tiles
                    words = word_bufs.index(pair).reshape([4, 8, 4]).load(word_layout)
                s = warpgroup_mma_wait(0, deps=(s,))

                # -- mask ----
                if HAS_PART:  # noqa: SIM102  (known to the compiler, the next one is not)
                    if t >= whole:
                        s = kept_scores(s, words)

                # -- online softmax ----
                if BLOCK_D == ROWS and TAIL_D == ROWS:
                    p, offset, total, acc, acc_tail = weighed_and_both_scaled(
                        s, offset, total, acc, acc_tail, MULT, dtype
                    )
                elif BLOCK_D == ROWS:
                    p, offset, total, alpha, acc = weighed_and_scaled(
                        s, offset, total, acc, MULT, dtype
                    )
                else:
                    p, offset, total, alpha = weighed(s, offset, total, MULT, dtype)
                    acc = rescaled(acc, alpha, BLOCK_D)
                if BLOCK_D > ROWS and TAIL_D >= ROWS:
                    acc_tail = rescaled(acc_tail, alpha, TAIL_D)
                elif TAIL_D > 0 and TAIL_D < ROWS:
                    acc_tail = acc_tail * spread(alpha, TAIL_D, tail)

                # -- values ----
                p = gl.convert_layout(p, weights, assert_trivial=True)
                slot += 1
                if RING % 2 == 1:
                    slot = gl.where(slot == RING, 0, slot)
                mbarrier.wait(v_full.index(pair), phase)
                v_tile = kv_bufs.index(slot).reshape([ROWS, BLOCK_D])
                acc = warpgroup_mma(p, v_tile, acc, is_async=True)
                if TAIL_D > 0:
                    v_tail = kv_tails.index(slot).reshape([ROWS, TAIL_D])
                    p = gl.convert_layout(p, tail_weights, assert_trivial=True)
                    acc_tail = warpgroup_mma(p, v_tail, acc_tail, is_async=True)
                if RING == 2:  # the next keys come while the product runs
                    mbarrier.arrive(kv_empty.index(0), count=1)
                    barrier_of_threads()
                if TAIL_D > 0:
                    acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
                else:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                before = pair
                pair, phase = next_pair(pair, phase, PAIRS)
                if RING % 2 == 1:
                    slot = next_place(slot, RING)
            if RING == 2:  # the compiler has the one above in mind, before the values were read
                barrier_of_threads()
            mbarrier.arrive(kv_empty.index(before + VALUES), count=1, pred=count > 0)

            unit = unit_bufs.index(q_slot).load(everywhere)  # once more, for want of registers
            if SHIFTED:
                short = gl.sum(gl.where(field == 7, unit, 0), 0)
                if short > 0:
                    if RING % 2 == 0:
                        slot = 2 * pair
                    values = slot + 1
                    if RING % 2 == 1:
                        values = gl.where(values == RING, 0, values)
                    acc, acc_tail, offset, total = attend_short(
                        q_tile, q_tail, kv_bufs.index(slot), kv_bufs.index(values),
                        kv_tails.index(slot), kv_tails.index(values), word_bufs.index(pair),
                        k_full.index(pair), v_full.index(pair), phase,
                        acc, acc_tail, offset, total, MULT, BLOCK_D, TAIL_D, dtype,
                    )  # fmt: skip
                    mbarrier.arrive(kv_empty.index(pair), count=1)
                    pair, phase = next_pair(pair, phase, PAIRS)
                    if RING % 2 == 1:
                        slot = next_place(values, RING)

            # -- result ----
            row = gl.sum(gl.where(field == 2, unit, 0), 0)
            b = gl.sum(gl.where(field == 3, unit, 0), 0)
            h = gl.sum(gl.where(field == 4, unit, 0), 0)
            place = -1
            if SPLIT:
                place = gl.sum(gl.where(field == 6, unit, 0), 0)
            reference = gl.convert_layout(gl.max(offset, 1), result_rows) * -LN2
            total = gl.convert_layout(gl.sum(total, 1), result_rows)
            empty = total == 0.0
            filled = gl.where(empty, 1.0, total)
            share = reciprocal(filled)
            acc = acc * share[:, None]
            if TAIL_D > 0:
                acc_tail = acc_tail * gl.convert_layout(share, tail_rows)[:, None]
            if SPLIT and place >= 0:  # of a long row: merge_rows_kernel finishes it
                number = (b * heads + h).to(gl.int64) * (heavy_rows * pieces) + place
                at = number * ROWS + gl.arange(0, ROWS, layout=result_rows)
                columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, result))
                part_ptrs = partial + at[:, None] * (BLOCK_D + TAIL_D) + columns[None, :]
                gl.store(part_ptrs, acc)
                if TAIL_D > 0:
                    at = number * ROWS + gl.arange(0, ROWS, layout=tail_rows)
                    columns = BLOCK_D + gl.arange(0, TAIL_D, layout=gl.SliceLayout(0, tail))
                    tail_ptrs = partial + at[:, None] * (BLOCK_D + TAIL_D) + columns[None, :]
                    gl.store(tail_ptrs, acc_tail)
                stat_ptrs = partial_stats + number * (2 * ROWS)
                stat_ptrs = stat_ptrs + gl.arange(0, ROWS, layout=result_rows)
                gl.store(stat_ptrs, reference)
                gl.store(stat_ptrs + ROWS, total)
            else:
                # every warp has read its queries: a barrier is in front of the last arrive
                q_bufs.index(q_slot).reshape([ROWS, BLOCK_D]).store(acc.to(dtype))
                if TAIL_D > 0:
                    q_tails.index(q_slot).reshape([ROWS, TAIL_D]).store(acc_tail.to(dtype))
                fence_async_shared()
                tma_store(o_desc, [b, h, row * ROWS, 0], q_bufs.index(q_slot))
                if TAIL_D > 0:
                    tail_at = [b, h, row * ROWS, BLOCK_D]
                    tma_store(o_tail_desc, tail_at, q_tails.index(q_slot))
                if RETURN_LSE:
                    log_sum = gl.where(empty, float("-inf"), reference + gl.log(filled))
                    q_row = row * ROWS + gl.arange(0, ROWS, layout=result_rows)
                    lse_row = lse + (b * heads + h).to(gl.int64) * q_len
                    gl.store(lse_row + q_row, log_sum, mask=q_row < q_len)
            if Q_SLOTS == 1:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(0), count=1)
        turn += 1
        if Q_SLOTS == 2:
            q_phase = q_phase ^ q_slot
            q_slot = q_slot ^ 1
        else:
            q_phase = q_phase ^ 1
    tma.store_wait(0)


_NUMBERS = [
    "plane_stride_b", "plane_stride_h", "batch_heads", "heads", "q_len", "rows", "heavy_rows",
    "last_heads", "pieces",
]  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def attention_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, word_desc,
    q_tail_desc, k_tail_desc, v_tail_desc, o_tail_desc,
    k_short_desc, v_short_desc, k_short_tail_desc, v_short_tail_desc, lse, queue, sides,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, q_len, rows, heavy_rows, last_heads, pieces, partial, partial_stats,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, TAIL_D: gl.constexpr,
    RING: gl.constexpr, Q_SLOTS: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
    RETURN_LSE: gl.constexpr, SPLIT: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """A worker; the grid is as many as the GPU holds at once."""
    gl.static_assert(not SHIFTED or RING > 2, "keys of a short tile are given back with its values")
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [Q_SLOTS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    kv_bufs = gl.allocate_shared_memory(k_desc.dtype, [RING, 1, 1, ROWS, BLOCK_D], k_desc.layout)
    q_tails, kv_tails = q_bufs, kv_bufs
    if TAIL_D > 0:
        dtype: gl.constexpr = q_desc.dtype
        narrow: gl.constexpr = q_tail_desc.layout
        q_tails = gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 1, ROWS, TAIL_D], narrow)
        kv_tails = gl.allocate_shared_memory(dtype, [RING, 1, 1, ROWS, TAIL_D], narrow)
    pairs: gl.constexpr = (RING + 1) // 2
    word_bufs = gl.allocate_shared_memory(gl.int32, [pairs, 1, WORDS], word_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    unit_bufs = gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 8], plain)
    key_bufs = gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 8], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier)
    unit_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [pairs, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [pairs, 1], barrier)
    given_back: gl.constexpr = 2 if RING == 2 else pairs
    kv_empty = gl.allocate_shared_memory(gl.int64, [given_back, 1], barrier)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)  # of the consumer and of the keys' warp
        mbarrier.init(unit_full.index(i), count=1)
    for i in gl.static_range(pairs):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
    if RING == 2:
        mbarrier.init(kv_empty.index(1), count=1)
    fence_async_shared()
    gdc_wait()  # of the kernel before (overlap.py); nothing above touches global memory
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    o_desc, o_tail_desc, lse,
                    q_bufs, kv_bufs, word_bufs, unit_bufs, q_tails, kv_tails,
                    q_full, q_empty, k_full, v_full, kv_empty,
                    heads, q_len, heavy_rows, pieces, partial, partial_stats,
                    MULT, BLOCK_D, TAIL_D, RING, Q_SLOTS, RETURN_LSE, HAS_PART, SPLIT,
                    SHIFTED,
                ),
            ),
            (
                load_queries,
                (
                    q_desc, q_tail_desc, q_bufs, q_tails, unit_bufs, key_bufs,
                    unit_full, q_full, q_empty,
                    queue, sides, plane_map, plane_stride_b, plane_stride_h,
                    row_ptr, full_start, row_order,
                    batch_heads, heads, rows, heavy_rows, last_heads, pieces,
                    BLOCK_D, TAIL_D, Q_SLOTS, GROUP, SINGLE_PLANE, SPLIT, SHIFTED,
                ),
            ),
            (
                load_keys,
                (
                    k_desc, v_desc, word_desc, k_tail_desc, v_tail_desc,
                    k_short_desc, v_short_desc, k_short_tail_desc, v_short_tail_desc,
                    kv_bufs, word_bufs, key_bufs, kv_tails,
                    unit_full, q_empty, k_full, v_full, kv_empty,
                    col_idx, bitmap_id,
                    BLOCK_D, TAIL_D, RING, Q_SLOTS, HAS_PART, SHIFTED,
                ),
            ),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip
