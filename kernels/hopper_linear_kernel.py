"""Device code of a linear layer with its epilogue on Hopper GPUs; ``hopper_linear.py`` launches it.

A program is a persistent worker of three parts. The producer warp loads tiles of x and of the
weight by TMA into a ring. The consumers (two warp groups) multiply, add the bias, round the result
to its dtype and leave it in shared memory. The finishers (one or two warp groups) read it there,
apply the activation and the residual, and store it by TMA, while the consumers already work on the
next tile: what comes after the product costs no time of the matrix units.

Barriers are as in ``hopper_kernel.py``: ``full`` ones count bytes or one arrival, a barrier's n-th
use has phase parity n % 2.
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

from .hopper_kernel import barrier_of_threads, tma_load, tma_store

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def tile_place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Row and column of a tile: groups of GROUP_M tile rows, column by column, share weights and
    x in the cache."""
    in_group = GROUP_M * tiles_n
    group = tile // in_group
    first_m = group * GROUP_M
    height = gl.minimum(tiles_m - first_m, GROUP_M)
    rest = tile - group * in_group
    return first_m + rest % height, rest // height


@gluon.jit
def load_tiles(
    x_desc, w_desc, bias_desc, x_bufs, w_bufs, bias_bufs, full, empty,
    tiles_m, tiles_n, k_steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHT_KN: gl.constexpr,
):  # fmt: skip
    """Load what the consumers multiply, tile by tile."""
    TILE_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        for k in range(0, k_steps):
            stage = step % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if HAS_BIAS:
                # read before the first step of the next tile is released: see the launcher
                first = k == 0
                mbarrier.expect(ready, TILE_BYTES + BLOCK_N * 2, pred=first)
                mbarrier.expect(ready, TILE_BYTES, pred=k > 0)
                tma_load(bias_desc, [0, n * BLOCK_N], ready, bias_bufs.index(turn % 2), pred=first)
            else:
                mbarrier.expect(ready, TILE_BYTES)
            tma_load(x_desc, [m * BLOCK_M, k * BLOCK_K], ready, x_bufs.index(stage))
            if WEIGHT_KN:
                tma_load(w_desc, [k * BLOCK_K, n * BLOCK_N], ready, w_bufs.index(stage))
            else:
                tma_load(w_desc, [n * BLOCK_N, k * BLOCK_K], ready, w_bufs.index(stage))
            step += 1
        turn += 1  # noqa: SIM113  (device code)


