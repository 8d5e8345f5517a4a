"""Device code of dQ on Hopper GPUs, the first of the two kernels of the gradient of block-wise
attention; ``attention_hopper_backward.py`` launches both.

A program is a persistent worker of one consumer warp group and one producer warp. As in
``hopper_kernel.py``, units (a tile row of one head) come from a queue, and what the next one needs
is loaded while the last one is computed. A part tile's mask comes as one word per thread.
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
def consume_keys(
    dq_desc, stats,
    q_bufs, grad_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, row_bufs,
    unit_full, unit_empty, k_full, v_full, met_empty,
    heads, rows,
    SCALE: gl.constexpr, MULT: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    HAS_PART: gl.constexpr, HAS_GRAD_LSE: gl.constexpr,
):  # fmt: skip
    """dQ of the units, and of each of their rows what the key kernel needs."""
    dtype: gl.constexpr = dq_desc.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    word_layout: gl.constexpr = without(fragment_layout(), [1, 3, 5])
    everywhere: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    field = gl.arange(0, 8, layout=everywhere)
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout)
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
            row = gl.sum(gl.where(field == 2, unit, 0), 0)
            b = gl.sum(gl.where(field == 3, unit, 0), 0)
            h = gl.sum(gl.where(field == 4, unit, 0), 0)
            q_tile = q_bufs.index(slot).reshape([ROWS, WIDTH])
            grad_tile = grad_bufs.index(slot).reshape([ROWS, WIDTH])
            less = row_bufs.index(2 * slot).load(of_rows)
            # -- sum of dO * out of each row; out comes in the place of values ----
            mbarrier.wait(v_full.index(stage), phase)
            out_tile = v_bufs.index(stage).reshape([ROWS, WIDTH])
            product = out_tile.load(result).to(gl.float32) * grad_tile.load(result).to(gl.float32)
            fence_async_shared()  # or TMA writes values over what is still being read
            mbarrier.arrive(met_empty.index(stage), count=1)
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
            delta = gl.convert_layout(gl.sum(product, 1), of_rows, assert_trivial=True)
            if HAS_GRAD_LSE:
                delta -= row_bufs.index(2 * slot + 1).load(of_rows)
            at = stats + ((b * heads + h) * rows + row).to(gl.int64) * (2 * ROWS)
            at += gl.arange(0, ROWS, layout=of_rows)
            gl.store(at, less * (1.0 / MULT))  # what scores begin at there: -lse / scale
            gl.store(at + ROWS, -delta)
            if SLOTS == 2:
                tma.store_wait(0)  # the last unit's result has left its slot
                mbarrier.arrive(unit_empty.index(slot ^ 1), count=1, pred=turn > 0)
            dq = gl.zeros([ROWS, WIDTH], gl.float32, result)
            barrier_of_threads()  # here, or the compiler puts one into the loop
            for t in range(0, count):
                # -- scores, and the gradient of the weights ----
                mbarrier.wait(k_full.index(stage), phase)
                k_tile = k_bufs.index(stage).reshape([ROWS, WIDTH])
                s = warpgroup_mma(
                    q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True
                )  # fmt: skip
                mbarrier.wait(v_full.index(stage), phase)
                v_tile = v_bufs.index(stage).reshape([ROWS, WIDTH])
                dp = warpgroup_mma(
                    grad_tile, v_tile.permute((1, 0)), zero, use_acc=False, is_async=True
                )  # fmt: skip
                # the tile before is given back while the products run, which hides the barriers
                mbarrier.arrive(met_empty.index(before), count=1, pred=t > 0)
                barrier_of_threads()
                if HAS_PART:  # read while the products run; not used on full tiles
                    words = word_bufs.index(stage).reshape([4, 8, 4]).load(word_layout)
                s = warpgroup_mma_wait(1, deps=(s,))
                if HAS_PART:  # noqa: SIM102  (known to the compiler, the next one is not)
                    if t < parts:
                        s = kept_scores(s, words)
                p = gl.exp2(gl.fma(s, MULT, less[:, None]))

                # -- gradient of the scores, then of the queries ----
                dp = warpgroup_mma_wait(0, deps=(dp,))
                ds = (p * (dp - delta[:, None])).to(dtype)
                ds = gl.convert_layout(ds, weights, assert_trivial=True)
                dq = warpgroup_mma(ds, k_tile, dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=(dq,))
                before = stage
                stage += 1
                phase = gl.where(stage == STAGES, phase ^ 1, phase)
                stage = gl.where(stage == STAGES, 0, stage)
            mbarrier.arrive(met_empty.index(before), count=1, pred=count > 0)

            # -- result ----
            barrier_of_threads()  # every warp has read its queries
            q_bufs.index(slot).reshape([ROWS, WIDTH]).store((dq * SCALE).to(dtype))
            fence_async_shared()
            tma_store(dq_desc, [b, h, row * ROWS, 0], q_bufs.index(slot))
            if SLOTS == 1:
                tma.store_wait(0)
                mbarrier.arrive(unit_empty.index(0), count=1)
        turn += 1
    tma.store_wait(0)


_NUMBERS = [
    "plane_stride_b", "plane_stride_h", "batch_heads", "heads", "q_len", "rows", "heavy_rows",
    "last_heads",
]  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def attention_hopper_query_kernel(
    q_desc, grad_desc, out_desc, k_desc, v_desc, dq_desc, word_desc,
    lse, grad_lse, stats, queue, sides, plane_map, plane_stride_b, plane_stride_h,
    row_ptr, full_start, col_idx, bitmap_id, row_order,
    batch_heads, heads, q_len, rows, heavy_rows, last_heads,
    SCALE: gl.constexpr, MULT: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SINGLE_PLANE: gl.constexpr, HAS_PART: gl.constexpr,
    HAS_GRAD_LSE: gl.constexpr,
):  # fmt: skip
    """A worker; the grid is as many as the GPU holds at once."""
    dtype: gl.constexpr = q_desc.dtype
    tiles: gl.constexpr = q_desc.layout
    q_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, ROWS, WIDTH], tiles)
    grad_bufs = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, ROWS, WIDTH], tiles)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], tiles)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], tiles)
    word_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 1, WORDS], word_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    unit_bufs = gl.allocate_shared_memory(gl.int32, [SLOTS, 8], plain)
    row_bufs = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, ROWS], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    unit_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    unit_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    met_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(SLOTS):
        mbarrier.init(unit_full.index(i), count=1)
        mbarrier.init(unit_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(met_empty.index(i), count=1)
    fence_async_shared()
    gdc_wait()  # of the kernel before (overlap.py); nothing above touches global memory
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                consume_keys,
                (
                    dq_desc, stats,
                    q_bufs, grad_bufs, k_bufs, v_bufs, word_bufs, unit_bufs, row_bufs,
                    unit_full, unit_empty, k_full, v_full, met_empty,
                    heads, rows, SCALE, MULT, WIDTH, SLOTS, STAGES, HAS_PART, HAS_GRAD_LSE,
                ),
            ),
            (
                produce_gradient,
                (
                    q_desc, grad_desc, out_desc, k_desc, v_desc, word_desc, word_desc,
                    q_bufs, grad_bufs, k_bufs, v_bufs, word_bufs, word_bufs, unit_bufs, row_bufs,
                    unit_full, unit_empty, k_full, v_full, met_empty,
                    lse, grad_lse, queue, sides, plane_map, plane_stride_b, plane_stride_h,
                    row_ptr, full_start, col_idx, bitmap_id, row_order,
                    batch_heads, heads, q_len, rows, rows, heavy_rows, last_heads,
                    WIDTH, SLOTS, STAGES, GROUP, SINGLE_PLANE, HAS_PART, True, HAS_GRAD_LSE,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
