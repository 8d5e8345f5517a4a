"""Device functions of the online softmax that the attention kernels share.

A score is kept in a unit of its own: a weight is exp2(mult * (score - maximum)), so the plain case
keeps raw dot products and folds scale * log2(e) into one multiply-add with the maximum.
"""

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Weights of a row are relative to its largest score, or with a lazy maximum to one that was and is
# smaller by at most this, in powers of two: they reach 256, and few tiles after the first rescale
# the result.
SLACK: tl.constexpr = tl.constexpr(8.0)


def rescale_code(count: int) -> str:
    """PTX: ``count`` values of two rows times their factors, not in warps whose factors are 1.

    In one line: what torch.compile copies of a kernel must have no backslash.
    """
    lines = ["{", ".reg .pred %grew;", f"setp.neu.f32 %grew, ${2 * count}, 0f3F800000;"]
    lines += [f"@!%grew setp.neu.f32 %grew, ${2 * count + 2}, 0f3F800000;"]
    lines += ["vote.sync.any.pred %grew, %grew, 0xffffffff;", "@!%grew bra KEPT;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return " ".join([*lines, "KEPT:", "}"])


def rescale_operands(count: int) -> str:
    """Constraints of ``rescale_code``."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


RESCALE_32: tl.constexpr = tl.constexpr(rescale_code(32))
RESCALE_32_OPERANDS: tl.constexpr = tl.constexpr(rescale_operands(32))
RESCALE_64: tl.constexpr = tl.constexpr(rescale_code(64))
RESCALE_64_OPERANDS: tl.constexpr = tl.constexpr(rescale_operands(64))


@triton.jit
def attention_scores(
    dots, scale, SOFTCAP: tl.constexpr, LINEAR: tl.constexpr
):  # fmt: skip
    """Dot products to scores: unchanged when ``mult`` carries the scale, else scaled and capped."""
    s = dots
    if not LINEAR:
        s = s * scale
        if SOFTCAP > 0:
            # cap * tanh(s / cap), with tanh(x) = 1 - 2 / (exp(2 x) + 1): right at both infinities
            s = SOFTCAP - (2.0 * SOFTCAP) / (tl.exp2(s * (2.0 * LOG2E / SOFTCAP)) + 1.0)
    return s


@triton.jit
def starting_maximum(ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Finite unless a bias can make every score of a row -inf or the lowest finite number."""
    return tl.full([ROWS], float("-inf") if HAS_BIAS else -1.0e30, tl.float32)


@triton.jit
def softmax_step(s, maximum, mult, HAS_BIAS: tl.constexpr, SHIFT: tl.constexpr = 0):
    """One step over a tile: (weights times 2 ** SHIFT, factor of the former sums, new maximum).

    ``mult`` is a constant, or a number of the head where operands have scales of their own.
    """
    new = tl.maximum(maximum, tl.max(s, 1))
    if HAS_BIAS:
        # subtract before multiplying (the lowest finite number times log2(e) overflows), and put 0
        # in place of a -inf maximum inside the exponent only
        used = tl.where(new == float("-inf"), 0.0, new)
        exponent = (s - used[:, None]) * mult
        if SHIFT != 0:
            exponent += SHIFT
        p = tl.exp2(exponent)
        alpha = tl.exp2((maximum - used) * mult)
    else:
        # explicit: newer Triton no longer contracts a multiply and an add by itself
        offset = new * -mult
        if SHIFT != 0:
            offset += SHIFT
        p = tl.exp2(tl.fma(s, mult, offset[:, None]))
        alpha = tl.exp2((maximum - new) * mult)
    return p, alpha, new


@triton.jit
def lazy_step(s, maximum, total, mult):
    """``softmax_step`` with a maximum that lags behind, and sums [rows, 8] of every eighth column:
    (weights, factor of the former sums, new maximum, new sums).
    """
    grown = tl.maximum(maximum, tl.max(s, 1))
    new = tl.where(grown - maximum > SLACK / mult, grown, maximum)
    offset = new * -mult
    p = tl.exp2(tl.fma(s, mult, offset[:, None]))
    alpha = tl.exp2((maximum - new) * mult)
    octets = tl.reshape(p, (s.shape[0], s.shape[1] // 8, 8))
    return p, alpha, new, tl.fma(total, alpha[:, None], tl.sum(octets, 1))


@triton.jit
def rescaled(acc, alpha):
    """``acc`` times a factor of each row; a thread holds 32 of its elements."""
    factors = tl.broadcast_to(alpha[:, None], acc.shape)
    return tl.inline_asm_elementwise(
        RESCALE_32, RESCALE_32_OPERANDS, [acc, factors], tl.float32, True, 32
    )


@triton.jit
def finish_softmax(maximum, total, mult):
    """(1 / sum or 0 on rows without keys, natural log-sum-exp or -inf)."""
    empty = total == 0.0
    filled = tl.where(empty, 1.0, total)
    log_sum = maximum * (mult * LN2) + tl.log(filled)
    return 1.0 / filled, tl.where(empty, float("-inf"), log_sum)
