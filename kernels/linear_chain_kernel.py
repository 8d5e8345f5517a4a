"""Device code of two linear layers in one launch; ``linear_chain.py`` says what it computes.

The first programs compute tiles of the hidden layer and hand them over through memory; the others
wait for those of their rows (``linear_handoff.py``) and compute tiles of the result. The end of the
first layer and the start of the second overlap, and no program ever waits for all others.
"""

import triton
import triton.language as tl

from .linear_epilogue import activate, finish_tile, load_row, write_tile
from .linear_handoff import give_part, hand_over, wait_for, wait_for_parts
from .linear_tiles import tile_sums
from .overlap_kernel import fetch_early, start_after_previous


@triton.jit
def linear_chain_kernel(
    x, w1, b1, w2, b2, residual, hidden, out, parts, hidden_flags, part_flags, M,
    stride_x: tl.constexpr, stride_w1: tl.constexpr, stride_w2: tl.constexpr,
    stride_residual: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    W1_KN: tl.constexpr, W2_KN: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_B1: tl.constexpr, HAS_B2: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, PIECES: tl.constexpr, FLAGS: tl.constexpr, READERS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_H: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K1: tl.constexpr, EVEN_K2: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """FLAGS and READERS: powers of two that hold the flags one program waits for, or sets."""
    fetch_early(PDL, w1, H, K, stride_w1, W1_KN)
    fetch_early(PDL, w2, N, H, stride_w2, W2_KN)
    start_after_previous(PDL)
    TILES_H: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    first_layer = tiles_m * TILES_H
    if program < first_layer:
        row = program % tiles_m
        column = program // tiles_m
        first_m = row * BLOCK_M
        first_h = column * BLOCK_H
        STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        hidden_sums = tile_sums(
            x, w1, first_m, first_h, row * 0, STEPS, M, stride_x, stride_w1, H, K, W1_KN, BLOCK_M,
            BLOCK_H, BLOCK_K, EVEN_M, EVEN_H, EVEN_K1, PRECISION,
        )  # fmt: skip
        if HAS_B1:
            hidden_sums += load_row(b1, first_h, H, BLOCK_H, EVEN_H).to(tl.float32)[None, :]
        hidden_sums = activate(hidden_sums, ACTIVATION, hidden.dtype.element_ty)
        write_tile(hidden_sums, first_m, first_h, hidden, M, H, BLOCK_M, BLOCK_H, EVEN_M, EVEN_H)
        # every tile of the result in these rows has a flag of its own for this tile
        hand_over(hidden_flags + row * (TILES_N * TILES_H) + column, TILES_N, READERS, TILES_H)
    else:
        number = program - first_layer
        tiles = tiles_m * TILES_N
        part = number // tiles
        tile = number - part * tiles
        row = tile % tiles_m
        column = tile // tiles_m
        first_m = row * BLOCK_M
        first_n = column * BLOCK_N
        PART_TILES: tl.constexpr = (TILES_H + SPLIT_K - 1) // SPLIT_K
        first_tile = part * PART_TILES
        last_tile = tl.minimum(first_tile + PART_TILES, TILES_H)
        wait_for(
            hidden_flags + (row * TILES_N + column) * TILES_H + first_tile,
            last_tile - first_tile, FLAGS,
        )  # fmt: skip
        first_h = first_tile * BLOCK_H
        steps = tl.cdiv(tl.minimum(last_tile * BLOCK_H, H) - first_h, BLOCK_K)
        sums = tile_sums(
            hidden, w2, first_m, first_n, first_h, steps, M, H, stride_w2, N, H, W2_KN, BLOCK_M,
            BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K2, PRECISION,
        )  # fmt: skip
        if SPLIT_K > 1:
            slot = tile * (SPLIT_K - 1)
            if part < SPLIT_K - 1:
                give_part(sums, parts, part_flags, slot + part, BLOCK_M, BLOCK_N)
            else:
                wait_for_parts(part_flags, slot, SPLIT_K - 1)
                finish_tile(
                    sums, first_m, first_n, b2, residual, residual, out,
                    parts + slot.to(tl.int64) * (BLOCK_M * BLOCK_N), M, stride_residual,
                    stride_residual, N, BLOCK_M, BLOCK_N, PIECES, SPLIT_K - 1, BLOCK_N, EVEN_M,
                    EVEN_N, HAS_B2, HAS_RESIDUAL, False, "",
                )  # fmt: skip
        else:
            finish_tile(
                sums, first_m, first_n, b2, residual, residual, out, parts, M, stride_residual,
                stride_residual, N, BLOCK_M, BLOCK_N, PIECES, 0, BLOCK_N, EVEN_M, EVEN_N, HAS_B2,
                HAS_RESIDUAL, False, "",
            )  # fmt: skip
