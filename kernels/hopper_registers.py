"""What Hopper attention kernels do with values in registers: mask scores, rescale results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_weights import (
    CLEAR,
    CLEAR_OPERANDS,
    KEEP,
    KEEP_OPERANDS,
    KEEP_SHORT,
    KEEP_SHORT_OPERANDS,
    SHORT_BF16,
    SHORT_F16,
    SHORT_OPERANDS,
    WEIGHTS_BF16,
    WEIGHTS_F16,
    WEIGHTS_OPERANDS,
    WIDE_BF16,
    WIDE_F16,
    WIDE_OPERANDS,
)
from .softmax import RESCALE_32, RESCALE_32_OPERANDS, RESCALE_64, RESCALE_64_OPERANDS

ROWS: gl.constexpr = gl.constexpr(64)  # query rows and keys of what is masked and weighed at once
SHORT: gl.constexpr = gl.constexpr(32)  # keys of a short tile


@gluon.constexpr_function
def fragment_layout():
    """Where the consumer's threads hold a 64 x 64 tile of scores, as six factors of row and column:
    [warp, half of its 16 rows, lane row, column octet, lane pair, column of the pair]."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0],
            [0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0], [0, 0, 0, 4, 0, 0],
        ],
        lane_bases=[
            [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0],
            [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 4, 0, 0, 0],
        ],
        warp_bases=[[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]],
        block_bases=[],
        shape=[4, 2, 8, 8, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def without(layout, dims):
    """The layout with some of its dimensions left out."""
    for dim in sorted(dims, reverse=True):
        layout = gl.SliceLayout(dim, layout)
    return layout


@gluon.constexpr_function
def keep_code(keys):
    """``hopper_weights.keep_code`` of a tile of 64 keys or a short one."""
    return (KEEP_SHORT if keys < ROWS.value else KEEP).value


@gluon.constexpr_function
def keep_operands(keys):
    """``hopper_weights.keep_operands``."""
    return (KEEP_SHORT_OPERANDS if keys < ROWS.value else KEEP_OPERANDS).value


@gluon.jit
def kept_scores(s, words):
    """Scores [64, 64] or [64, 32], -inf where mask words [4, 8, 4], one per thread, have no bit for
    them: of the fewer columns the first four octets of each word."""
    KEYS: gl.constexpr = s.shape[1]
    code: gl.constexpr = keep_code(KEYS)
    operands: gl.constexpr = keep_operands(KEYS)
    words = words[:, None, :, :][:, :, :, None, :][:, :, :, :, :, None]
    words = gl.reshape(words.broadcast_to([4, 2, 8, KEYS // 8, 4, 2]), [ROWS, KEYS])
    words = gl.convert_layout(words, s.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(code, operands, [s, words], gl.float32, False, KEYS // 2)


@gluon.jit
def cleared(x):
    """Zeros in place of x, that a compiler does not set once more where a loop begins."""
    return gl.inline_asm_elementwise(CLEAR, CLEAR_OPERANDS, [x], gl.float32, False, 32)


@gluon.jit
def reciprocal(x):
    """1 / x, within a unit in the last place: of sums of weights, a half or more, or NaN."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def rescaled(acc, alpha, BLOCK_D: gl.constexpr):
    """``acc`` times a factor of each row, [64, 4]; ``softmax.py`` says how."""
    layout: gl.constexpr = acc.type.layout
    factors = spread(alpha, BLOCK_D, layout)
    if BLOCK_D == 64:
        result = gl.inline_asm_elementwise(
            RESCALE_32, RESCALE_32_OPERANDS, [acc, factors], gl.float32, False, 32
        )
    else:
        result = gl.inline_asm_elementwise(
            RESCALE_64, RESCALE_64_OPERANDS, [acc, factors], gl.float32, False, 64
        )
    return result


@gluon.constexpr_function
def weights_code(mult, dtype, scaled, keys=64):
    """``hopper_weights.weights_code`` with the factor of the scores; of a short tile without
    results."""
    code = (WEIGHTS_BF16 if dtype == gl.bfloat16 else WEIGHTS_F16).value[scaled]
    if keys < ROWS.value:
        code = (SHORT_BF16 if dtype == gl.bfloat16 else SHORT_F16).value
    return f"{{ .reg .f32 %m; mov.f32 %m, {mult:.17e}; {code} }}"


@gluon.constexpr_function
def weights_operands(scaled, keys=64):
    """``hopper_weights.weights_operands``."""
    return SHORT_OPERANDS.value if keys < ROWS.value else WEIGHTS_OPERANDS.value[scaled]


@gluon.constexpr_function
def wide_weights_code(mult, dtype):
    """``hopper_weights.wide_weights_code`` with the factor of the scores."""
    code = WIDE_BF16.value if dtype == gl.bfloat16 else WIDE_F16.value
    return f"{{ .reg .f32 %m; mov.f32 %m, {mult:.17e}; {code} }}"


@gluon.constexpr_function
def octet_layout(octets):
    """Where the consumer's threads hold 64 rows of scores or results, as [row, octet, lane pair,
    column of the pair]."""
    bits = [1 << i for i in range(octets.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *([0, bit, 0, 0] for bit in bits)],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[ROWS, octets, 4, 2],
    )


@gluon.jit
def spread(own, WIDTH: gl.constexpr, layout: gl.constexpr):
    """What each thread has of its rows, [64, 4], beside every element it holds, [64, WIDTH]."""
    whole: gl.constexpr = octet_layout(WIDTH // 8)
    own = gl.convert_layout(own, without(whole, [1, 3]), assert_trivial=True)
    wide = own[:, None, :][:, :, :, None].broadcast_to([ROWS, WIDTH // 8, 4, 2])
    return gl.convert_layout(gl.reshape(wide, [ROWS, WIDTH]), layout, assert_trivial=True)


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def _last(a, b):
    return b


@gluon.jit
def _told(told, rows: gl.constexpr):
    """(offset, sums, factor of the former result), [64, 4], of what ``weights_code`` tells."""
    sums, offsets = gl.split(gl.reshape(told, [ROWS, told.shape[1] // 8, 4, 2]))
    alpha = gl.convert_layout(gl.reduce(sums, 1, _last), rows, assert_trivial=True)
    total = gl.convert_layout(gl.reduce(sums, 1, _first), rows, assert_trivial=True)
    offset = gl.convert_layout(gl.reduce(offsets, 1, _first), rows, assert_trivial=True)
    return offset, total, alpha


@gluon.jit
def weighed(s, offset, total, MULT: gl.constexpr, dtype: gl.constexpr):
    """(weights, offset, sums, factor of the former result) of a tile of scores.

    Scores are [64, 64] or [64, 32]; offset, sums and factor are [64, 4], a thread's own.
    """
    KEYS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    code: gl.constexpr = weights_code(MULT, dtype, 0, KEYS)
    operands: gl.constexpr = weights_operands(0, KEYS)
    args = [s, spread(offset, KEYS, layout), spread(total, KEYS, layout)]
    if dtype == gl.bfloat16:
        p, told = gl.inline_asm_elementwise(
            code, operands, args, (gl.bfloat16, gl.float32), False, KEYS // 2
        )
    else:
        p, told = gl.inline_asm_elementwise(
            code, operands, args, (gl.float16, gl.float32), False, KEYS // 2
        )
    rows: gl.constexpr = offset.type.layout
    offset, total, alpha = _told(told, rows)
    return p, offset, total, alpha


@gluon.jit
def weighed_and_scaled(s, offset, total, acc, MULT: gl.constexpr, dtype: gl.constexpr):
    """The same and the former result [64, 64], scaled."""
    layout: gl.constexpr = s.type.layout
    code: gl.constexpr = weights_code(MULT, dtype, 1)
    operands: gl.constexpr = weights_operands(1)
    args = [s, spread(offset, ROWS, layout), spread(total, ROWS, layout), acc]
    if dtype == gl.bfloat16:
        p, acc, told = gl.inline_asm_elementwise(
            code, operands, args, (gl.bfloat16, gl.float32, gl.float32), False, 32
        )
    else:
        p, acc, told = gl.inline_asm_elementwise(
            code, operands, args, (gl.float16, gl.float32, gl.float32), False, 32
        )
    rows: gl.constexpr = offset.type.layout
    offset, total, alpha = _told(told, rows)
    return p, offset, total, alpha, acc


@gluon.jit
def weighed_and_both_scaled(
    s, offset, total, acc, acc_tail, MULT: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """The same with both halves [64, 64] of a result of 128 columns."""
    layout: gl.constexpr = s.type.layout
    code: gl.constexpr = weights_code(MULT, dtype, 2)
    operands: gl.constexpr = weights_operands(2)
    args = [s, spread(offset, ROWS, layout), spread(total, ROWS, layout), acc, acc_tail]
    if dtype == gl.bfloat16:
        p, acc, acc_tail, told = gl.inline_asm_elementwise(
            code, operands, args, (gl.bfloat16, gl.float32, gl.float32, gl.float32), False, 32
        )
    else:
        p, acc, acc_tail, told = gl.inline_asm_elementwise(
            code, operands, args, (gl.float16, gl.float32, gl.float32, gl.float32), False, 32
        )
    rows: gl.constexpr = offset.type.layout
    offset, total, _ = _told(told, rows)
    return p, offset, total, acc, acc_tail


@gluon.jit
def column_halves(s):
    """The left and the right 64 columns of scores [64, 128]."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left, right = s.reshape([ROWS, 2, ROWS]).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, half, assert_trivial=True)
    return left, gl.convert_layout(right, half, assert_trivial=True)


@gluon.jit
def weighed_and_wide_scaled(
    s, offset, total, acc, MULT: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """The same with a result [64, 128] that is one."""
    left, right = column_halves(acc)
    p, offset, total, left, right = weighed_and_both_scaled(
        s, offset, total, left, right, MULT, dtype
    )
    both = gl.reshape(gl.join(left, right).permute((0, 2, 1)), [ROWS, 2 * ROWS])
    return p, offset, total, gl.convert_layout(both, acc.type.layout, assert_trivial=True)


@gluon.jit
def weighed_halves(left, right, offset, total, MULT: gl.constexpr, dtype: gl.constexpr):
    """``weighed`` of 128 columns: (weights of both halves, offset, sums, factor of the former)."""
    layout: gl.constexpr = left.type.layout
    code: gl.constexpr = wide_weights_code(MULT, dtype)
    args = [left, right, spread(offset, ROWS, layout), spread(total, ROWS, layout)]
    if dtype == gl.bfloat16:
        p, r, told = gl.inline_asm_elementwise(
            code, WIDE_OPERANDS, args, (gl.bfloat16, gl.bfloat16, gl.float32), False, 32
        )
    else:
        p, r, told = gl.inline_asm_elementwise(
            code, WIDE_OPERANDS, args, (gl.float16, gl.float16, gl.float32), False, 32
        )
    rows: gl.constexpr = offset.type.layout
    offset, total, alpha = _told(told, rows)
    return p, r, offset, total, alpha
