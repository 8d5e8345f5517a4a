"""Runs the PTX that kernels write inline, for one warp, with numpy: only what they use of it.

A register is 32 values of 32 bits, one per lane. Numbers are rounded as the GPU does, except that
exp2 is right to the last bit and a fused multiply-add may round twice (to fp64, then to fp32).
"""

import re
from collections import Counter
from functools import cache

import numpy as np

LANES = 32
_EVERY_LANE = "0xffffffff"


def run(code, constraints, inputs):
    """(results, how often each instruction ran) of an inline assembly.

    Args:
        constraints: as the compiler takes them: results first, "=f", "=r" or with "&" behind "=";
            then inputs, "f", "r" or the number of the result whose register they start in.
        inputs: of 32 bits, [inputs, lanes].
    """
    registers, fixed, count = _operands(constraints, inputs)
    statements, labels = _parse(code)
    ran = Counter()
    at = 0
    with np.errstate(all="ignore"):
        while at < len(statements):
            guard, wanted, name, arguments = statements[at]
            at += 1
            active = None if guard is None else registers[guard] == wanted
            ran[name] += 1
            if name == "bra":
                if active is None or _agreed(active):
                    at = labels[arguments[0]]
                continue
            result, *sources = arguments
            assert result not in fixed, f"{name} writes an input, {result}"
            value = _evaluate(name, sources, registers)
            if active is not None:
                assert name.split(".")[0] not in ("vote", "shfl"), f"a lane may miss a {name}"
                value = np.where(active, value, registers[result])
            registers[result] = value
    return [registers[f"${i}"] for i in range(count)], ran


def times(ran, kind):
    """How often instructions ran whose name starts with ``kind``."""
    return sum(count for name, count in ran.items() if (name + ".").startswith(kind + "."))


def floats(register):
    """A register as fp32."""
    return np.asarray(register, np.uint32).view(np.float32)


def bits(numbers):
    """fp32 numbers as what registers hold."""
    return np.asarray(numbers, np.float32).view(np.uint32)


def unpacked(register, narrow):
    """(low, high) half of a register of two narrow numbers, as fp32."""
    return _halves(np.asarray(register, np.uint32), narrow)


def _operands(constraints, inputs):
    constraints = constraints.split(",")
    results = [text for text in constraints if text[0] == "="]
    others = constraints[len(results) :]
    inputs = np.asarray(inputs, np.uint32)
    assert inputs.shape == (len(others), LANES) and not any(text[0] == "=" for text in others)
    registers, tied = {}, set()
    for i, (text, value) in enumerate(zip(others, inputs, strict=True), len(results)):
        # of one register one name is enough
        registers[f"${text}" if text.isdigit() else f"${i}"] = value
        if text.isdigit():
            tied.add(int(text))
    fixed = {f"${len(results) + i}" for i in range(len(others))}
    for i, text in enumerate(results):  # else an input may be in the register of a result
        assert i in tied or "&" in text, f"result {i} may overwrite an input"
    return registers, fixed, len(results)


@cache
def _parse(code):
    """(statements as (predicate, its value, name, arguments), index of each label)."""
    code = re.sub(r"([{}])", r";\1;", code)
    code = re.sub(r"(\w+):", r";\1:;", code)
    statements, labels, scopes = [], {}, [set()]
    for text in filter(None, (part.strip() for part in code.split(";"))):
        if text == "{":
            scopes.append(set())
        elif text == "}":
            scopes.pop()
        elif text.startswith(".reg"):
            for name in re.findall(r"%\w+", text):
                assert name not in scopes[-1], f"{name} is declared twice"
                scopes[-1].add(name)
        elif text.endswith(":"):
            assert text[:-1] not in labels, f"two labels {text}"
            labels[text[:-1]] = len(statements)
        else:
            for name in re.findall(r"%\w+", text):
                assert any(name in scope for scope in scopes), f"{name} is not declared"
            guard, negated, name, rest = re.fullmatch(
                r"(?:@(!?)(%\w+)\s+)?([\w.]+)\s+(.*)", text
            ).group(2, 1, 3, 4)
            arguments = tuple(part.strip() for part in rest.split(","))
            statements.append((guard, negated != "!", name, arguments))
    assert len(scopes) == 1
    return statements, labels


