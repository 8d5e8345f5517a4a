"""Device code of overlapping launches; ``overlap.py`` says what they are."""

import triton
import triton.language as tl

LINE = tl.constexpr(128)  # bytes of a line of the L2 cache
LANES = tl.constexpr(128)  # lines that a program asks for at once
MOST_LINES = tl.constexpr(1 << 16)  # 8 MiB, a sixth of a Hopper GPU's L2 cache


@triton.jit
def start_after_previous(PDL: tl.constexpr):
    """First statement of a kernel: wait for the kernel before, let the one behind get ready."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_early(
    PDL: tl.constexpr, weight, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    KN: tl.constexpr,
):  # fmt: skip
    """Ask for a weight [N, K], or [K, N], of row stride STRIDE before ``start_after_previous``.

    Its lines come into the L2 cache while the kernel before still runs, a share by every program.
    This reads nothing: caches are coherent there, so a weight that the kernel before writes is as
    right. A weight over 8 MiB is fetched so far only: the rest would push out what is in use.
    """
    if PDL:
        ITEM: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        ROWS: tl.constexpr = K if KN else N
        BYTES: tl.constexpr = ((ROWS - 1) * STRIDE + N + K - ROWS) * ITEM
        WHOLE: tl.constexpr = BYTES // LINE
        LINES: tl.constexpr = WHOLE if WHOLE < MOST_LINES else MOST_LINES
        start = weight.to(tl.int64)
        for first in range(tl.program_id(0) * LANES, LINES, tl.num_programs(0) * LANES):
            line = tl.minimum(first + tl.arange(0, LANES), LINES - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
                "=r,l",
                [start + line * LINE],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
