"""Device code of block-wise attention on Hopper GPUs, two tile rows at a time;
``attention_hopper.py`` launches it.

As ``hopper_kernel.py``, but tiles have 128 keys, and a program has two consumer warp groups, one
for each of two neighbouring tile rows. Keys and values come once for both: the producer merges the
lists of the two rows by column, and a consumer passes over what only the other row has. A tile of
keys is read from the L2 cache and written to shared memory half as often, and a product of 128
columns reads its queries from there half as often.

A consumer asks for the scores of the next tile, then for the product of this one's weights with
the values, and turns scores into weights while the latter runs. The two groups ask in turns
(``turns``): else their products mix, both wait for all of them, and then the matrix units for both.
Source: the order of products in a group and among two is FlashAttention-3's (Shah et al., 2024).
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

from .hopper_pair_loads import KEYS, MORE, OTHERS, SLOTS, produce_pairs
from .hopper_registers import (
    ROWS,
    column_halves,
    fragment_layout,
    kept_scores,
    octet_layout,
    reciprocal,
    rescaled,
    weighed_halves,
    without,
)
from .hopper_transfers import WORDS, barrier_of_threads, tma_store
from .hopper_weights import NO_OFFSET
from .softmax import LN2


@gluon.jit
def _kind(kind_bufs, stage, HALF: gl.constexpr):
    """(what the tile in a stage is to a row, flags of the tile that follows)."""
    everywhere: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    of_tile = gl.arange(0, 4, layout=everywhere)
    kind = kind_bufs.index(stage).load(everywhere)
    own = gl.sum(gl.where(of_tile == HALF, kind, 0), 0)
    return own, gl.sum(gl.where(of_tile == 2, kind, 0), 0)


@gluon.jit
def _kept(left, right, own, word_bufs, stage, HALF: gl.constexpr):
    """Both halves of a tile's scores, -inf where a part tile lacks them."""
    layout: gl.constexpr = without(fragment_layout(), [1, 3, 5])
    if own >= 0:
        first = 4 * stage + 2 * HALF
        words = word_bufs.index(first).reshape([4, 8, 4]).load(layout)
        left = kept_scores(left, words)
        words = word_bufs.index(first + 1).reshape([4, 8, 4]).load(layout)
        right = kept_scores(right, words)
    return left, right


