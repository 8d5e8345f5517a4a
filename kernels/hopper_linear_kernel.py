"""Device code of a linear layer with its epilogue on Hopper GPUs; ``hopper_linear.py`` launches it.

A program is a persistent worker of three parts. The producer warp loads tiles of x and of the
weight by TMA into a ring, tile after tile. Two consumers (a warp group each) take whole tiles in
turns: while one finishes its tile in registers and stores it by TMA, the other multiplies, so that
what comes after a product costs no time of the matrix units.

Barriers: ``full`` and ``readies`` count bytes, the others one arrival. A barrier's n-th use has
phase parity n % 2, so one who waits for it has to know that use n - 1 is over. A consumer skips the
uses of the tiles that the other takes, and would see an old one as its own: ``turns`` lets it begin
a tile when the other has seen the last load of the tile before.
Source: the ping-pong kernels of NVIDIA's CUTLASS for the idea of the turns.
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
from triton.language.extra.cuda import gdc_wait

from .hopper_transfers import barrier_of_threads, tma_load, tma_store

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def tile_place(tile, tiles_m, tiles_n, group_m):
    """Row and column of a tile: groups of ``group_m`` tile rows, column by column, share weights
    and x in the cache."""
    in_group = group_m * tiles_n
    group = tile // in_group
    first_m = group * group_m
    height = gl.minimum(tiles_m - first_m, group_m)
    rest = tile - group * in_group
    return first_m + rest % height, rest // height


@gluon.jit
def load_tiles(
    x_desc, w_desc, x_bufs, w_bufs, full, empty, tiles_m, tiles_n, group_m, k_steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_KN: gl.constexpr,
):  # fmt: skip
    """Load what the consumers multiply, tile by tile."""
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, group_m)
        for k in range(0, k_steps):
            stage = step % STAGES
            loaded = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(loaded, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            tma_load(x_desc, [m * BLOCK_M, k * BLOCK_K], loaded, x_bufs.index(stage))
            if WEIGHT_KN:
                tma_load(w_desc, [k * BLOCK_K, n * BLOCK_N], loaded, w_bufs.index(stage))
            else:
                tma_load(w_desc, [n * BLOCK_N, k * BLOCK_K], loaded, w_bufs.index(stage))
            step += 1


@gluon.jit
def finish_every_second_tile(
    bias_desc, residual_desc, out_desc, x_bufs, w_bufs, bias_bufs, out_bufs,
    full, empty, readies, turns, tiles_m, tiles_n, group_m, k_steps,
    FIRST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    WEIGHT_KN: gl.constexpr, mark, MARKS: gl.constexpr,
):  # fmt: skip
    """Multiply, finish and store the even (FIRST = 0) or odd (FIRST = 1) tiles of the program.

    The residual is loaded into the buffer of the result, which it leaves as the result. MARKS: set
    the word at ``mark`` where an element is infinite (what lies outside of the result is 0 or NaN
    without a bias).
    """
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    WIDTH: gl.constexpr = BLOCK_N // 2
    finished: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    columns: gl.constexpr = gl.SliceLayout(0, finished)
    BIAS_BYTES: gl.constexpr = BLOCK_N * 2 if HAS_BIAS else 0
    RESIDUAL_BYTES: gl.constexpr = BLOCK_M * BLOCK_N * 2 if HAS_RESIDUAL else 0
    ready = readies.index(FIRST)
    turn = turns.index(FIRST)
    turn_of_other = turns.index(1 - FIRST)
    step = FIRST * k_steps
    use = 0
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0) + FIRST * programs, tiles_m * tiles_n, 2 * programs):
        m, n = tile_place(tile, tiles_m, tiles_n, group_m)
        if HAS_BIAS or HAS_RESIDUAL:
            if HAS_RESIDUAL:
                tma.store_wait(0)  # the tile before has left the buffer
                barrier_of_threads()
            mbarrier.expect(ready, BIAS_BYTES + RESIDUAL_BYTES)
            for i in gl.static_range(2):
                column = n * BLOCK_N + i * WIDTH
                bias_buf = bias_bufs.index(2 * FIRST + i)
                out_buf = out_bufs.index(2 * FIRST + i)
                if HAS_BIAS:
                    tma_load(bias_desc, [0, column], ready, bias_buf)
                if HAS_RESIDUAL:
                    tma_load(residual_desc, [m * BLOCK_M, column], ready, out_buf)
        # -- product: nobody has to be waited for at the very first tile --------------------------
        mbarrier.wait(turn, (use & 1) ^ (1 - FIRST))
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        w_tile = w_bufs.index(stage)
        if not WEIGHT_KN:
            w_tile = w_tile.permute((1, 0))
        # the first product starts the sums: of a constant no register is set
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, sums)
        acc = warpgroup_mma(x_bufs.index(stage), w_tile, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # for nothing yet
        step += 1
        for _ in range(1, k_steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            w_tile = w_bufs.index(stage)
            if not WEIGHT_KN:
                w_tile = w_tile.permute((1, 0))
            acc = warpgroup_mma(x_bufs.index(stage), w_tile, acc, is_async=True)
            # one product stays in flight; the tiles of the one before are free
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        mbarrier.arrive(turn_of_other, count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        # -- epilogue: by halves, which leaves registers to compute with ---------------------------
        if HAS_BIAS or HAS_RESIDUAL:
            mbarrier.wait(ready, use & 1)
        if not HAS_RESIDUAL:
            tma.store_wait(0)  # the tile before has left the buffer
            barrier_of_threads()
        pair = acc.reshape([BLOCK_M, 2, WIDTH]).permute((0, 2, 1)).split()
        for i in gl.static_range(2):
            bias_buf = bias_bufs.index(2 * FIRST + i)
            out_buf = out_bufs.index(2 * FIRST + i)
            value = gl.convert_layout(pair[i], finished, assert_trivial=True)
            if ACTIVATION == "gelu":
                value = value * 0.5
            if HAS_BIAS:
                bias = bias_buf.reshape([WIDTH]).load(columns).to(gl.float32)
                if ACTIVATION == "gelu":
                    bias = bias * 0.5
                value = value + bias[None, :]
            value = activated(value, ACTIVATION, out_desc.dtype == gl.float16)
            if HAS_RESIDUAL:
                value = value + out_buf.load(finished).to(gl.float32)
            rounded = value.to(out_desc.dtype)
            out_buf.store(rounded)
            if MARKS:
                infinite = gl.abs(rounded.to(gl.float32)) == float("inf")
                word = mark + gl.zeros([BLOCK_M, WIDTH], gl.int32, finished)
                ones = gl.full([BLOCK_M, WIDTH], 1, gl.int32, finished)
                gl.atomic_or(word, ones, mask=infinite, sem="relaxed")
            fence_async_shared()
            barrier_of_threads()
            tma_store(out_desc, [m * BLOCK_M, n * BLOCK_N + i * WIDTH], out_buf)
        step += k_steps  # of the other's tile
        use += 1  # noqa: SIM113  (device code)
    tma.store_wait(0)


@gluon.jit
def activated(v, ACTIVATION: gl.constexpr, FP16: gl.constexpr):
    """An activation of fp32 values that are rounded to fp16 (or bf16) afterwards.

    GELU takes half of each value: the halving costs nothing where a bias is added. Its formula is
    that of ``stof_compile/short_gelu.py``. Ordinary instructions are what an activation costs here,
    those of the special-function unit (``exp2``) run beside the other consumer's product.
    """
    if ACTIVATION == "gelu":
        if FP16:
            b = gl.minimum(gl.abs(v), 6.5)
            w = gl.exp2(b * -1.9057967)
            q = b * -2.8176647 - 0.81534104
            q = q * b - 1.1252787
            q = w * 1.1252787 + q
        else:
            b = gl.minimum(gl.abs(v), 8.0)
            w = gl.exp2(b * -2.0377092)
            q = b * 4.991382e-4 - 0.0130387856
            q = q * b - 2.7385866
            q = q * b - 1.0217364
            q = q * b - 0.90591097
            q = w * 0.90591097 + q
        v = (v + gl.abs(v)) - b * gl.exp2(q)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2u
        u = 0.7978845608 * (v + 0.044715 * v * v * v)
        v = _times_sigmoid(v, u * 2.0)
    elif ACTIVATION == "relu":
        v = gl.where(v < 0.0, 0.0, v)  # a maximum would lose NaN
    elif ACTIVATION == "silu":
        v = _times_sigmoid(v, v)
    else:
        gl.static_assert(ACTIVATION == "", "unknown activation")
    return v


@gluon.jit
def _times_sigmoid(v, u):
    """v * sigmoid(u); the root of 1 / (1 + e) is one instruction, a division several."""
    root = gl.rsqrt(1.0 + gl.exp2(u * -LOG2E))  # 0 where e overflows
    return v * root * root


_NUMBERS = ["tiles_m", "tiles_n", "group_m", "k_steps"]


@gluon.jit(do_not_specialize=_NUMBERS)
def hopper_linear_kernel(
    x_desc, w_desc, bias_desc, residual_desc, out_desc, tiles_m, tiles_n, group_m, k_steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    WEIGHT_KN: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """A worker; the grid is one for every multiprocessor."""
    _work(
        x_desc, w_desc, bias_desc, residual_desc, out_desc, tiles_m, tiles_n, group_m, k_steps,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, WEIGHT_KN, REGISTERS,
        0, False,
    )  # fmt: skip


@gluon.jit(do_not_specialize=_NUMBERS)
def hopper_linear_marking_kernel(
    x_desc, w_desc, residual_desc, out_desc, mark, tiles_m, tiles_n, group_m, k_steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr, WEIGHT_KN: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """The same without a bias; sets the word at ``mark`` where an element is infinite."""
    _work(
        x_desc, w_desc, out_desc, residual_desc, out_desc, tiles_m, tiles_n, group_m, k_steps,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ACTIVATION, False, HAS_RESIDUAL, WEIGHT_KN, REGISTERS,
        mark, True,
    )  # fmt: skip


@gluon.jit
def _work(
    x_desc, w_desc, bias_desc, residual_desc, out_desc, tiles_m, tiles_n, group_m, k_steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    WEIGHT_KN: gl.constexpr, REGISTERS: gl.constexpr, mark, MARKS: gl.constexpr,
):  # fmt: skip
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    W_ROWS: gl.constexpr = BLOCK_K if WEIGHT_KN else BLOCK_N
    W_COLUMNS: gl.constexpr = BLOCK_N if WEIGHT_KN else BLOCK_K
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, W_ROWS, W_COLUMNS], w_desc.layout)
    # of each consumer, in halves
    WIDTH: gl.constexpr = BLOCK_N // 2
    if not MARKS:
        bias_bufs = gl.allocate_shared_memory(bias_desc.dtype, [4, 1, WIDTH], bias_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [4, BLOCK_M, WIDTH], out_desc.layout)
    if MARKS:
        bias_bufs = out_bufs  # there is no bias
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    readies = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(readies.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    gdc_wait()  # of the kernel before (overlap.py); nothing above touches global memory
    # The kernel behind is not let in before the end: programs here have unequal numbers of tiles,
    # and its own would crowd on the multiprocessors whose work ends first.
    gl.warp_specialize(
        [
            (
                finish_every_second_tile,
                (
                    bias_desc, residual_desc, out_desc, x_bufs, w_bufs, bias_bufs, out_bufs,
                    full, empty, readies, turns, tiles_m, tiles_n, group_m, k_steps, 0,
                    BLOCK_M, BLOCK_N, STAGES, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
                    WEIGHT_KN, mark, MARKS,
                ),
            ),
            (
                finish_every_second_tile,
                (
                    bias_desc, residual_desc, out_desc, x_bufs, w_bufs, bias_bufs, out_bufs,
                    full, empty, readies, turns, tiles_m, tiles_n, group_m, k_steps, 1,
                    BLOCK_M, BLOCK_N, STAGES, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
                    WEIGHT_KN, mark, MARKS,
                ),
            ),
            (
                load_tiles,
                (
                    x_desc, w_desc, x_bufs, w_bufs, full, empty, tiles_m, tiles_n, group_m, k_steps,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WEIGHT_KN,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
