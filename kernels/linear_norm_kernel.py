"""Device code of a matrix product whose rows are normalised: partial sums, or whole rows."""

import triton
import triton.language as tl

from .norm_kernel import load_tile
from .overlap_kernel import fetch_early, start_after_previous


@triton.jit
def _input_tile(x_at, k_idx, k_left, EVEN_K: tl.constexpr):
    """A tile [M, K] of x, 0 beyond the last k."""
    return tl.load(x_at) if EVEN_K else tl.load(x_at, mask=(k_idx < k_left)[None, :], other=0.0)


@triton.jit
def _weight_tile(
    w_at, k_idx, n_idx, k_left, n_left, EVEN_K: tl.constexpr, MASK_N: tl.constexpr
):  # fmt: skip
    """A tile [K, N] of the weight, with as few masks as the sizes need."""
    if MASK_N:
        valid = (k_idx < k_left)[:, None] & (n_idx < n_left)[None, :]
        tile = tl.load(w_at, mask=valid, other=0.0)
    elif EVEN_K:
        tile = tl.load(w_at)
    else:
        tile = tl.load(w_at, mask=(k_idx < k_left)[:, None], other=0.0)
    return tile


@triton.jit
def linear_partials_kernel(
    x, weight, partials, rows,
    STRIDE_X: tl.constexpr, STRIDE_WN: tl.constexpr, STRIDE_WK: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, TILES_N: tl.constexpr, STEPS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One tile of ``x @ weight.T`` over STEPS * BLOCK_K of K: plane ``split`` of partials.

    x [rows, K], weight [N, K], partials [splits, rows, N]; column tiles are the fastest axis of the
    grid, so that neighbours share rows of x while the weight stays in L2. EVEN_K promises that
    all splits are whole.
    """
    fetch_early(PDL, weight, N, K, STRIDE_WN if STRIDE_WK == 1 else STRIDE_WK, STRIDE_WK != 1)
    start_after_previous(PDL)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    first_n = (pid % TILES_N) * BLOCK_N
    rest = pid // TILES_N
    first_m = (rest % tiles_m) * BLOCK_M
    split = rest // tiles_m
    first_k = split * (STEPS * BLOCK_K)

    # rows beyond the end are read as the last one and not stored: loads need no mask
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    k_idx = tl.arange(0, BLOCK_K)
    m_read = m_idx if EVEN_M else tl.minimum(m_idx, rows - 1 - first_m)
    n_read = n_idx if EVEN_N or STRIDE_WN == 1 else tl.minimum(n_idx, N - 1 - first_n)
    x_at = x + (first_m.to(tl.int64) * STRIDE_X + first_k)
    x_at = x_at + (m_read[:, None] * STRIDE_X + k_idx[None, :])
    w_at = weight + (first_n.to(tl.int64) * STRIDE_WN + first_k.to(tl.int64) * STRIDE_WK)
    w_at = w_at + (k_idx[:, None] * STRIDE_WK + n_read[None, :] * STRIDE_WN)
    # a weight with unit stride along N would lose its wide loads to the minimum: it has a mask
    MASK_N: tl.constexpr = not EVEN_N and STRIDE_WN == 1

    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(STEPS):
        k_left = K - first_k - step * BLOCK_K
        x_tile = _input_tile(x_at, k_idx, k_left, EVEN_K)
        w_tile = _weight_tile(w_at, k_idx, n_idx, k_left, N - first_n, EVEN_K, MASK_N)
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
        x_at += BLOCK_K
        w_at += BLOCK_K * STRIDE_WK

    plane = split.to(tl.int64) * rows + first_m
    out_at = partials + (plane * N + first_n) + (m_idx[:, None] * N + n_idx[None, :])
    result = acc.to(partials.dtype.element_ty)
    if EVEN_M and EVEN_N:
        tl.store(out_at, result)
    else:
        valid = (m_idx < rows - first_m)[:, None] & (n_idx < N - first_n)[None, :]
        tl.store(out_at, result, mask=valid)


@triton.jit
def _add_columns(
    acc, bias, residual_row, m_idx, n_idx, m_valid,
    STRIDE_R: tl.constexpr, N: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """A tile of whole columns with bias and residual, 0 beyond the last column."""
    n_valid = n_idx < N
    if HAS_BIAS:
        acc += load_tile(bias + n_idx, n_valid, not EVEN_N)[None, :]
    if HAS_RESIDUAL:
        at = residual_row + (m_idx[:, None] * STRIDE_R + n_idx[None, :])
        valid = m_valid[:, None] & n_valid[None, :]
        acc += load_tile(at, valid, not (EVEN_M and EVEN_N))
    return _inside(acc, n_valid, EVEN_N)


@triton.jit
def _inside(tile, n_valid, EVEN_N: tl.constexpr):
    """The tile, 0 beyond the last column."""
    return tile if EVEN_N else tl.where(n_valid[None, :], tile, 0.0)


@triton.jit
def _store_columns(
    y, norm_weight, norm_bias, out_row, m_idx, n_idx, m_valid,
    N: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
):  # fmt: skip
    """Write a normalised tile with the norm's weight and offset."""
    n_valid = n_idx < N
    if HAS_WEIGHT:
        y = y * load_tile(norm_weight + n_idx, n_valid, not EVEN_N)[None, :]
    if HAS_NORM_BIAS:
        y = y + load_tile(norm_bias + n_idx, n_valid, not EVEN_N)[None, :]
    at = out_row + (m_idx[:, None] * N + n_idx[None, :])
    result = y.to(out_row.dtype.element_ty)
    if EVEN_M and EVEN_N:
        tl.store(at, result)
    else:
        tl.store(at, result, mask=m_valid[:, None] & n_valid[None, :])


@triton.jit
def linear_norm_rows_kernel(
    x, weight, bias, residual, norm_weight, norm_bias, out, rows,
    STRIDE_X: tl.constexpr, STRIDE_WN: tl.constexpr, STRIDE_WK: tl.constexpr,
    STRIDE_R: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    EPS: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, LEFT_N: tl.constexpr, RIGHT_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """BLOCK_M whole rows of ``norm(x @ weight.T + bias + residual)`` a program.

    A row is a left tile of LEFT_N <= N columns, all of them real, beside a right one of RIGHT_N, or
    0 where N is a power of two: 768 columns are 512 and 256, not 1,024.
    """
    fetch_early(PDL, weight, N, K, STRIDE_WN if STRIDE_WK == 1 else STRIDE_WK, STRIDE_WK != 1)
    start_after_previous(PDL)
    EVEN_N: tl.constexpr = LEFT_N + RIGHT_N == N
    MASK_N: tl.constexpr = not EVEN_N and STRIDE_WN == 1
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    m_idx = tl.arange(0, BLOCK_M)
    k_idx = tl.arange(0, BLOCK_K)
    left_n = tl.arange(0, LEFT_N)
    left = (rows - first).to(tl.int32)
    m_valid = m_idx < left
    m_read = m_idx if EVEN_M else tl.minimum(m_idx, left - 1)

    # -- product ----
    x_at = x + first * STRIDE_X + (m_read[:, None] * STRIDE_X + k_idx[None, :])
    w_left = weight + (k_idx[:, None] * STRIDE_WK + left_n[None, :] * STRIDE_WN)
    acc = tl.zeros([BLOCK_M, LEFT_N], dtype=tl.float32)
    if RIGHT_N:
        right_n = LEFT_N + tl.arange(0, RIGHT_N)
        right_read = right_n if EVEN_N or STRIDE_WN == 1 else tl.minimum(right_n, N - 1)
        w_right = weight + (k_idx[:, None] * STRIDE_WK + right_read[None, :] * STRIDE_WN)
        acc_right = tl.zeros([BLOCK_M, RIGHT_N], dtype=tl.float32)
    for first_k in range(0, K, BLOCK_K):
        k_left = K - first_k
        x_tile = _input_tile(x_at, k_idx, k_left, EVEN_K)
        w_tile = _weight_tile(w_left, k_idx, left_n, k_left, N, EVEN_K, False)
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
        w_left += BLOCK_K * STRIDE_WK
        if RIGHT_N:
            w_tile = _weight_tile(w_right, k_idx, right_n, k_left, N, EVEN_K, MASK_N)
            acc_right = tl.dot(x_tile, w_tile, acc_right, input_precision=PRECISION)
            w_right += BLOCK_K * STRIDE_WK
        x_at += BLOCK_K

    # -- bias, residual, statistics ----
    r_row = residual + first * STRIDE_R
    acc = _add_columns(
        acc, bias, r_row, m_idx, left_n, m_valid, STRIDE_R, N, EVEN_M, True, HAS_BIAS, HAS_RESIDUAL
    )
    if RIGHT_N:
        acc_right = _add_columns(
            acc_right, bias, r_row, m_idx, right_n, m_valid, STRIDE_R, N, EVEN_M, EVEN_N, HAS_BIAS,
            HAS_RESIDUAL,
        )  # fmt: skip
    if not RMS:
        total = tl.sum(acc, 1)
        if RIGHT_N:
            total += tl.sum(acc_right, 1)
        mean = total / N
        acc = acc - mean[:, None]
        if RIGHT_N:
            acc_right = _inside(acc_right - mean[:, None], right_n < N, EVEN_N)
    square = tl.sum(acc * acc, 1)
    if RIGHT_N:
        square += tl.sum(acc_right * acc_right, 1)
    rstd = tl.rsqrt(square / N + EPS)

    # -- result ----
    out_row = out + first * N
    _store_columns(
        acc * rstd[:, None], norm_weight, norm_bias, out_row, m_idx, left_n, m_valid, N, EVEN_M,
        True, HAS_WEIGHT, HAS_NORM_BIAS,
    )  # fmt: skip
    if RIGHT_N:
        _store_columns(
            acc_right * rstd[:, None], norm_weight, norm_bias, out_row, m_idx, right_n, m_valid, N,
            EVEN_M, EVEN_N, HAS_WEIGHT, HAS_NORM_BIAS,
        )  # fmt: skip