@gluon.jit
def _weights(
    s, own, offset, total, word_bufs, k_empty, stage,
    HALF: gl.constexpr, MULT: gl.constexpr, HAS_PART: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Weights of a tile whose scores have arrived, see ``weighed_halves``; its keys are given
    back."""
    left, right = column_halves(s)
    if HAS_PART:
        left, right = _kept(left, right, own, word_bufs, stage, HALF)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return weighed_halves(left, right, offset, total, MULT, dtype)


@gluon.jit
def _ring(tile, STAGES: gl.constexpr):
    """(stage, phase of its barriers) of a tile; STAGES is 2 or 4."""
    stage = tile & (STAGES - 1)
    return stage, (tile >> (STAGES // 2)) & 1


@gluon.jit
def _scores(q_tile, k_bufs, stage, zero):
    """Ask for the scores of a tile."""
    keys = k_bufs.index(stage).reshape([KEYS, q_tile.shape[1]]).permute((1, 0))
    return warpgroup_mma(q_tile, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _added(acc, p, r, v_bufs, stage):
    """Ask for what the weights of both halves of a tile add to the result."""
    weights: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    values = v_bufs.index(stage).reshape([KEYS, acc.shape[1]])
    p = gl.convert_layout(p, weights, assert_trivial=True)
    r = gl.convert_layout(r, weights, assert_trivial=True)
    acc = warpgroup_mma(p, values.slice(0, ROWS, dim=0), acc, is_async=True)
    return warpgroup_mma(r, values.slice(ROWS, ROWS, dim=0), acc, is_async=True)


@gluon.jit
def consume_row(
    o_desc, lse,
    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    heads, q_len, HALF: gl.constexpr,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    RETURN_LSE: gl.constexpr, HAS_PART: gl.constexpr,
):  # fmt: skip
    """Attend with the first (HALF = 0) or second row of each unit."""
    dtype: gl.constexpr = o_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    own_rows: gl.constexpr = without(octet_layout(8), [1, 3])
    result_rows: gl.constexpr = gl.SliceLayout(1, result)
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    field = gl.arange(0, 8, layout=everywhere)
    zero = gl.zeros([ROWS, KEYS], gl.float32, scores)
    turn = 0
    tile = 0  # number of a tile of either row: each is a turn of both groups
    going = 1
    while going > 0:
        q_slot = turn % SLOTS
        mbarrier.wait(q_full.index(q_slot), (turn // SLOTS) & 1)
        unit = unit_bufs.index(q_slot).load(everywhere)
        follows = gl.sum(gl.where(field == 0, unit, 0), 0)
        going = gl.sum(gl.where(field == 5, unit, 0), 0)
        if going > 0:
            q_tile = q_bufs.index(2 * q_slot + HALF).reshape([ROWS, BLOCK_D])
            offset = gl.full([ROWS, 4], NO_OFFSET, gl.float32, own_rows)
            total = gl.zeros([ROWS, 4], gl.float32, own_rows)
            acc = gl.zeros([ROWS, BLOCK_D], gl.float32, result)
            held = turn > 0  # the other query slot, by the last unit's result
            while (follows & MORE) != 0:
                stage, phase = _ring(tile, STAGES)
                mbarrier.wait(k_full.index(stage), phase)
                own, follows = _kind(kind_bufs, stage, HALF)
                mbarrier.wait(turns.index(HALF), (tile & 1) ^ (1 - HALF))
                if own == OTHERS:  # every use of a barrier is waited for: it has only two phases
                    barrier_of_threads()  # all have read what the tile is
                    mbarrier.arrive(turns.index(1 - HALF), count=1)
                    mbarrier.wait(v_full.index(stage), phase)
                    mbarrier.arrive(k_empty.index(stage), count=1)
                    mbarrier.arrive(v_empty.index(stage), count=1)
                else:
                    # -- weights of the first of some tiles that follow each other ----
                    s = _scores(q_tile, k_bufs, stage, zero)
                    mbarrier.arrive(turns.index(1 - HALF), count=1)
                    if held:
                        tma.store_wait(0)
                        mbarrier.arrive(q_empty.index(q_slot ^ 1), count=1)
                        held = turn < 0
                    s = warpgroup_mma_wait(0, deps=(s,))
                    p, r, offset, total, alpha = _weights(
                        s, own, offset, total, word_bufs, k_empty, stage,
                        HALF, MULT, HAS_PART, dtype,
                    )  # fmt: skip
                    acc = rescaled(acc, alpha, BLOCK_D)

                    # -- scores of the next one, values of this one, then weights of the next ----
                    while (follows & (HALF + 1)) != 0:
                        stage, phase = _ring(tile, STAGES)
                        after, phase_after = _ring(tile + 1, STAGES)
                        mbarrier.wait(k_full.index(after), phase_after)
                        mbarrier.wait(turns.index(HALF), (after & 1) ^ (1 - HALF))
                        s = _scores(q_tile, k_bufs, after, zero)
                        own, follows = _kind(kind_bufs, after, HALF)
                        mbarrier.wait(v_full.index(stage), phase)
                        acc = _added(acc, p, r, v_bufs, stage)
                        mbarrier.arrive(turns.index(1 - HALF), count=1)
                        s = warpgroup_mma_wait(2, deps=(s,))
                        p, r, offset, total, alpha = _weights(
                            s, own, offset, total, word_bufs, k_empty, after,
                            HALF, MULT, HAS_PART, dtype,
                        )  # fmt: skip
                        acc = warpgroup_mma_wait(0, deps=(acc,))
                        mbarrier.arrive(v_empty.index(stage), count=1)
                        acc = rescaled(acc, alpha, BLOCK_D)
                        tile += 1
                    stage, phase = _ring(tile, STAGES)
                    mbarrier.wait(v_full.index(stage), phase)
                    acc = _added(acc, p, r, v_bufs, stage)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(v_empty.index(stage), count=1)
                tile += 1
            if held:  # a row without keys
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(q_slot ^ 1), count=1)

            # -- result ----
            unit = unit_bufs.index(q_slot).load(everywhere)  # once more, for want of registers
            row = gl.sum(gl.where(field == 2, unit, 0), 0) + HALF
            b = gl.sum(gl.where(field == 3, unit, 0), 0)
            h = gl.sum(gl.where(field == 4, unit, 0), 0)
            reference = gl.convert_layout(gl.max(offset, 1), result_rows) * -LN2
            total = gl.convert_layout(gl.sum(total, 1), result_rows)
            empty = total == 0.0
            filled = gl.where(empty, 1.0, total)
            acc = acc * reciprocal(filled)[:, None]
            barrier_of_threads()  # every warp has read its queries
            q_bufs.index(2 * q_slot + HALF).reshape([ROWS, BLOCK_D]).store(acc.to(dtype))
            fence_async_shared()
            tma_store(o_desc, [b, h, row * ROWS, 0], q_bufs.index(2 * q_slot + HALF))
            if RETURN_LSE:
                log_sum = gl.where(empty, float("-inf"), reference + gl.log(filled))
                q_row = row * ROWS + gl.arange(0, ROWS, layout=result_rows)
                lse_row = lse + (b * heads + h).to(gl.int64) * q_len
                gl.store(lse_row + q_row, log_sum, mask=q_row < q_len)
        turn += 1
    tma.store_wait(0)


_NUMBERS = [
    "plane_stride_b", "plane_stride_h", "batch_heads", "heads", "q_len", "rows", "heavy_pairs",
    "last_heads",
]  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def attention_hopper_pair_kernel(
    q_desc, k_desc, v_desc, o_desc, word_desc, lse, queue, sides,
    plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, q_len, rows, heavy_pairs, last_heads,
    MULT: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
    RETURN_LSE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """A worker; the grid is as many as the GPU holds at once."""
    q_bufs = gl.allocate_shared_memory(
        q_desc.dtype, [2 * SLOTS, 1, 1, ROWS, BLOCK_D], q_desc.layout
    )
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, KEYS, BLOCK_D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, KEYS, BLOCK_D], v_desc.layout)
    # of either row and either half of the columns
    word_bufs = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 1, WORDS], word_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    unit_bufs = gl.allocate_shared_memory(gl.int32, [SLOTS, 8], plain)
    kind_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 4], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gdc_wait()  # of the kernel before (overlap.py); nothing above touches global memory
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                consume_row,
                (
                    o_desc, lse, q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, heads, q_len, 0,
                    MULT, BLOCK_D, STAGES, RETURN_LSE, HAS_PART,
                ),
            ),
            (
                consume_row,
                (
                    o_desc, lse, q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, heads, q_len, 1,
                    MULT, BLOCK_D, STAGES, RETURN_LSE, HAS_PART,
                ),
            ),
            (
                produce_pairs,
                (
                    q_desc, k_desc, v_desc, word_desc,
                    q_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, kind_bufs,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    queue, sides, plane_map, plane_stride_b, plane_stride_h,
                    row_ptr, full_start, col_idx, bitmap_id, row_order,
                    batch_heads, heads, rows, heavy_pairs, last_heads,
                    BLOCK_D, STAGES, GROUP, SINGLE_PLANE, HAS_PART,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 40],
    )  # fmt: skip
