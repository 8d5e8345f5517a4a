"""Device code of the fused linear layer; ``linear.py`` says what it computes.

One kernel in three forms: a program per tile; ``SPLIT_K`` programs per tile that each sum a part of
K, of which the last adds up the parts (``linear_handoff.py``); and persistent programs that walk
over the tiles, so that the end of one tile overlaps the loads of the next.
"""

import triton
import triton.language as tl

from .linear_epilogue import finish_tile, load_operands, store_tile
from .linear_handoff import give_part, wait_for_parts
from .linear_tiles import (
    describe_weight,
    describe_x,
    described_or_plain_sums,
    tile_position,
)
from .overlap_kernel import fetch_early, start_after_previous


@triton.jit
def linear_kernel(
    x, weight, bias, residual, factor, out, parts, flags, marks, mark, M,
    stride_x: tl.constexpr, stride_w: tl.constexpr,
    stride_residual: tl.constexpr, stride_factor: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
    WEIGHT_KN: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, PERSISTENT: tl.constexpr, TMA: tl.constexpr, PIECES: tl.constexpr,
    EARLY: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, MARKS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """EARLY: the operands of the epilogue are loaded before the product, not after it. MARKS: of
    ``write_tile``.
    """
    fetch_early(PDL, weight, N, K, stride_w, WEIGHT_KN)
    start_after_previous(PDL)
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    x_view, w_view = x, weight
    if TMA:
        x_view = describe_x(x, M, stride_x, K, BLOCK_M, BLOCK_K)
        w_view = describe_weight(weight, stride_w, N, K, WEIGHT_KN, BLOCK_N, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * TILES_N
    program = tl.program_id(0)
    if PERSISTENT:
        tl.static_assert(SPLIT_K == 1, "persistent programs do not split K")
        for tile in tl.range(program, tiles, tl.num_programs(0), flatten=True):
            first_m, column = tile_position(tile, M, BLOCK_M, TILES_N, GROUP_M)
            first_n = column * BLOCK_N
            sums = described_or_plain_sums(
                x_view, w_view, first_m, first_n, tile * 0, STEPS, M, stride_x, stride_w, N, K,
                WEIGHT_KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_M, EVEN_N, EVEN_K, PRECISION,
            )  # fmt: skip
            finish_tile(
                sums, first_m, first_n, bias, residual, factor, out, parts, M, stride_residual,
                stride_factor, N, BLOCK_M, BLOCK_N, PIECES, 0, BLOCK_N, EVEN_M, EVEN_N, HAS_BIAS,
                HAS_RESIDUAL, HAS_FACTOR, ACTIVATION, marks, mark, MARKS,
            )  # fmt: skip
    elif SPLIT_K == 1:
        first_m, column = tile_position(program, M, BLOCK_M, TILES_N, GROUP_M)
        first_n = column * BLOCK_N
        operands = (0.0, 0.0, 0.0)
        if EARLY:
            operands = load_operands(
                first_m, first_n, bias, residual, factor, M, stride_residual, stride_factor, N,
                BLOCK_M, BLOCK_N, EVEN_M, EVEN_N, HAS_BIAS, HAS_RESIDUAL, HAS_FACTOR,
            )  # fmt: skip
        sums = described_or_plain_sums(
            x_view, w_view, first_m, first_n, program * 0, STEPS, M, stride_x, stride_w, N, K,
            WEIGHT_KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_M, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
        if EARLY:
            store_tile(
                sums, first_m, first_n, operands[0], operands[1], operands[2], out, M, N, BLOCK_M,
                BLOCK_N, EVEN_M, EVEN_N, HAS_BIAS, HAS_RESIDUAL, HAS_FACTOR, ACTIVATION, marks,
                mark, MARKS,
            )  # fmt: skip
        else:
            finish_tile(
                sums, first_m, first_n, bias, residual, factor, out, parts, M, stride_residual,
                stride_factor, N, BLOCK_M, BLOCK_N, PIECES, 0, BLOCK_N, EVEN_M, EVEN_N, HAS_BIAS,
                HAS_RESIDUAL, HAS_FACTOR, ACTIVATION, marks, mark, MARKS,
            )  # fmt: skip
    else:
        # the programs of one part are neighbours and the last part's come last: they wait
        part = program // tiles
        tile = program - part * tiles
        first_m, column = tile_position(tile, M, BLOCK_M, TILES_N, GROUP_M)
        first_n = column * BLOCK_N
        PART_STEPS: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
        steps = tl.minimum(PART_STEPS, STEPS - part * PART_STEPS)
        sums = described_or_plain_sums(
            x_view, w_view, first_m, first_n, part * (PART_STEPS * BLOCK_K), steps, M, stride_x,
            stride_w, N, K, WEIGHT_KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_M, EVEN_N, EVEN_K,
            PRECISION,
        )  # fmt: skip
        slot = tile * (SPLIT_K - 1)
        if part < SPLIT_K - 1:
            give_part(sums, parts, flags, slot + part, BLOCK_M, BLOCK_N)
        else:
            wait_for_parts(flags, slot, SPLIT_K - 1)
            finish_tile(
                sums, first_m, first_n, bias, residual, factor, out,
                parts + slot.to(tl.int64) * (BLOCK_M * BLOCK_N), M, stride_residual, stride_factor,
                N, BLOCK_M, BLOCK_N, PIECES, SPLIT_K - 1, BLOCK_N, EVEN_M, EVEN_N, HAS_BIAS,
                HAS_RESIDUAL, HAS_FACTOR, ACTIVATION, marks, mark, MARKS,
            )  # fmt: skip
