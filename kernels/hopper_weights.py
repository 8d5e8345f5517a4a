"""Assembly of the Hopper attention kernel: masks of scores in registers, and its online softmax.

A file of its own, so that kernels which share ``softmax.py`` need not be compiled anew with it.
"""

import triton.language as tl

LIMIT_CODE = "0f43800000"  # 2 ** SLACK
# The offset of a row that has had no key: all weights are inf with it, or 0 where a key is masked.
NO_OFFSET: tl.constexpr = tl.constexpr(1.0e30)
NO_OFFSET_CODE = "0f7149F2CA"


def _any_row(test: str, name: str, limit: str) -> list[str]:
    """%grew: whether a warp has a row whose %name passes the test."""
    return [
        f"setp.{test}.f32 %grew, %{name}0, {limit};",
        f"setp.{test}.or.f32 %grew, %{name}1, {limit}, %grew;",
        "vote.sync.any.pred %grew, %grew, 0xffffffff;",
    ]


def _former(offset: int, total: int) -> list[str]:
    """What there is of two rows: %n offsets, %s sums, %a factors; %grew: one has no offset yet."""
    code = []
    for row in (0, 1):
        code.append(f"mov.f32 %n{row}, ${offset + 2 * row};")
        code.append(f"mov.f32 %s{row}, ${total + 2 * row};")
        code.append(f"mov.f32 %a{row}, 0f3F800000;")
    return code + _any_row("eq", "n", NO_OFFSET_CODE)


def _begun(score: int) -> list[str]:
    """A row without an offset takes it from the largest of its first eight scores; where these are
    masked it stays without one."""
    code = ["@!%grew bra BEGUN;", *_maxima(score, range(4))]
    for row in (0, 1):
        code += _offset(row)
        code.append(f"setp.eq.f32 %grew, %n{row}, {NO_OFFSET_CODE};")
        code.append(f"selp.f32 %n{row}, %u{row}, %n{row}, %grew;")
    return [*code, "BEGUN:"]


def _pair_of_weights(narrow: str, score: int, i: int) -> list[str]:
    """%x and %y: weights of scores i and i + 1 of a row, and both packed."""
    code = []
    for name, at in (("%x", i), ("%y", i + 1)):
        code.append(f"fma.rn.f32 {name}, ${score + at}, %m, %n{i // 2 % 2};")
        code.append(f"ex2.approx.ftz.f32 {name}, {name};")
    return [*code, f"cvt.rn.{narrow}.f32 ${i // 2}, %y, %x;"]


