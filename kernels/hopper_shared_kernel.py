"""Device code of block-wise attention on Hopper GPUs, 192 or 128 queries that share their keys;
``attention_hopper.py`` launches it.

As ``hopper_kernel.py``, but a tile has 64 keys, and 64 queries for each of three or two consumer
warp groups. A program computes a tile row of the mask at a time; keys and values come once for all
consumers, which hide each other's softmax. What a tile is to each consumer stands in the upper bits
of its number (``masks/hopper_arrays.py``): a consumer passes over what its rows do not have, and
masks only what they have in part.

Keys and values have rings of their own. Every consumer gives values back while a product runs, and
with them the keys and mask words of their tile, which it has read by then: the ring of keys is the
longer one, so that the keys which take a place are loaded behind values that have waited for that.
Where both are as long, for want of memory, keys have a barrier of their own and are given back
while the product with the values runs. Each use of a barrier is waited for, by those that pass over
a tile as well: a barrier has only two phases.
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

from .hopper_registers import (
    ROWS,
    fragment_layout,
    kept_scores,
    octet_layout,
    reciprocal,
    rescaled,
    weighed,
    weighed_and_scaled,
    weighed_and_wide_scaled,
    without,
)
from .hopper_shared_loads import NONE, PART, kind_of, produce_shared
from .hopper_transfers import WORDS, barrier_of_threads, tma_store
from .hopper_weights import NO_OFFSET
from .softmax import LN2


@gluon.jit
def consume_shared(
    o_desc, lse,
    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
    q_full, q_empty, k_full, v_full, k_empty, v_empty,
    heads, q_len, ROW: gl.constexpr,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, KEY_TILES: gl.constexpr,
    VALUE_TILES: gl.constexpr, CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr,
    RETURN_LSE: gl.constexpr, HAS_PART: gl.constexpr,
):  # fmt: skip
    """Attend with the queries ROW * 64 and on of every unit."""
    dtype: gl.constexpr = o_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    own_rows: gl.constexpr = without(octet_layout(8), [1, 3])
    result_rows: gl.constexpr = gl.SliceLayout(1, result)
    word_layout: gl.constexpr = without(fragment_layout(), [1, 3, 5])
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    field = gl.arange(0, 8, layout=everywhere)
    zero = gl.zeros([ROWS, ROWS], gl.float32, scores)
    turn = 0
    k_slot = 0
    k_phase = 0
    v_slot = 0
    v_phase = 0
    before = 0
    going = 1
    while going > 0:
        q_slot = turn % Q_SLOTS
        mbarrier.wait(q_full.index(q_slot), (turn // Q_SLOTS) & 1)
        unit = unit_bufs.index(q_slot).load(everywhere)
        count = gl.sum(gl.where(field == 0, unit, 0), 0)
        going = gl.sum(gl.where(field == 5, unit, 0), 0)
        if going > 0:
            q_tile = q_bufs.index(q_slot * CONSUMERS + ROW).reshape([ROWS, BLOCK_D])
            offset = gl.full([ROWS, 4], NO_OFFSET, gl.float32, own_rows)
            total = gl.zeros([ROWS, 4], gl.float32, own_rows)
            acc = gl.zeros([ROWS, BLOCK_D], gl.float32, result)
            leaving = False
            if Q_SLOTS == 2:
                leaving = turn > 0  # the result of the last unit, from the other slot
            held = False  # the values of the tile before
            barrier_of_threads()  # here, or the compiler puts one into the loop
            for _ in range(0, count):
                mbarrier.wait(k_full.index(k_slot), k_phase)
                kinds = kind_bufs.index(k_slot).load(everywhere)  # eight times the same
                tile = gl.sum(gl.where(field == 0, kinds, 0), 0)
                kind = kind_of(tile, ROW)
                if kind == NONE:
                    mbarrier.arrive(v_empty.index(before), count=1, pred=held)
                    mbarrier.wait(v_full.index(v_slot), v_phase)
                    barrier_of_threads()  # all have read what the tile is
                    mbarrier.arrive(v_empty.index(v_slot), count=1)
                    if KEY_TILES == VALUE_TILES:
                        mbarrier.arrive(k_empty.index(k_slot), count=1)
                    barrier_of_threads()  # here, or the compiler puts one before each tile
                    held = False
                else:
                    # -- scores ----
                    k_tile = k_bufs.index(k_slot).reshape([ROWS, BLOCK_D]).permute((1, 0))
                    s = warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)
                    # given back while a product runs, which hides the barriers
                    mbarrier.arrive(v_empty.index(before), count=1, pred=held)
                    barrier_of_threads()
                    if Q_SLOTS == 2 and leaving:
                        tma.store_wait(0)
                        mbarrier.arrive(q_empty.index(q_slot ^ 1), count=1)
                        leaving = False
                        barrier_of_threads()  # here, or the compiler puts one behind
                    if HAS_PART:  # read while the product runs; not used on full tiles
                        words = word_bufs.index(k_slot * CONSUMERS + ROW).reshape([4, 8, 4])
                        words = words.load(word_layout)
                    s = warpgroup_mma_wait(0, deps=(s,))

                    # -- mask ----
                    if HAS_PART:  # noqa: SIM102  (known to the compiler, the next one is not)
                        if kind == PART:
                            s = kept_scores(s, words)

                    # -- online softmax ----
                    if BLOCK_D == 2 * ROWS:
                        p, offset, total, acc = weighed_and_wide_scaled(
                            s, offset, total, acc, MULT, dtype
                        )
                    elif BLOCK_D == ROWS:
                        p, offset, total, alpha, acc = weighed_and_scaled(
                            s, offset, total, acc, MULT, dtype
                        )
                    else:
                        p, offset, total, alpha = weighed(s, offset, total, MULT, dtype)
                        acc = rescaled(acc, alpha, BLOCK_D)

                    # -- values ----
                    p = gl.convert_layout(p, weights, assert_trivial=True)
                    mbarrier.wait(v_full.index(v_slot), v_phase)
                    v_tile = v_bufs.index(v_slot).reshape([ROWS, BLOCK_D])
                    acc = warpgroup_mma(p, v_tile, acc, is_async=True)
                    if KEY_TILES == VALUE_TILES:
                        mbarrier.arrive(k_empty.index(k_slot), count=1)
                        barrier_of_threads()
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    held = True
                    before = v_slot
                k_slot += 1
                k_phase = gl.where(k_slot == KEY_TILES, k_phase ^ 1, k_phase)
                k_slot = gl.where(k_slot == KEY_TILES, 0, k_slot)
                v_slot += 1
                v_phase = gl.where(v_slot == VALUE_TILES, v_phase ^ 1, v_phase)
                v_slot = gl.where(v_slot == VALUE_TILES, 0, v_slot)

            if KEY_TILES == VALUE_TILES:  # the compiler has one in mind from before these were read
                barrier_of_threads()
            mbarrier.arrive(v_empty.index(before), count=1, pred=held)
            if Q_SLOTS == 2 and leaving:  # rows without keys
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(q_slot ^ 1), count=1)

            # -- result ----
            unit = unit_bufs.index(q_slot).load(everywhere)  # once more, for want of registers
            row = gl.sum(gl.where(field == 2, unit, 0), 0) * CONSUMERS + ROW
            b = gl.sum(gl.where(field == 3, unit, 0), 0)
            h = gl.sum(gl.where(field == 4, unit, 0), 0)
            reference = gl.convert_layout(gl.max(offset, 1), result_rows) * -LN2
            total = gl.convert_layout(gl.sum(total, 1), result_rows)
            empty = total == 0.0
            filled = gl.where(empty, 1.0, total)
            acc = acc * reciprocal(filled)[:, None]
            barrier_of_threads()  # every warp has read its queries
            q_bufs.index(q_slot * CONSUMERS + ROW).reshape([ROWS, BLOCK_D]).store(acc.to(dtype))
            fence_async_shared()
            tma_store(o_desc, [b, h, row * ROWS, 0], q_bufs.index(q_slot * CONSUMERS + ROW))
            if RETURN_LSE:
                log_sum = gl.where(empty, float("-inf"), reference + gl.log(filled))
                q_row = row * ROWS + gl.arange(0, ROWS, layout=result_rows)
                lse_row = lse + (b * heads + h).to(gl.int64) * q_len
                gl.store(lse_row + q_row, log_sum, mask=q_row < q_len)
            if Q_SLOTS == 1:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(0), count=1)
        turn += 1
    tma.store_wait(0)


_NUMBERS = [
    "plane_stride_b", "plane_stride_h", "batch_heads", "heads", "q_len", "rows", "heavy_rows",
    "last_heads",
]  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def attention_hopper_shared_kernel(
    q_desc, k_desc, v_desc, o_desc, word_desc, lse, queue, sides,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, q_len, rows, heavy_rows, last_heads,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, KEY_TILES: gl.constexpr,
    VALUE_TILES: gl.constexpr, CONSUMERS: gl.constexpr, Q_SLOTS: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr,
    HAS_PART: gl.constexpr, RETURN_LSE: gl.constexpr, CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):  # fmt: skip
    """A worker; the grid is as many as the GPU holds at once. CONSUMER and PRODUCER are registers
    of their threads."""
    gl.static_assert(VALUE_TILES <= KEY_TILES, "keys are given back with the values at the latest")
    q_bufs = gl.allocate_shared_memory(
        q_desc.dtype, [CONSUMERS * Q_SLOTS, 1, 1, ROWS, BLOCK_D], q_desc.layout
    )
    k_bufs = gl.allocate_shared_memory(
        k_desc.dtype, [KEY_TILES, 1, 1, ROWS, BLOCK_D], k_desc.layout
    )
    v_bufs = gl.allocate_shared_memory(
        v_desc.dtype, [VALUE_TILES, 1, 1, ROWS, BLOCK_D], v_desc.layout
    )
    word_bufs = gl.allocate_shared_memory(
        gl.int32, [CONSUMERS * KEY_TILES, 1, WORDS], word_desc.layout
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    unit_bufs = gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 8], plain)
    kind_bufs = gl.allocate_shared_memory(gl.int32, [KEY_TILES, 8], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [KEY_TILES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [VALUE_TILES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [VALUE_TILES, 1], barrier)
    k_empty = v_empty  # given back with the values
    if KEY_TILES == VALUE_TILES:
        k_empty = gl.allocate_shared_memory(gl.int64, [KEY_TILES, 1], barrier)
        for i in gl.static_range(KEY_TILES):
            mbarrier.init(k_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(KEY_TILES):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(VALUE_TILES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    gdc_wait()  # of the kernel before (overlap.py); nothing above touches global memory
    gdc_launch_dependents()
    # as they are: constants would be lost on their way through a list
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    consume_shared,
                    (
                        o_desc, lse, q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                        q_full, q_empty, k_full, v_full, k_empty, v_empty, heads, q_len,
                        0, MULT, BLOCK_D, KEY_TILES, VALUE_TILES, CONSUMERS, Q_SLOTS,
                        RETURN_LSE, HAS_PART,
                    ),
                ),
                (
                    consume_shared,
                    (
                        o_desc, lse, q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                        q_full, q_empty, k_full, v_full, k_empty, v_empty, heads, q_len,
                        1, MULT, BLOCK_D, KEY_TILES, VALUE_TILES, CONSUMERS, Q_SLOTS,
                        RETURN_LSE, HAS_PART,
                    ),
                ),
                (
                    produce_shared,
                    (
                        q_desc, k_desc, v_desc, word_desc,
                        q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                        q_full, q_empty, k_full, v_full, k_empty, v_empty,
                        queue, sides, plane_map, plane_stride_b, plane_stride_h,
                        row_ptr, full_start, col_idx, bitmap_id, row_order,
                        batch_heads, heads, rows, heavy_rows, last_heads,
                        BLOCK_D, KEY_TILES, VALUE_TILES, CONSUMERS, Q_SLOTS,
                        GROUP, SINGLE_PLANE, HAS_PART,
                    ),
                ),
            ],
            [4, 1],
            [CONSUMER, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    consume_shared,
                    (
                        o_desc, lse, q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                        q_full, q_empty, k_full, v_full, k_empty, v_empty, heads, q_len,
                        0, MULT, BLOCK_D, KEY_TILES, VALUE_TILES, CONSUMERS, Q_SLOTS,
                        RETURN_LSE, HAS_PART,
                    ),
                ),
                (
                    consume_shared,
                    (
                        o_desc, lse, q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                        q_full, q_empty, k_full, v_full, k_empty, v_empty, heads, q_len,
                        1, MULT, BLOCK_D, KEY_TILES, VALUE_TILES, CONSUMERS, Q_SLOTS,
                        RETURN_LSE, HAS_PART,
                    ),
                ),
                (
                    consume_shared,
                    (
                        o_desc, lse, q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                        q_full, q_empty, k_full, v_full, k_empty, v_empty, heads, q_len,
                        2, MULT, BLOCK_D, KEY_TILES, VALUE_TILES, CONSUMERS, Q_SLOTS,
                        RETURN_LSE, HAS_PART,
                    ),
                ),
                (
                    produce_shared,
                    (
                        q_desc, k_desc, v_desc, word_desc,
                        q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                        q_full, q_empty, k_full, v_full, k_empty, v_empty,
                        queue, sides, plane_map, plane_stride_b, plane_stride_h,
                        row_ptr, full_start, col_idx, bitmap_id, row_order,
                        batch_heads, heads, rows, heavy_rows, last_heads,
                        BLOCK_D, KEY_TILES, VALUE_TILES, CONSUMERS, Q_SLOTS,
                        GROUP, SINGLE_PLANE, HAS_PART,
                    ),
                ),
            ],
            [4, 4, 1],
            [CONSUMER, CONSUMER, PRODUCER],
        )  # fmt: skip