def _agreed(predicate):
    assert predicate.all() or not predicate.any(), "a branch that only some lanes take"
    return bool(predicate[0])


def _evaluate(name, sources, registers):
    kind = name.split(".")[0]
    if kind == "vote":
        assert name == "vote.sync.any.pred" and sources[1] == _EVERY_LANE
        return np.full(LANES, registers[sources[0]].any())
    if kind == "shfl":
        assert name == "shfl.sync.bfly.b32" and sources[2:] == ["31", _EVERY_LANE]
        return registers[sources[0]][np.arange(LANES) ^ int(sources[1])]
    if kind == "setp" and ".or." in name:
        return _evaluate(name.replace(".or", ""), sources[:2], registers) | registers[sources[2]]
    if kind == "selp":
        first, second = (_value(source, registers) for source in sources[:2])
        return np.where(registers[sources[2]], first, second)
    values = [_value(source, registers) for source in sources]
    if name in _INTEGER:
        return _INTEGER[name](*values)
    if name in _NARROW:
        return _NARROW[name](*values)
    result = _FLOAT[name](*(value.view(np.float32) for value in values))
    return result if result.dtype == bool else result.view(np.uint32)


@cache
def _constant(text):
    if text.startswith("0f"):
        number = int(text[2:], 16)
    elif "." in text:
        number = int(np.float32(float(text)).view(np.uint32))
    else:
        number = int(text, 0)
    return np.full(LANES, number, np.uint32)


def _value(source, registers):
    return registers[source] if source[0] in "$%" else _constant(source)


def _multiply_add(a, b, c):
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _exp2(x):
    """Numbers below the normal ones are 0, in and out."""
    tiny = np.finfo(np.float32).tiny
    x = np.where(np.abs(x) < tiny, np.float32(0), x)
    y = np.exp2(x.astype(np.float64)).astype(np.float32)
    return np.where(y < tiny, np.float32(0), y)


def _narrowed(number, narrow):
    """fp32 to 16 bits, to the nearest and to even between two."""
    if narrow == "f16x2":
        return number.astype(np.float16).view(np.uint16).astype(np.uint32)
    whole = number.view(np.uint32)
    rounded = (whole + (np.uint32(0x7FFF) + (whole >> 16 & 1))) >> 16
    return np.where(np.isnan(number), np.uint32(0x7FFF), rounded)


def _packed(low, high, narrow):
    return _narrowed(low, narrow) | _narrowed(high, narrow) << 16


def _halves(register, narrow):
    low, high = register & 0xFFFF, register >> 16
    if narrow == "f16x2":
        return tuple(h.astype(np.uint16).view(np.float16).astype(np.float32) for h in (low, high))
    return tuple((h << 16).astype(np.uint32).view(np.float32) for h in (low, high))


def _convert(narrow):
    return lambda high, low: _packed(low.view(np.float32), high.view(np.float32), narrow)


def _multiply(narrow):
    def multiply(a, b):
        pairs = zip(_halves(a, narrow), _halves(b, narrow), strict=True)
        return _packed(*(x * y for x, y in pairs), narrow)  # exact in fp32, if not tiny in bf16

    return multiply


_FLOAT = {
    "fma.rn.f32": _multiply_add,
    "ex2.approx.ftz.f32": _exp2,
    "cvt.rmi.f32.f32": np.floor,
    "add.f32": np.add,
    "sub.f32": np.subtract,
    "mul.f32": np.multiply,
    "max.f32": np.fmax,  # of a number and NaN the number
    "min.f32": np.fmin,
    "neg.f32": np.negative,
    "mov.f32": np.positive,
    "setp.eq.f32": np.equal,
    "setp.gt.f32": np.greater,
    "setp.neu.f32": np.not_equal,  # true of NaN
}
_INTEGER = {"and.b32": np.bitwise_and, "setp.ne.u32": np.not_equal}
_NARROW = {
    **{f"cvt.rn.{narrow}.f32": _convert(narrow) for narrow in ("f16x2", "bf16x2")},
    **{f"mul.{narrow}": _multiply(narrow) for narrow in ("f16x2", "bf16x2")},
}