def _maxima(score: int, places: range) -> list[str]:
    """%u: the largest score of each row in these places of the four lanes that hold it."""
    code = []
    for row in (0, 1):
        own = [score + i for i in places if i // 2 % 2 == row]
        code.append(f"max.f32 %u{row}, ${own[0]}, ${own[1]};")
        code += [f"max.f32 %u{row}, %u{row}, ${i};" for i in own[2:]]
    for lane in (1, 2):
        for row in (0, 1):
            code.append(f"shfl.sync.bfly.b32 %x, %u{row}, {lane}, 31, 0xffffffff;")
            code.append(f"max.f32 %u{row}, %u{row}, %x;")
    return code


def _offset(row: int) -> list[str]:
    """%u: the offset for a row whose largest score %u is; that it has, where it has one."""
    return [
        f"neg.f32 %u{row}, %u{row};",
        f"mul.f32 %u{row}, %u{row}, %m;",
        f"cvt.rmi.f32.f32 %u{row}, %u{row};",
        f"min.f32 %u{row}, %u{row}, %n{row};",
    ]


def _new_offset(row: int, factor: str) -> list[str]:
    """%n of a row after its maximum %u, the factor of what was, and the sum times that."""
    return [
        *_offset(row),
        f"sub.f32 %y, %u{row}, %n{row};",
        f"mov.f32 %n{row}, %u{row};",
        f"ex2.approx.ftz.f32 %{factor}{row}, %y;",
        f"mul.f32 %s{row}, %s{row}, %{factor}{row};",
    ]


def _told(told: int, scores: int) -> list[str]:
    """Sums and offsets in the first octet of what is told, factors in the others."""
    names = ["a" if i > 3 else "sn"[i % 2] for i in range(scores)]
    return [f"mov.f32 ${told + i}, %{name}{i // 2 % 2};" for i, name in enumerate(names)]


def weights_code(narrow: str, scaled: int, halves: int = 2) -> str:
    """PTX: weights of 32 scores of two rows, which have an offset and a sum of former weights each.

    A weight is exp2(score * %m + offset), a row's offset -1 times a whole number near its largest
    score. Weights are taken before it is known whether the offset still suits, which their sums
    tell: a row that outgrew it has a sum over 2 ** SLACK, as has one with a key but no offset. Only
    a warp with such a row looks for the largest scores, scales what was and takes the weights
    again; one with a row that has no offset yet looks at eight scores first. Half of the columns
    at a time, so that the registers of a half's scores are free then.

    Args:
        scaled: results [64, 64] that are scaled here, 0 to 2.
        halves: of the columns; 1: there are 16 scores, of 32 columns, and half of all registers.

    Registers: 16 of packed weights, 32 of each result of the same rows, 32 of what is told; 32
    scores, 32 offsets, 32 sums (results are their own operands). Told are, in the first octet of a
    row, its sum and its offset, and in the others the factor of what was before.
    """
    scores = 16 * halves
    acc = scores // 2
    told = acc + 32 * scaled
    score, offset, total = (told + i * scores for i in (1, 2, 3))
    code = [".reg .pred %grew;", ".reg .f32 %x, %y, %n0, %n1, %s0, %s1, %u0, %u1, %a0, %a1;"]
    code += _former(offset, total) + _begun(score)
    for half in range(halves):
        places = range(16 * half, 16 * half + 16)
        weights = []
        for i in places[::2]:
            row = i // 2 % 2
            weights += _pair_of_weights(narrow, score, i)
            if i < places[4]:
                weights.append(f"add.f32 %u{row}, %x, %y;")
            else:
                weights.append("add.f32 %x, %x, %y;")
                weights.append(f"add.f32 %u{row}, %u{row}, %x;")
        code += weights
        code += _any_row("gt", "u", LIMIT_CODE)
        code.append(f"@!%grew bra KNOWN{half};")
        code.append(f"GROWN{half}:")
        code += _maxima(score, places)
        for row in (0, 1):
            code += _new_offset(row, "u")  # a power of two, of the packed as well
            code.append(f"mul.f32 %a{row}, %a{row}, %u{row};")
        if half:
            code.append(".reg .b32 %g0, %g1;")
            for row in (0, 1):
                code.append(f"cvt.rn.{narrow}.f32 %g{row}, %u{row}, %u{row};")
            code += [f"mul.{narrow} ${i}, ${i}, %g{i % 2};" for i in range(8)]
        code += [f"mul.f32 ${acc + i}, ${acc + i}, %u{i // 2 % 2};" for i in range(32 * scaled)]
        code += weights
        code.append(f"KNOWN{half}:")
        code += [f"add.f32 %s{row}, %s{row}, %u{row};" for row in (0, 1)]
    return " ".join([*code, *_told(told, scores)])


def wide_weights_code(narrow: str) -> str:
    """The same for 64 scores of two rows, 32 of either half of 128 columns, and all at once: for
    consumers that have the registers for it, and too few neighbours to wait in the meantime. A warp
    with a row that has no offset looks at all scores: registers are short for anything else.

    Registers: 16 of packed weights of the left half, 16 of the right one, 32 of what is told; 32
    scores of either half, 32 offsets, 32 sums.
    """
    told, score, offset, total = 32, 64, 128, 160
    code = [".reg .pred %grew;", ".reg .f32 %x, %y, %n0, %n1, %s0, %s1, %a0, %a1;"]
    code.append(".reg .f32 %u0, %u1, %v0, %v1;")  # two sums a row: none waits for the other
    code += _former(offset, total)
    code.append("@%grew bra GROWN;")
    weights = []
    for i in range(0, 64, 2):
        row = i // 2 % 2
        of = f"{'uv'[i // 4 % 2]}{row}"
        weights += _pair_of_weights(narrow, score, i)
        if i < 8:
            weights.append(f"add.f32 %{of}, %x, %y;")
        else:
            weights.append("add.f32 %x, %x, %y;")
            weights.append(f"add.f32 %{of}, %{of}, %x;")
    weights += [f"add.f32 %u{row}, %u{row}, %v{row};" for row in (0, 1)]
    code += weights
    code += _any_row("gt", "u", LIMIT_CODE)
    code.append("@!%grew bra KNOWN;")
    code.append("GROWN:")
    code += _maxima(score, range(64))
    for row in (0, 1):
        code += _new_offset(row, "a")
    code += weights
    code.append("KNOWN:")
    code += [f"add.f32 %s{row}, %s{row}, %u{row};" for row in (0, 1)]
    return " ".join([*code, *_told(told, 32)])


def weights_operands(scaled: int) -> str:
    """Constraints of ``weights_code``."""
    results = [str(16 + i) for i in range(32 * scaled)]
    return ",".join(["=&r"] * 16 + ["=&f"] * (32 * scaled + 32) + ["f"] * 96 + results)


def keep_code(octets: int = 8) -> str:
    """PTX: scores of two rows, 32 in 8 octets of columns, -inf where a bit of a word is 0, in the
    order of the bits: ptxas then moves seven bits at a time into predicates."""
    places = {bit: bit % 16 // 2 * 4 + bit // 16 * 2 + bit % 2 for bit in range(32)}
    code = ["{", ".reg .b32 %bit;", ".reg .pred %kept;"]
    for bit, at in places.items():
        if at >= 4 * octets:
            continue
        code.append(f"and.b32 %bit, ${8 * octets}, {1 << bit};")
        code.append("setp.ne.u32 %kept, %bit, 0;")
        code.append(f"selp.f32 ${at}, ${at}, 0fFF800000, %kept;")
    return " ".join([*code, "}"])


def keep_operands(octets: int = 8) -> str:
    """Constraints of ``keep_code``."""
    scores = 4 * octets
    return ",".join(["=f"] * scores + [str(i) for i in range(scores)] + ["r"] * scores)


WIDE_F16: tl.constexpr = tl.constexpr(wide_weights_code("f16x2"))
WIDE_BF16: tl.constexpr = tl.constexpr(wide_weights_code("bf16x2"))
WIDE_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 32 + ["=&f"] * 32 + ["f"] * 128))
KEEP: tl.constexpr = tl.constexpr(keep_code())
KEEP_OPERANDS: tl.constexpr = tl.constexpr(keep_operands())
KEEP_SHORT: tl.constexpr = tl.constexpr(keep_code(4))
KEEP_SHORT_OPERANDS: tl.constexpr = tl.constexpr(keep_operands(4))
SHORT_F16: tl.constexpr = tl.constexpr(weights_code("f16x2", 0, 1))
SHORT_BF16: tl.constexpr = tl.constexpr(weights_code("bf16x2", 0, 1))
SHORT_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 8 + ["=&f"] * 16 + ["f"] * 48))
WEIGHTS_F16: tl.constexpr = tl.constexpr([weights_code("f16x2", n) for n in range(3)])
WEIGHTS_BF16: tl.constexpr = tl.constexpr([weights_code("bf16x2", n) for n in range(3)])
WEIGHTS_OPERANDS: tl.constexpr = tl.constexpr([weights_operands(n) for n in range(3)])
CLEAR: tl.constexpr = tl.constexpr(" ".join(f"mov.b32 ${i}, 0;" for i in range(32)))
CLEAR_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=f"] * 32 + ["f"] * 32))
