"""Device code of what a GEMM kernel does with its sums before it stores them.

    y = activation(sums + bias) [* factor] [+ residual]

All in fp32, rounded once, at the store.
"""

import triton
import triton.language as tl

from .linear_handoff import add_parts

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid")

_LOG2E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def activate(v, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """An activation of fp32 values; DTYPE: what the result is rounded to afterwards.

    NaN stays NaN, infinities go where PyTorch's formulas send them.
    """
    if ACTIVATION == "gelu":
        v = _gelu(v, DTYPE)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2u
        u = _SQRT_2_PI * (v + 0.044715 * v * v * v)
        v = v * _sigmoid(2.0 * u)
    elif ACTIVATION == "relu":
        v = tl.where(v < 0.0, 0.0, v)  # a maximum would lose NaN
    elif ACTIVATION == "silu":
        v = v * _sigmoid(v)
    elif ACTIVATION == "tanh":
        v = _tanh(v)
    elif ACTIVATION == "sigmoid":
        v = _sigmoid(v)
    else:
        tl.static_assert(ACTIVATION == "", "unknown activation")
    return v


@triton.jit
def finish_tile(
    sums, first_m, first_n, bias, residual, factor, out, parts, M,
    stride_residual: tl.constexpr, stride_factor: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, PITCH: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_FACTOR: tl.constexpr,
    ACTIVATION: tl.constexpr, marks=None, mark=0, MARKS: tl.constexpr = False,
):  # fmt: skip
    """Finish and store a tile of sums, in 1, 2 or 4 pieces side by side.

    Pieces need fewer registers, and less shared memory on the way from the layout of the matrix
    units to that of wide stores, which leaves more of it to the load pipeline. PARTS: how many
    partial sums of the tile lie in memory besides, in tiles of PITCH columns from ``parts`` on.
    marks, mark, MARKS: of ``write_tile``.
    """
    tl.static_assert(PIECES == 1 or PIECES == 2 or PIECES == 4)
    if PIECES == 1:
        operands = load_operands(
            first_m, first_n, bias, residual, factor, M, stride_residual, stride_factor, N,
            BLOCK_M, BLOCK_N, EVEN_M, EVEN_N, HAS_BIAS, HAS_RESIDUAL, HAS_FACTOR,
        )  # fmt: skip
        if PARTS > 0:
            sums = add_parts(sums, parts, PARTS, BLOCK_M, BLOCK_N, PITCH)
        store_tile(
            sums, first_m, first_n, operands[0], operands[1], operands[2], out, M, N,
            BLOCK_M, BLOCK_N, EVEN_M, EVEN_N, HAS_BIAS, HAS_RESIDUAL, HAS_FACTOR, ACTIVATION,
            marks, mark, MARKS,
        )  # fmt: skip
    else:
        HALF_N: tl.constexpr = BLOCK_N // 2
        halves = tl.permute(tl.reshape(sums, (BLOCK_M, 2, HALF_N)), (0, 2, 1))
        left, right = tl.split(halves)
        finish_tile(
            left, first_m, first_n, bias, residual, factor, out, parts, M, stride_residual,
            stride_factor, N, BLOCK_M, HALF_N, PIECES // 2, PARTS, PITCH, EVEN_M, EVEN_N,
            HAS_BIAS, HAS_RESIDUAL, HAS_FACTOR, ACTIVATION, marks, mark, MARKS,
        )  # fmt: skip
        finish_tile(
            right, first_m, first_n + HALF_N, bias, residual, factor, out, parts + HALF_N, M,
            stride_residual, stride_factor, N, BLOCK_M, HALF_N, PIECES // 2, PARTS, PITCH, EVEN_M,
            EVEN_N, HAS_BIAS, HAS_RESIDUAL, HAS_FACTOR, ACTIVATION, marks, mark, MARKS,
        )  # fmt: skip


@triton.jit
def load_operands(
    first_m, first_n, bias, residual, factor, M,
    stride_residual: tl.constexpr, stride_factor: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    """What a tile is finished with: (bias [BLOCK_N], residual, factor [BLOCK_M, BLOCK_N] or 0)."""
    bias_row = 0.0
    residual_tile = 0.0
    factor_tile = 0.0
    if HAS_BIAS:
        bias_row = load_row(bias, first_n, N, BLOCK_N, EVEN_N)
    if HAS_RESIDUAL:
        residual_tile = _load_tile(
            residual, first_m, first_n, M, stride_residual, N, BLOCK_M, BLOCK_N, EVEN_M, EVEN_N
        )
    if HAS_FACTOR:
        factor_tile = _load_tile(
            factor, first_m, first_n, M, stride_factor, N, BLOCK_M, BLOCK_N, EVEN_M, EVEN_N
        )
    return bias_row, residual_tile, factor_tile


@triton.jit
def store_tile(
    sums, first_m, first_n, bias_row, residual_tile, factor_tile, out, M, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_FACTOR: tl.constexpr,
    ACTIVATION: tl.constexpr, marks=None, mark=0, MARKS: tl.constexpr = False,
):  # fmt: skip
    """Finish a tile with operands that are loaded already, and store it.

    marks, mark, MARKS: of ``write_tile``.
    """
    v = sums
    if HAS_BIAS:
        v += bias_row.to(tl.float32)[None, :]
    v = activate(v, ACTIVATION, out.dtype.element_ty)
    if HAS_FACTOR:
        v *= factor_tile.to(tl.float32)
    if HAS_RESIDUAL:
        v += residual_tile.to(tl.float32)
    write_tile(v, first_m, first_n, out, M, N, BLOCK_M, BLOCK_N, EVEN_M, EVEN_N, marks, mark, MARKS)


@triton.jit
def load_row(source, first_n, N: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr):
    """BLOCK_N elements of a vector [N] from ``first_n`` on, zeros past its end."""
    n = first_n + tl.arange(0, BLOCK_N)
    if EVEN_N:
        return tl.load(source + n)
    else:
        return tl.load(source + n, mask=n < N, other=0.0)


@triton.jit
def write_tile(
    values, first_m, first_n, out, M, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    marks=None, mark=0, MARKS: tl.constexpr = False,
):  # fmt: skip
    """Round a tile to the dtype of ``out`` [M, N] and store what lies inside.

    MARKS: set the word ``mark`` of ``marks`` where something stored is infinite: a comparison and a
    write that hardly ever happens for each element.
    """
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    corner = out + first_m.to(tl.int64) * N + first_n  # rows times columns may pass 2^31
    pointers = corner + (m_idx[:, None] * N + n_idx[None, :])
    rounded = values.to(out.dtype.element_ty)
    if EVEN_M and EVEN_N:
        tl.store(pointers, rounded)
        if MARKS:
            _mark_infinities(rounded, marks, mark, BLOCK_M, BLOCK_N)
    else:
        keep = _inside(first_m, first_n, M, N, BLOCK_M, BLOCK_N, EVEN_M, EVEN_N)
        tl.store(pointers, rounded, mask=keep)
        if MARKS:
            _mark_infinities(tl.where(keep, rounded, 0.0), marks, mark, BLOCK_M, BLOCK_N)


@triton.jit
def _mark_infinities(values, marks, mark, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    infinite = tl.abs(values.to(tl.float32)) == float("inf")
    word = (marks + mark) + tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    tl.atomic_or(word, 1, mask=infinite, sem="relaxed")


@triton.jit
def _load_tile(
    source, first_m, first_n, M, stride: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    corner = source + first_m.to(tl.int64) * stride + first_n
    pointers = corner + (m_idx[:, None] * stride + n_idx[None, :])
    if EVEN_M and EVEN_N:
        return tl.load(pointers)
    else:
        keep = _inside(first_m, first_n, M, N, BLOCK_M, BLOCK_N, EVEN_M, EVEN_N)
        return tl.load(pointers, mask=keep, other=0.0)


@triton.jit
def _inside(
    first_m, first_n, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Mask of the tile's elements that exist; an even dimension costs nothing."""
    m_idx = tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)
    if EVEN_N:
        return (m_idx[:, None] < M - first_m) & (n_idx[None, :] < BLOCK_N)
    elif EVEN_M:
        return (m_idx[:, None] < BLOCK_M) & (n_idx[None, :] < N - first_n)
    else:
        return (m_idx[:, None] < M - first_m) & (n_idx[None, :] < N - first_n)


@triton.jit
def _sigmoid(v):
    return 1.0 / (1.0 + tl.exp2(v * -_LOG2E))


@triton.jit
def _tanh(v):
    """tanh(v), relative error 2e-7: an odd polynomial near zero, the exponential beyond."""
    a = tl.abs(v)
    s = v * v
    p = s * -0.00610492 + 0.02100362
    p = p * s - 0.05385249
    p = p * s + 0.13332782
    p = p * s - 0.33333329
    near = v + v * (s * p)
    far = 1.0 - 2.0 / (tl.exp2(a * (2.0 * _LOG2E)) + 1.0)
    far = tl.where(v < 0.0, -far, far)
    return tl.where(a < 0.625, near, far)  # NaN is not below 0.625, and stays NaN in far


@triton.jit
def _gelu(v, DTYPE: tl.constexpr):
    """GELU; for half types by the formula of stof_compile/short_gelu.py.

    The tail of the normal distribution at a = |v| is 2 ** Q(a). erf takes more than twice the
    instructions, which would bound the kernel.
    """
    if DTYPE == tl.float16:  # noqa: SIM300  (a constexpr, no constant)
        a = tl.minimum(tl.abs(v), 13.0)
        w = tl.exp2(a * -0.9528983)
        q = a * -0.70441617 - 0.40767052
        q = q * a - 2.1252787
        return _from_tail(v, a, w * 1.1252787 + q)
    elif DTYPE == tl.bfloat16:  # noqa: SIM300  (a constexpr, no constant)
        a = tl.minimum(tl.abs(v), 16.0)
        w = tl.exp2(a * -1.0188546)
        q = a * 3.1196137e-5 - 1.6298482e-3
        q = q * a - 0.68464665
        q = q * a - 0.5108682
        q = q * a - 1.905911
        return _from_tail(v, a, w * 0.90591097 + q)
    else:
        return 0.5 * v * (1.0 + tl.math.erf(v * _SQRT_HALF))


@triton.jit
def _from_tail(v, a, q):
    """max(v, 0) - a * 2 ** q; the maximum by a sum that is NaN at -inf and NaN."""
    half = v * 0.5
    return (half + tl.abs(half)) - a * tl.exp2(q)
