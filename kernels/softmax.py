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
LIMIT_CODE = "0f43800000"  # 2 ** SLACK
# The offset of a row that has had no key: all weights are inf with it, or 0 where a key is masked.
NO_OFFSET: tl.constexpr = tl.constexpr(1.0e30)
NO_OFFSET_CODE = "0f7149F2CA"


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


def weights_code(narrow: str, scaled: bool) -> str:
    """PTX: weights of 32 scores of two rows, which have an offset and a sum of former weights each.

    A weight is exp2(score * %m + offset), a row's offset -1 times a whole number near its largest
    score. Weights are taken before it is known whether the offset still suits, which their sums
    tell: a row that outgrew it has a sum over 2 ** SLACK. Only a warp with such a row, or with one
    that has no offset yet, looks for the largest scores, scales what was and takes the weights
    again. Half of the columns at a time, so that the registers of a half's scores are free then.

    Registers: 16 of packed weights, with ``scaled`` 32 results of the same rows, 32 of what is
    told; 32 scores, 32 offsets, 32 sums (results are their own operands). Told are, in the first
    octet of a row, its sum and its offset, and in the others the factor of what was before.
    """
    acc = 16
    told = acc + 32 * scaled
    score, offset, total = told + 32, told + 64, told + 96
    code = [".reg .pred %grew;", ".reg .f32 %x, %y, %n0, %n1, %s0, %s1, %u0, %u1, %a0, %a1;"]
    for row in (0, 1):
        code.append(f"mov.f32 %n{row}, ${offset + 2 * row};")
        code.append(f"mov.f32 %s{row}, ${total + 2 * row};")
        code.append(f"mov.f32 %a{row}, 0f3F800000;")
    code.append(f"setp.eq.f32 %grew, %n0, {NO_OFFSET_CODE};")
    code.append(f"@!%grew setp.eq.f32 %grew, %n1, {NO_OFFSET_CODE};")
    code.append("vote.sync.any.pred %grew, %grew, 0xffffffff;")
    code.append("@%grew bra GROWN0;")
    for half in (0, 1):
        places = range(16 * half, 16 * half + 16)
        weights = []
        for i in places[::2]:
            row = i // 2 % 2
            for name, at in (("%x", i), ("%y", i + 1)):
                weights.append(f"fma.rn.f32 {name}, ${score + at}, %m, %n{row};")
                weights.append(f"ex2.approx.ftz.f32 {name}, {name};")
            weights.append(f"cvt.rn.{narrow}.f32 ${i // 2}, %y, %x;")
            if i < places[4]:
                weights.append(f"add.f32 %u{row}, %x, %y;")
            else:
                weights.append("add.f32 %x, %x, %y;")
                weights.append(f"add.f32 %u{row}, %u{row}, %x;")
        code += weights
        code.append(f"setp.gt.f32 %grew, %u0, {LIMIT_CODE};")
        code.append(f"@!%grew setp.gt.f32 %grew, %u1, {LIMIT_CODE};")
        code.append("vote.sync.any.pred %grew, %grew, 0xffffffff;")
        code.append(f"@!%grew bra KNOWN{half};")
        code.append(f"GROWN{half}:")
        for row in (0, 1):
            own = [score + i for i in places if i // 2 % 2 == row]
            code.append(f"max.f32 %u{row}, ${own[0]}, ${own[1]};")
            code += [f"max.f32 %u{row}, %u{row}, ${i};" for i in own[2:]]
        for lane in (1, 2):
            for row in (0, 1):
                code.append(f"shfl.sync.bfly.b32 %x, %u{row}, {lane}, 31, 0xffffffff;")
                code.append(f"max.f32 %u{row}, %u{row}, %x;")
        for row in (0, 1):
            code.append(f"neg.f32 %u{row}, %u{row};")
            code.append(f"mul.f32 %u{row}, %u{row}, %m;")
            code.append(f"cvt.rmi.f32.f32 %u{row}, %u{row};")
            code.append(f"min.f32 %u{row}, %u{row}, %n{row};")
            code.append(f"sub.f32 %y, %u{row}, %n{row};")
            code.append(f"mov.f32 %n{row}, %u{row};")
            code.append(f"ex2.approx.ftz.f32 %u{row}, %y;")  # a power of two, of the packed as well
            code.append(f"mul.f32 %s{row}, %s{row}, %u{row};")
            code.append(f"mul.f32 %a{row}, %a{row}, %u{row};")
        if half:
            code.append(".reg .b32 %g0, %g1;")
            for row in (0, 1):
                code.append(f"cvt.rn.{narrow}.f32 %g{row}, %u{row}, %u{row};")
            code += [f"mul.{narrow} ${i}, ${i}, %g{i % 2};" for i in range(8)]
        if scaled:
            code += [f"mul.f32 ${acc + i}, ${acc + i}, %u{i // 2 % 2};" for i in range(32)]
        code += weights
        code.append(f"KNOWN{half}:")
        code += [f"add.f32 %s{row}, %s{row}, %u{row};" for row in (0, 1)]
    for i in range(32):
        name = "a" if i > 3 else "sn"[i % 2]
        code.append(f"mov.f32 ${told + i}, %{name}{i // 2 % 2};")
    return " ".join(code)


def weights_operands(scaled: bool) -> str:
    """Constraints of ``weights_code``."""
    results = [str(16 + i) for i in range(32)] if scaled else []
    return ",".join(["=&r"] * 16 + ["=&f"] * (64 if scaled else 32) + ["f"] * 96 + results)


def keep_code() -> str:
    """PTX: 32 scores of two rows, -inf where a bit of a word is 0, in the order of the bits: ptxas
    then moves seven bits at a time into predicates."""
    places = [bit % 16 // 2 * 4 + bit // 16 * 2 + bit % 2 for bit in range(32)]
    code = ["{", ".reg .b32 %bit;", ".reg .pred %kept;"]
    for bit, at in enumerate(places):
        code.append(f"and.b32 %bit, $64, {1 << bit};")
        code.append("setp.ne.u32 %kept, %bit, 0;")
        code.append(f"selp.f32 ${at}, ${at}, 0fFF800000, %kept;")
    return " ".join([*code, "}"])


KEEP: tl.constexpr = tl.constexpr(keep_code())
KEEP_OPERANDS: tl.constexpr = tl.constexpr(
    ",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["r"] * 32)
)
WEIGHTS_F16: tl.constexpr = tl.constexpr(weights_code("f16x2", False))
WEIGHTS_BF16: tl.constexpr = tl.constexpr(weights_code("bf16x2", False))
WEIGHTS_OPERANDS: tl.constexpr = tl.constexpr(weights_operands(False))
SCALED_F16: tl.constexpr = tl.constexpr(weights_code("f16x2", True))
SCALED_BF16: tl.constexpr = tl.constexpr(weights_code("bf16x2", True))
SCALED_OPERANDS: tl.constexpr = tl.constexpr(weights_operands(True))


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
