"""What the Hopper attention kernel does with values in registers: mask scores, rescale results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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


@gluon.constexpr_function
def rescale_code(count):
    """PTX: ``count`` values of two rows times their factors, not in warps whose factors are 1."""
    lines = ["{", ".reg .pred %grew;", f"setp.neu.f32 %grew, ${2 * count}, 0f3F800000;"]
    lines += [f"@!%grew setp.neu.f32 %grew, ${2 * count + 2}, 0f3F800000;"]
    lines += ["vote.sync.any.pred %grew, %grew, 0xffffffff;", "@!%grew bra KEPT;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return "\n".join([*lines, "KEPT:", "}"])


@gluon.constexpr_function
def rescale_operands(count):
    """Constraints of ``rescale_code``."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(acc, alpha, BLOCK_D: gl.constexpr):
    """``acc`` times a factor of each row."""
    COUNT: gl.constexpr = BLOCK_D // 2
    factors = alpha[:, None].broadcast_to(acc.shape)
    return gl.inline_asm_elementwise(
        rescale_code(COUNT), rescale_operands(COUNT), [acc, factors], gl.float32, False, COUNT
    )
