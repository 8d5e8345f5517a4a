"""Device code of the gated linear layer; ``gated_linear.py`` says what it computes.

A program sums a tile of both products at once, from one tile of x.
"""

import triton
import triton.language as tl

from .linear_epilogue import activate, load_row, write_tile
from .linear_tiles import (
    describe_weight,
    describe_x,
    load_described,
    load_weight,
    load_x,
    row_offsets,
    tile_position,
    weight_step,
    weight_tile,
)
from .overlap_kernel import fetch_early, start_after_previous


@triton.jit
def gated_linear_kernel(
    x, gate, up, gate_bias, up_bias, out, M,
    stride_x: tl.constexpr, stride_gate: tl.constexpr, stride_up: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
    GATE_KN: tl.constexpr, UP_KN: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr, TMA: tl.constexpr, PIECES: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """A program per tile, or persistent programs that walk over the tiles."""
    fetch_early(PDL, gate, N, K, stride_gate, GATE_KN)
    fetch_early(PDL, up, N, K, stride_up, UP_KN)
    start_after_previous(PDL)
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    x_view, gate_view, up_view = x, gate, up
    if TMA:
        x_view = describe_x(x, M, stride_x, K, BLOCK_M, BLOCK_K)
        gate_view = describe_weight(gate, stride_gate, N, K, GATE_KN, BLOCK_N, BLOCK_K)
        up_view = describe_weight(up, stride_up, N, K, UP_KN, BLOCK_N, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * TILES_N
    program = tl.program_id(0)
    if PERSISTENT:
        for tile in tl.range(program, tiles, tl.num_programs(0), flatten=True):
            first_m, column = tile_position(tile, M, BLOCK_M, TILES_N, GROUP_M)
            first_n = column * BLOCK_N
            gate_sums, up_sums = _sums(
                x_view, gate_view, up_view, first_m, first_n, M, stride_x, stride_gate, stride_up,
                N, K, GATE_KN, UP_KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_M, EVEN_N, EVEN_K,
                PRECISION,
            )  # fmt: skip
            _finish(
                gate_sums, up_sums, first_m, first_n, gate_bias, up_bias, out, M, N, BLOCK_M,
                BLOCK_N, PIECES, EVEN_M, EVEN_N, HAS_GATE_BIAS, HAS_UP_BIAS, ACTIVATION,
            )  # fmt: skip
    else:
        first_m, column = tile_position(program, M, BLOCK_M, TILES_N, GROUP_M)
        first_n = column * BLOCK_N
        gate_sums, up_sums = _sums(
            x_view, gate_view, up_view, first_m, first_n, M, stride_x, stride_gate, stride_up,
            N, K, GATE_KN, UP_KN, BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_M, EVEN_N, EVEN_K,
            PRECISION,
        )  # fmt: skip
        _finish(
            gate_sums, up_sums, first_m, first_n, gate_bias, up_bias, out, M, N, BLOCK_M,
            BLOCK_N, PIECES, EVEN_M, EVEN_N, HAS_GATE_BIAS, HAS_UP_BIAS, ACTIVATION,
        )  # fmt: skip


@triton.jit
def _sums(
    x_view, gate_view, up_view, first_m, first_n, M,
    stride_x: tl.constexpr, stride_gate: tl.constexpr, stride_up: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, GATE_KN: tl.constexpr, UP_KN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    gate_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if TMA:
        for step in range(STEPS):
            k = step * BLOCK_K
            x_tile = x_view.load([first_m, k])
            gate_tile = load_described(gate_view, first_n, k, GATE_KN)
            up_tile = load_described(up_view, first_n, k, UP_KN)
            gate_sums = tl.dot(x_tile, gate_tile, gate_sums, input_precision=PRECISION)
            up_sums = tl.dot(x_tile, up_tile, up_sums, input_precision=PRECISION)
    else:
        k_idx = tl.arange(0, BLOCK_K)
        x_corner = x_view + first_m.to(tl.int64) * stride_x
        x_inside = row_offsets(first_m, M, stride_x, BLOCK_M, EVEN_M)[:, None] + k_idx[None, :]
        gate_corner, gate_inside = weight_tile(
            gate_view, first_n, first_n * 0, stride_gate, N, GATE_KN, BLOCK_N, BLOCK_K, EVEN_N
        )
        up_corner, up_inside = weight_tile(
            up_view, first_n, first_n * 0, stride_up, N, UP_KN, BLOCK_N, BLOCK_K, EVEN_N
        )
        for step in range(STEPS):
            k = step * BLOCK_K
            left = K - k
            x_tile = load_x(x_corner + k + x_inside, left, BLOCK_K, EVEN_K)
            gate_tile = load_weight(
                gate_corner + weight_step(k, stride_gate, GATE_KN) + gate_inside, left,
                N - first_n, GATE_KN, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K,
            )  # fmt: skip
            up_tile = load_weight(
                up_corner + weight_step(k, stride_up, UP_KN) + up_inside, left,
                N - first_n, UP_KN, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K,
            )  # fmt: skip
            gate_sums = tl.dot(x_tile, gate_tile, gate_sums, input_precision=PRECISION)
            up_sums = tl.dot(x_tile, up_tile, up_sums, input_precision=PRECISION)
    return gate_sums, up_sums


@triton.jit
def _finish(
    gate_sums, up_sums, first_m, first_n, gate_bias, up_bias, out, M, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Join and store a tile in pieces side by side, as ``finish_tile`` of linear_epilogue does."""
    HALF_N: tl.constexpr = BLOCK_N // 2
    if PIECES > 1:
        gate_left, gate_right = tl.split(
            tl.permute(tl.reshape(gate_sums, (BLOCK_M, 2, HALF_N)), (0, 2, 1))
        )
        up_left, up_right = tl.split(
            tl.permute(tl.reshape(up_sums, (BLOCK_M, 2, HALF_N)), (0, 2, 1))
        )
        _finish(
            gate_left, up_left, first_m, first_n, gate_bias, up_bias, out, M, N, BLOCK_M, HALF_N,
            PIECES // 2, EVEN_M, EVEN_N, HAS_GATE_BIAS, HAS_UP_BIAS, ACTIVATION,
        )  # fmt: skip
        _finish(
            gate_right, up_right, first_m, first_n + HALF_N, gate_bias, up_bias, out, M, N,
            BLOCK_M, HALF_N, PIECES // 2, EVEN_M, EVEN_N, HAS_GATE_BIAS, HAS_UP_BIAS, ACTIVATION,
        )  # fmt: skip
    else:
        if HAS_GATE_BIAS:
            gate_sums += load_row(gate_bias, first_n, N, BLOCK_N, EVEN_N).to(tl.float32)[None, :]
        if HAS_UP_BIAS:
            up_sums += load_row(up_bias, first_n, N, BLOCK_N, EVEN_N).to(tl.float32)[None, :]
        joined = activate(gate_sums, ACTIVATION, out.dtype.element_ty) * up_sums
        write_tile(joined, first_m, first_n, out, M, N, BLOCK_M, BLOCK_N, EVEN_M, EVEN_N)
