"""Programs of elementwise steps, written as JSON, and the Triton source that computes one.

    {"dtype": "float16",
     "steps": [["add", ["x0", "x1"], {}], ["activation", ["v0"], {"name": "gelu"}]]}

``x<i>`` is an operand, ``v<j>`` the value of step j; the last step is the result, stored as
``dtype``. Values are fp32 between the steps; a cast to half precision rounds them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from math import isinf, isnan
from typing import Any, NamedTuple

TYPES = ("float16", "bfloat16", "float32")

UNARY: Mapping[str, str] = {
    "neg": "{0} * -1.0",  # 0 - x would lose the sign of a zero
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
}
BINARY: Mapping[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    # NaN on either side wins, as in torch
    "maximum": "tl.where(({0} >= {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} <= {1}) | ({0} != {0}), {0}, {1})",
}
ARITHMETIC = ("add", "sub", "mul", "div")  # the binary steps that take a number
POWERS: Mapping[float, str] = {
    -2.0: "1.0 / ({0} * {0})",
    -1.0: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.5: "tl.sqrt_rn({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    4.0: "({0} * {0}) * ({0} * {0})",
}
ACTIVATIONS: Mapping[str, str] = {
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "0.5 * {0} * (1.0 + tanh({0} * (0.7978845608028654 + 0.0356774081 * {0} * {0})))",
    "relu": "tl.where({0} <= 0.0, 0.0, {0})",  # keeps NaN, which max(x, 0) may drop
    "silu": "{0} / (1.0 + tl.exp({0} * -1.0))",
    "tanh": "tanh({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp({0} * -1.0))",
}


class Access(NamedTuple):
    """Where an operand holds the element of a result's linear index.

    ``kind``: "full" index | "one" 0 | "tail" index % COUNT | "head" index // INNER | "middle"
    (index // INNER) % COUNT.
    """

    kind: str
    size: int = 1
    inner: int = 1


_OFFSETS = {
    "full": "index",
    "tail": "index % COUNT{0}",
    "head": "index // INNER{0}",
    "middle": "index // INNER{0} % COUNT{0}",
}


class Program(NamedTuple):
    """A checked program: dtype of the result, and steps as (kind, inputs, attributes)."""

    dtype: str
    steps: tuple[tuple[str, tuple[str, ...], Mapping[str, Any]], ...]


def read_program(text: str, operands: int) -> Program:
    """Check a program; its text becomes code, so nothing unknown passes.

    Args:
        text: the JSON. operands: how many tensors it may name.
    Raises:
        ValueError: it is malformed, or names an unknown step or value.
    """
    try:
        held = json.loads(text)
        dtype, steps = held["dtype"], [tuple(step) for step in held["steps"]]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"pointwise program: no dtype and steps in {text!r}") from problem
    _require(dtype in TYPES, f"dtype must be one of {', '.join(TYPES)}", dtype)
    _require(bool(steps), "there must be a step", text)
    for number, step in enumerate(steps):
        _require(len(step) == 3, "a step is [kind, inputs, attributes]", step)
        kind, inputs, attrs = step
        for name in inputs:
            found = re.fullmatch(r"([xv])(0|[1-9][0-9]{0,5})", str(name))
            known = {"x": operands, "v": number}
            _require(
                found is not None and int(found[2]) < known[found[1]],
                f"step {number} may read x0 to x{operands - 1} and v0 to v{number - 1}", name,
            )  # fmt: skip
        expression(kind, tuple(inputs), attrs)
    return Program(dtype, tuple((kind, tuple(inputs), attrs) for kind, inputs, attrs in steps))


def expression(kind: str, inputs: tuple[str, ...], attrs: Mapping[str, Any]) -> str:
    """A step as Triton code on the names of its inputs.

    Raises:
        ValueError: no such step.
    """
    if kind == "activation":
        return _template(ACTIVATIONS, attrs.get("name"), kind).format(*_exactly(1, inputs, kind))
    if kind == "cast":
        (name,) = _exactly(1, inputs, kind)
        dtype = attrs.get("dtype")
        _require(dtype in TYPES, f"a cast goes to one of {', '.join(TYPES)}", dtype)
        return name if dtype == "float32" else f"{name}.to(tl.{dtype}).to(tl.float32)"
    if kind in UNARY:
        return UNARY[kind].format(*_exactly(1, inputs, kind))
    number = attrs.get("number")
    if kind == "pow":
        is_exponent = isinstance(number, int | float) and not attrs.get("number_first")
        _require(is_exponent, "pow has a number as exponent", attrs)
        return _template(POWERS, float(number or 0), kind).format(*_exactly(1, inputs, kind))
    code = _template(BINARY, kind, "step")
    if number is None:
        return code.format(*_exactly(2, inputs, kind))
    _require(kind in ARITHMETIC, f"a number stands in {', '.join(ARITHMETIC)}", kind)
    pair = [_exactly(1, inputs, kind)[0], _literal(float(number))]
    return code.format(*(reversed(pair) if attrs.get("number_first") else pair))


def source_of(program: Program, accesses: Sequence[Access], even: bool, wide: bool) -> str:
    """Source of a module with the kernel of a program, ``pointwise_kernel``.

    Args:
        program: what to compute. accesses: of its operands.
        even: whether the block divides the result, which then needs no mask.
        wide: whether indices pass 2^31.
    """
    sizes = [
        f"{name}{i}: tl.constexpr"
        for i, access in enumerate(accesses)
        for name, kinds in (("COUNT", ("tail", "middle")), ("INNER", ("head", "middle")))
        if access.kind in kinds
    ]
    operands = [f"x{i}" for i in range(len(accesses))]
    arguments = ", ".join([*operands, "out", "total", *sizes, "BLOCK: tl.constexpr"])
    arguments += ", PDL: tl.constexpr = False"
    mask, load_mask = ("", "") if even else (", mask=valid", ", mask=valid, other=0.0")
    lines = [
        "start_after_previous(PDL)",
        f"first = tl.program_id(0){'.to(tl.int64)' if wide else ''} * BLOCK",
        "index = first + tl.arange(0, BLOCK)",
    ]
    if not even:
        lines.append("valid = index < total")
    for i, access in enumerate(accesses):
        if access.kind == "one":
            lines.append(f"x{i}_ = tl.load(x{i}).to(tl.float32)")
        else:
            offset = _OFFSETS[access.kind].format(i)
            lines.append(f"x{i}_ = tl.load(x{i} + ({offset}){load_mask}).to(tl.float32)")
    for number, (kind, inputs, attrs) in enumerate(program.steps):
        names = tuple(f"{name}_" if name[0] == "x" else name for name in inputs)
        lines += _with_tanh(f"v{number}", expression(kind, names, attrs))
    lines.append(f"tl.store(out + index, v{len(program.steps) - 1}.to(tl.{program.dtype}){mask})")
    body = "\n".join(f"    {line}" for line in lines)
    return (
        "import triton\nimport triton.language as tl\n\n"
        "from stof_compile.kernels.overlap_kernel import start_after_previous\n\n\n"
        f"@triton.jit\ndef pointwise_kernel({arguments}):\n{body}\n"
    )


def _with_tanh(name: str, code: str) -> list[str]:
    """Statements for ``name = code``, where code may hold one ``tanh(...)``, which Triton lacks.

    tanh(x) = (1 - e) / (1 + e), e = exp(-2 |x|), is right at both infinities and for NaN; below
    0.25, where 1 - e loses digits, the Taylor series is right to 1e-8.
    """
    start = code.find("tanh(")
    if start < 0:
        return [f"{name} = {code}"]
    depth, end = 1, start + len("tanh(")
    while depth:
        depth += {"(": 1, ")": -1}.get(code[end], 0)
        end += 1
    inner = code[start + len("tanh(") : end - 1]
    series = "0.0218694885"  # 62 / 2835
    for factor in ("-0.0539682540", "0.1333333333", "-0.3333333333", "1.0"):
        series = f"({series} * {name}_s + {factor})"
    return [
        f"{name}_a = {inner}",
        f"{name}_s = {name}_a * {name}_a",
        f"{name}_e = tl.exp(tl.abs({name}_a) * -2.0)",
        f"{name}_t = (1.0 - {name}_e) / (1.0 + {name}_e)",
        f"{name}_t = tl.where({name}_a < 0.0, {name}_t * -1.0, {name}_t)",
        f"{name}_t = tl.where(tl.abs({name}_a) < 0.25, {name}_a * {series}, {name}_t)",
        f"{name} = {code[:start]}{name}_t{code[end:]}",
    ]


def _template(held: Mapping[Any, str], key: Any, what: str) -> str:
    known = isinstance(key, str | float) and key in held
    _require(known, f"{what} must be one of {', '.join(map(str, held))}", key)
    return held[key]


def _exactly(count: int, inputs: tuple[str, ...], kind: str) -> tuple[str, ...]:
    _require(len(inputs) == count, f"'{kind}' reads {count} values", inputs)
    return inputs


def _literal(number: float) -> str:
    return f'float("{number}")' if isinf(number) or isnan(number) else f"({number!r})"


def _require(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"pointwise program: {rule}; got {got!r}")
