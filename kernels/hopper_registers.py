"""What the Hopper attention kernel does with values in registers: mask scores, rescale results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .softmax import RESCALE_32, RESCALE_32_OPERANDS, RESCALE_64, RESCALE_64_OPERANDS

ROWS: gl.constexpr = gl.constexpr(64)  # query rows of a unit and keys of a tile


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


@gluon.jit
def kept_scores(words, scores: gl.constexpr):
    """Boolean [64, 64] in the layout ``scores`` from mask words [4, 8, 4], one per thread."""
    whole: gl.constexpr = fragment_layout()
    half = gl.arange(0, 2, layout=without(whole, [0, 2, 3, 4, 5]))
    octet = gl.arange(0, 8, layout=without(whole, [0, 1, 2, 4, 5]))
    column = gl.arange(0, 2, layout=without(whole, [0, 1, 2, 3, 4]))
    bit = (
        half[None, :, None, None, None, None] * 16
        + octet[None, None, None, :, None, None] * 2
        + column[None, None, None, None, None, :]
    )
    word = words[:, None, :, :][:, :, :, None, :][:, :, :, :, :, None]
    kept = gl.reshape((word >> bit) & 1, [ROWS, ROWS])
    return gl.convert_layout(kept, scores, assert_trivial=True) != 0


@gluon.jit
def rescaled(acc, alpha, BLOCK_D: gl.constexpr):
    """``acc`` times a factor of each row; ``softmax.py`` says how."""
    factors = alpha[:, None].broadcast_to(acc.shape)
    if BLOCK_D == 64:
        result = gl.inline_asm_elementwise(
            RESCALE_32, RESCALE_32_OPERANDS, [acc, factors], gl.float32, False, 32
        )
    else:
        result = gl.inline_asm_elementwise(
            RESCALE_64, RESCALE_64_OPERANDS, [acc, factors], gl.float32, False, 64
        )
    return result
