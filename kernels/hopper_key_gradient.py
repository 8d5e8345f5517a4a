"""Device code of dK and dV on Hopper GPUs, the second of the two kernels of the gradient of
block-wise attention; ``attention_hopper_backward.py`` launches both.

As ``hopper_query_gradient.py``, but a unit is a tile column of one key head, scores are
[keys, rows], and a part tile's words are those of the transposed tile. The products of keys and
queries and of values and dO begin at what is to be subtracted, the log-sum-exp and delta of the
rows: registers of their own for these would not fit beside dK and dV of 128 columns.
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

from .hopper_gradient_loads import produce_gradient
from .hopper_registers import ROWS, fragment_layout, kept_scores, without
from .hopper_transfers import WORDS, barrier_of_threads, tma_store


@gluon.jit
def _begun(of_rows, layout: gl.constexpr):
    """What a product of keys and rows begins at: a number of each row, in registers of its own."""
    begun = of_rows.load(gl.SliceLayout(0, layout))[None, :].broadcast_to([ROWS, ROWS])
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [begun], gl.float32, False, 1)


@gluon.jit
def consume_rows(
    dk_desc, dv_desc,
    k_bufs, v_bufs, q_bufs, grad_bufs, word_bufs, stat_bufs, unit_bufs,
    unit_full, unit_empty, q_full, grad_full, met_empty,
    SCALE: gl.constexpr, MULT: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, HAS_PART: gl.constexpr,
):  # fmt: skip
    """dK and dV of the units."""
    dtype: gl.constexpr = dk_desc.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    word_layout: gl.constexpr = without(fragment_layout(), [1, 3, 5])
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    field = gl.arange(0, 8, layout=everywhere)
    turn = 0
    stage = 0
    phase = 0
    before = 0
    going = 1
    while going > 0:
        slot = turn % SLOTS
        mbarrier.wait(unit_full.index(slot), (turn // SLOTS) & 1)
        unit = unit_bufs.index(slot).load(everywhere)
        count = gl.sum(gl.where(field == 0, unit, 0), 0)
        parts = gl.sum(gl.where(field == 1, unit, 0), 0)
        going = gl.sum(gl.where(field == 5, unit, 0), 0)
        if going > 0:
            k_tile = k_bufs.index(slot).reshape([ROWS, WIDTH])
            v_tile = v_bufs.index(slot).reshape([ROWS, WIDTH])
            dk = gl.zeros([ROWS, WIDTH], gl.float32, result)
            dv = gl.zeros([ROWS, WIDTH], gl.float32, result)
            if SLOTS == 2:
                tma.store_wait(0)  # the last unit's results have left their slots
                mbarrier.arrive(unit_empty.index(slot ^ 1), count=1, pred=turn > 0)
            barrier_of_threads()  # here, or the compiler puts one into the loop
            number = 0  # of a tile among those of its head
            for t in range(0, GROUP * count):
                # -- scores, and the gradient of the weights ----
                mbarrier.wait(q_full.index(stage), phase)
                q_tile = q_bufs.index(stage).reshape([ROWS, WIDTH])
                stat_tile = stat_bufs.index(stage).reshape([2 * ROWS])
                s = _begun(stat_tile.slice(0, ROWS), layout)
                dp = _begun(stat_tile.slice(ROWS, ROWS), layout)
                s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), s, is_async=True)
                mbarrier.wait(grad_full.index(stage), phase)
                grad_tile = grad_bufs.index(stage).reshape([ROWS, WIDTH])
                dp = warpgroup_mma(v_tile, grad_tile.permute((1, 0)), dp, is_async=True)
                # the tile before is given back while the products run, which hides the barriers
                mbarrier.arrive(met_empty.index(before), count=1, pred=t > 0)
                barrier_of_threads()
                if HAS_PART:  # read while the products run; not used on full tiles
                    words = word_bufs.index(stage).reshape([4, 8, 4]).load(word_layout)
                s = warpgroup_mma_wait(1, deps=(s,))  # less lse / scale
                if HAS_PART:  # noqa: SIM102  (known to the compiler, the next one is not)
                    if number < parts:
                        s = kept_scores(s, words)
                p = gl.exp2(s * MULT)
                of_value = gl.convert_layout(p.to(dtype), weights, assert_trivial=True)

                # -- gradients of the values, of the scores, of the keys ----
                dp = warpgroup_mma_wait(0, deps=(dp,))
                dv = warpgroup_mma(of_value, grad_tile, dv, is_async=True)
                ds = (p * dp).to(dtype)  # dp is less delta
                ds = gl.convert_layout(ds, weights, assert_trivial=True)
                dk = warpgroup_mma(ds, q_tile, dk, is_async=True)
                dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
                before = stage
                stage += 1
                phase = gl.where(stage == STAGES, phase ^ 1, phase)
                stage = gl.where(stage == STAGES, 0, stage)
                number += 1
                if GROUP > 1:
                    number = gl.where(number == count, 0, number)
            mbarrier.arrive(met_empty.index(before), count=1, pred=count > 0)

            # -- results ----
            unit = unit_bufs.index(slot).load(everywhere)  # once more, for want of registers
            col = gl.sum(gl.where(field == 2, unit, 0), 0)
            b = gl.sum(gl.where(field == 3, unit, 0), 0)
            h = gl.sum(gl.where(field == 4, unit, 0), 0)
            barrier_of_threads()  # every warp has read its keys and values
            k_bufs.index(slot).reshape([ROWS, WIDTH]).store((dk * SCALE).to(dtype))
            v_bufs.index(slot).reshape([ROWS, WIDTH]).store(dv.to(dtype))
            fence_async_shared()
            tma_store(dk_desc, [b, h, col * ROWS, 0], k_bufs.index(slot))
            tma_store(dv_desc, [b, h, col * ROWS, 0], v_bufs.index(slot))
            if SLOTS == 1:
                tma.store_wait(0)
                mbarrier.arrive(unit_empty.index(0), count=1)
        turn += 1
    tma.store_wait(0)


_NUMBERS = [
    "plane_stride_b", "plane_stride_h", "batch_heads", "heads", "cols", "rows", "heavy_cols",
    "last_heads",
]  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def attention_hopper_key_kernel(
    k_desc, v_desc, q_desc, grad_desc, dk_desc, dv_desc, word_desc, stat_desc,
    queue, sides, plane_map, plane_stride_b, plane_stride_h,
    col_ptr, full_start, row_idx, bitmap_id, col_order,
    batch_heads, heads, cols, rows, heavy_cols, last_heads,
    SCALE: gl.constexpr, MULT: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
):  # fmt: skip
    """A worker; the grid is as many as the GPU holds at once. batch_heads and heads are k's."""
    dtype: gl.constexpr = k_desc.dtype
    tiles: gl.constexpr = k_desc.layout
    k_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, ROWS, WIDTH], tiles)
    v_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, ROWS, WIDTH], tiles)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], tiles)
    grad_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], tiles)
    word_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 1, WORDS], word_desc.layout)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * ROWS], stat_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    unit_bufs = gl.allocate_shared_memory(gl.int32, [SLOTS, 8], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    unit_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    unit_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    grad_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    met_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(SLOTS):
        mbarrier.init(unit_full.index(i), count=1)
        mbarrier.init(unit_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(grad_full.index(i), count=1)
        mbarrier.init(met_empty.index(i), count=1)
    fence_async_shared()
    gdc_wait()  # of the kernel before (overlap.py); nothing above touches global memory
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                consume_rows,
                (
                    dk_desc, dv_desc,
                    k_bufs, v_bufs, q_bufs, grad_bufs, word_bufs, stat_bufs, unit_bufs,
                    unit_full, unit_empty, q_full, grad_full, met_empty,
                    SCALE, MULT, WIDTH, SLOTS, STAGES, GROUP, HAS_PART,
                ),
            ),
            (
                produce_gradient,
                (
                    k_desc, v_desc, k_desc, q_desc, grad_desc, word_desc, stat_desc,
                    k_bufs, v_bufs, q_bufs, grad_bufs, word_bufs, stat_bufs, unit_bufs, stat_bufs,
                    unit_full, unit_empty, q_full, grad_full, met_empty,
                    queue, queue, queue, sides, plane_map, plane_stride_b, plane_stride_h,
                    col_ptr, full_start, row_idx, bitmap_id, col_order,
                    batch_heads, heads, 0, cols, rows, heavy_cols, last_heads,
                    WIDTH, SLOTS, STAGES, GROUP, SINGLE_PLANE, HAS_PART, False, False,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
