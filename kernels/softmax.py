"""Device functions of the online softmax that the portable attention kernels share.

A score is kept in a unit of its own: a weight is exp2(mult * (score - maximum)), so the plain case
keeps raw dot products and folds scale * log2(e) into one multiply-add with the maximum.
"""

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


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
def finish_softmax(maximum, total, mult):
    """(1 / sum or 0 on rows without keys, natural log-sum-exp or -inf)."""
    empty = total == 0.0
    filled = tl.where(empty, 1.0, total)
    log_sum = maximum * (mult * LN2) + tl.log(filled)
    return 1.0 / filled, tl.where(empty, float("-inf"), log_sum)
