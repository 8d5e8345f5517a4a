"""Device code of matrix products by tiles: which tile a program takes, and the sums over K."""

import triton
import triton.language as tl


@triton.jit
def tile_position(number, M, BLOCK_M: tl.constexpr, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and tile column of tile ``number``.

    GROUP_M rows of tiles are walked together, column by column, so that tiles worked on at the same
    time share operands in the L2 cache.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    group = number // (GROUP_M * TILES_N)
    first = group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = number - first * TILES_N
    return (first + within % rows) * BLOCK_M, within // rows


@triton.jit
def tile_sums(
    x, weight, first_m, first_n, first_k, steps, M,
    stride_x: tl.constexpr, stride_w: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WEIGHT_KN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 sums of a tile of x @ weight.T over ``steps`` blocks of K from ``first_k`` on.

    Rows past the end are read as the last row, so that a ragged M needs no mask; their sums are
    never stored. EVEN_K: no block passes the end of K.
    """
    k_idx = tl.arange(0, BLOCK_K)
    x_corner = x + first_m.to(tl.int64) * stride_x + first_k
    x_inside = row_offsets(first_m, M, stride_x, BLOCK_M, EVEN_M)[:, None] + k_idx[None, :]
    w_corner, w_inside = weight_tile(
        weight, first_n, first_k, stride_w, N, WEIGHT_KN, BLOCK_N, BLOCK_K, EVEN_N
    )
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps):
        left = K - first_k - step * BLOCK_K
        x_tile = load_x(x_corner + step * BLOCK_K + x_inside, left, BLOCK_K, EVEN_K)
        k_step = step * BLOCK_K
        w_tile = load_weight(
            w_corner + weight_step(k_step, stride_w, WEIGHT_KN) + w_inside, left, N - first_n,
            WEIGHT_KN, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K,
        )  # fmt: skip
        sums = tl.dot(x_tile, w_tile, sums, input_precision=PRECISION)
    return sums


@triton.jit
def row_offsets(first, count, stride: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Offsets of a tile's rows from its first one; rows past ``count`` repeat the last."""
    rows = tl.arange(0, BLOCK)
    if not EVEN:
        rows = tl.minimum(rows, count - 1 - first)
    return rows * stride


@triton.jit
def weight_tile(
    weight, first_n, first_k, stride_w: tl.constexpr, N: tl.constexpr, WEIGHT_KN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Address of a [BLOCK_K, BLOCK_N] tile of weight.T and offsets inside it.

    The weight is [N, K] with rows of ``stride_w`` elements, or [K, N] with WEIGHT_KN.
    """
    k_idx = tl.arange(0, BLOCK_K)
    n_idx = tl.arange(0, BLOCK_N)
    if WEIGHT_KN:
        corner = weight + first_k.to(tl.int64) * stride_w + first_n
        inside = k_idx[:, None] * stride_w + n_idx[None, :]
    else:
        corner = weight + first_n.to(tl.int64) * stride_w + first_k
        inside = row_offsets(first_n, N, stride_w, BLOCK_N, EVEN_N)[None, :] + k_idx[:, None]
    return corner, inside


@triton.jit
def weight_step(k_step, stride_w: tl.constexpr, WEIGHT_KN: tl.constexpr):
    """Elements from one place of the weight to that ``k_step`` further along K."""
    if WEIGHT_KN:
        return k_step.to(tl.int64) * stride_w
    else:
        return k_step


@triton.jit
def load_x(pointers, left, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of x [rows, BLOCK_K] with zeros beyond the ``left`` columns that remain."""
    if EVEN_K:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=tl.arange(0, BLOCK_K)[None, :] < left, other=0.0)


@triton.jit
def load_weight(
    pointers, left, columns, WEIGHT_KN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A tile of weight.T [BLOCK_K, BLOCK_N] with zeros beyond what remains of K.

    Columns need a mask only where they are the contiguous dimension: repeating the last one, as
    for rows, would break up wide loads.
    """
    k_inside = tl.arange(0, BLOCK_K)[:, None] < left
    n_inside = tl.arange(0, BLOCK_N)[None, :] < columns
    if EVEN_K and (EVEN_N or not WEIGHT_KN):
        return tl.load(pointers)
    elif EVEN_N or not WEIGHT_KN:
        return tl.load(pointers, mask=k_inside, other=0.0)
    elif EVEN_K:
        return tl.load(pointers, mask=n_inside, other=0.0)
    else:
        return tl.load(pointers, mask=k_inside & n_inside, other=0.0)


@triton.jit
def describe_x(
    x, M, stride_x: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Tensor descriptor of x [M, K], for the copy engine of Hopper and newer."""
    return tl.make_tensor_descriptor(x, [M, K], [stride_x, 1], [BLOCK_M, BLOCK_K])


@triton.jit
def describe_weight(
    weight, stride_w: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WEIGHT_KN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tensor descriptor of a weight [N, K], or [K, N] with WEIGHT_KN."""
    if WEIGHT_KN:
        return tl.make_tensor_descriptor(weight, [K, N], [stride_w, 1], [BLOCK_K, BLOCK_N])
    else:
        return tl.make_tensor_descriptor(weight, [N, K], [stride_w, 1], [BLOCK_N, BLOCK_K])


@triton.jit
def load_described(w_view, first_n, k, WEIGHT_KN: tl.constexpr):
    """A tile of weight.T [BLOCK_K, BLOCK_N] by its descriptor."""
    if WEIGHT_KN:
        return w_view.load([k, first_n])
    else:
        return w_view.load([first_n, k]).T


@triton.jit
def tile_sums_described(
    x_view, w_view, first_m, first_n, first_k, steps,
    WEIGHT_KN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``tile_sums`` with descriptors, which give zeros outside of the matrices."""
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps):
        k = first_k + step * BLOCK_K
        x_tile = x_view.load([first_m, k])
        w_tile = load_described(w_view, first_n, k, WEIGHT_KN)
        sums = tl.dot(x_tile, w_tile, sums, input_precision=PRECISION)
    return sums


@triton.jit
def described_or_plain_sums(
    x_view, w_view, first_m, first_n, first_k, steps, M,
    stride_x: tl.constexpr, stride_w: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WEIGHT_KN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``tile_sums_described`` with TMA, where the views are descriptors, else ``tile_sums``."""
    if TMA:
        return tile_sums_described(
            x_view, w_view, first_m, first_n, first_k, steps, WEIGHT_KN, BLOCK_M, BLOCK_N, BLOCK_K,
            PRECISION,
        )  # fmt: skip
    else:
        return tile_sums(
            x_view, w_view, first_m, first_n, first_k, steps, M, stride_x, stride_w, N, K,
            WEIGHT_KN, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