@gluon.jit
def multiply_tiles(
    x_bufs, w_bufs, bias_bufs, out_buf, full, empty, out_full, out_empty,
    tiles_m, tiles_n, k_steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    WEIGHT_KN: gl.constexpr,
):  # fmt: skip
    """Multiply, and hand each tile over to the finisher."""
    # one instruction of 256 columns would need more registers than a thread begins with
    WIDTH: gl.constexpr = min(BLOCK_N, 128)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    columns: gl.constexpr = gl.SliceLayout(0, sums)
    step = 0
    turn = 0
    for _ in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, sums)
        for k in range(0, k_steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            w_tile = w_bufs.index(stage)
            if not WEIGHT_KN:
                w_tile = w_tile.permute((1, 0))
            acc = warpgroup_mma(x_bufs.index(stage), w_tile, acc, is_async=True)
            # one product stays in flight; the tiles of the one before are free
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        if HAS_BIAS:
            bias = bias_bufs.index(turn % 2).reshape([BLOCK_N]).load(columns)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if HAS_BIAS:
            acc = acc + bias.to(gl.float32)[None, :]
        mbarrier.wait(out_empty, (turn & 1) ^ 1)
        out_buf.store(acc.to(out_buf.dtype))
        fence_async_shared()
        barrier_of_threads()  # one thread signals for all that wrote
        mbarrier.arrive(out_full, count=1)
        turn += 1  # noqa: SIM113  (device code)


@gluon.jit
def finish_tiles(
    out_desc, residual, out_buf, done_buf, out_full, out_empty,
    rows, columns_all, stride_residual, tiles_m, tiles_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr, APART: gl.constexpr,
    FINISHERS: gl.constexpr,
):  # fmt: skip
    """Apply activation and residual to each tile and store it.

    ``done_buf`` is where the finished tile goes. APART: it is a second buffer, so that the first is
    free as soon as it was read; else the same one.
    """
    CHUNK: gl.constexpr = 4 * FINISHERS
    spread: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_N, BLOCK_N // 8], [FINISHERS, 1], [1, 0]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, spread)
    column_layout: gl.constexpr = gl.SliceLayout(0, spread)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        mbarrier.wait(out_full, turn & 1)
        if APART:
            tma.store_wait(0)  # the tile before has left the second buffer
            barrier_of_threads()
        if ACTIVATION != "" or HAS_RESIDUAL:
            column = n * BLOCK_N + gl.arange(0, BLOCK_N, layout=column_layout)
            for chunk in gl.static_range(BLOCK_M // CHUNK):
                if HAS_RESIDUAL:
                    row = m * BLOCK_M + chunk * CHUNK + gl.arange(0, CHUNK, layout=row_layout)
                    place = row.to(gl.int64)[:, None] * stride_residual + column[None, :]
                    inside = (row < rows)[:, None] & (column < columns_all)[None, :]
                    added = gl.load(residual + place, mask=inside, other=0.0).to(gl.float32)
                value = out_buf.slice(chunk * CHUNK, CHUNK).load(spread).to(gl.float32)
                value = activated(value, ACTIVATION)
                if HAS_RESIDUAL:
                    value = value + added
                done_buf.slice(chunk * CHUNK, CHUNK).store(value.to(done_buf.dtype))
            fence_async_shared()
        barrier_of_threads()  # all have read the first buffer and written theirs
        if APART:
            mbarrier.arrive(out_empty, count=1)
            tma_store(out_desc, [m * BLOCK_M, n * BLOCK_N], done_buf)
        else:
            tma_store(out_desc, [m * BLOCK_M, n * BLOCK_N], done_buf)
            tma.store_wait(0)
            mbarrier.arrive(out_empty, count=1)
        turn += 1  # noqa: SIM113  (device code)
    tma.store_wait(0)


@gluon.jit
def activated(v, ACTIVATION: gl.constexpr):
    """An activation of fp32 values that are rounded to a half type afterwards.

    GELU is the short form of ``stof_compile/short_gelu.py``.
    """
    if ACTIVATION == "gelu":
        a = gl.abs(v)
        root = gl.rsqrt(a * 0.35355339 + 1.0)
        t = root * root
        q = t * 0.32653764 + -1.0130376
        q = q * t + 0.67364152
        q = q * t + 0.37257878
        q = q * t + 1.4674070
        q = q * t + -2.8271257
        tail = t * gl.exp2(q - a * a * 0.72134752)
        v = v * gl.where(v >= 0, 1.0 - tail, tail)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2u
        u = 0.7978845608 * (v + 0.044715 * v * v * v)
        v = v / (1.0 + gl.exp2(u * (-2.0 * LOG2E)))
    elif ACTIVATION == "relu":
        v = gl.where(v < 0.0, 0.0, v)  # a maximum would lose NaN
    elif ACTIVATION == "silu":
        v = v / (1.0 + gl.exp2(v * -LOG2E))
    else:
        gl.static_assert(ACTIVATION == "", "unknown activation")
    return v


_NUMBERS = ["rows", "columns_all", "stride_residual", "tiles_m", "tiles_n", "k_steps"]


@gluon.jit(do_not_specialize=_NUMBERS)
def hopper_linear_kernel(
    x_desc, w_desc, bias_desc, out_desc, residual, rows, columns_all, stride_residual,
    tiles_m, tiles_n, k_steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, WEIGHT_KN: gl.constexpr, APART: gl.constexpr,
    FINISHERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """A worker; the grid is one for every multiprocessor."""
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    W_ROWS: gl.constexpr = BLOCK_K if WEIGHT_KN else BLOCK_N
    W_COLUMNS: gl.constexpr = BLOCK_N if WEIGHT_KN else BLOCK_K
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, W_ROWS, W_COLUMNS], w_desc.layout)
    bias_bufs = gl.allocate_shared_memory(bias_desc.dtype, [2, 1, BLOCK_N], bias_desc.layout)
    out_buf = gl.allocate_shared_memory(out_desc.dtype, [BLOCK_M, BLOCK_N], out_desc.layout)
    if APART:
        done_buf = gl.allocate_shared_memory(out_desc.dtype, [BLOCK_M, BLOCK_N], out_desc.layout)
    else:
        done_buf = out_buf
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    out_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    out_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(out_full, count=1)
    mbarrier.init(out_empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    x_bufs, w_bufs, bias_bufs, out_buf, full, empty, out_full, out_empty,
                    tiles_m, tiles_n, k_steps, BLOCK_M, BLOCK_N, STAGES, HAS_BIAS, WEIGHT_KN,
                ),
            ),
            (
                finish_tiles,
                (
                    out_desc, residual, out_buf, done_buf, out_full, out_empty,
                    rows, columns_all, stride_residual, tiles_m, tiles_n,
                    BLOCK_M, BLOCK_N, GROUP_M, ACTIVATION, HAS_RESIDUAL, APART, FINISHERS,
                ),
            ),
            (
                load_tiles,
                (
                    x_desc, w_desc, bias_desc, x_bufs, w_bufs, bias_bufs, full, empty,
                    tiles_m, tiles_n, k_steps, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
                    HAS_BIAS, WEIGHT_KN,
                ),
            ),
        ],
        [FINISHERS, 1],
        [REGISTERS, 24],
    )  # fmt: skip
