"""Activations on fp32 expressions of a TileLang program.

Each has NaN where PyTorch has it: for a NaN, and for -inf in the GELUs and SiLU.
"""

import math
from typing import Any

import tilelang.language as T

_LOG2E = 1.4426950408889634
# by dtype, the numbers of log2 of the tail of the normal distribution: see
# stof_compile/short_gelu.py
_TAIL = {
    "float16": (1.1252787, 0.9528983, (0.40767052, 0.70441617), 13.0),
    "bfloat16": (
        0.90591097,
        1.0188546,
        (0.5108682, 0.68464665, 1.6298482e-3, -3.1196137e-5),
        16.0,
    ),
}
ACTIVATIONS = ("", "gelu", "gelu_tanh", "relu", "silu")


def activate(x: Any, name: str, dtype: str) -> Any:
    """The activation of an expression.

    Args:
        name: one of ``ACTIVATIONS``; ``""`` is none.
        dtype: "float16" or "bfloat16", what the result is rounded to afterwards.
    Raises:
        ValueError: the name is not one of ``ACTIVATIONS``.
    """
    if name == "":
        return x
    if name == "relu":
        return T.Select(x < 0.0, T.float32(0.0), x)  # a maximum would turn NaN into 0
    if name == "silu":
        return x * _sigmoid(x)
    if name == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return x * _sigmoid(math.sqrt(8 / math.pi) * x * (1.0 + 0.044715 * x * x))
    if name == "gelu":
        return _short_gelu(x, dtype)
    raise ValueError(f"activation must be one of {ACTIVATIONS}; got {name!r}")


def _sigmoid(x: Any) -> Any:
    # the root of 1 / (1 + e) is one instruction, a division ten; it is 0 where e overflows
    root = T.rsqrt(1.0 + T.exp2(x * -_LOG2E))
    return root * root


def _short_gelu(x: Any, dtype: str) -> Any:
    share, rate, powers, largest = _TAIL[dtype]
    a = T.min(T.abs(x), T.float32(largest))
    q = a * -powers[-1] - powers[-2]
    for factor in (*powers[-3::-1], share + 1):
        q = q * a - factor
    q = T.exp2(a * -rate) * share + q
    half = x * 0.5
    return (half + T.abs(half)) - a * T.exp2(q)
