"""Activations on fp32 expressions of a TileLang program.

Each has NaN where PyTorch has it: for a NaN, and for -inf in the GELUs and SiLU.
"""

import math
from typing import Any

import tilelang.language as T

_LOG2E = 1.4426950408889634
# by dtype, log2 of the tail of the normal distribution, lowest power first, and the largest
# number it is for: see stof_compile/short_gelu.py
_TAIL = {
    "float16": (
        (-1.0, -1.1505447, -0.46068893, -0.051570752, 7.3175825e-3, -6.2941879e-4, 2.4037273e-5),
        13.0,
    ),
    "bfloat16": (
        (
            -1.0, -1.1512574, -0.45824954, -0.054387882, 8.8414437e-3,
            -1.0607141e-3, 8.8966007e-5, -4.8776738e-6, 1.5587791e-7, -2.1911338e-9,
        ),
        16.0,
    ),
}  # fmt: skip
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
    factors, largest = _TAIL[dtype]
    a = T.min(T.abs(x), T.float32(largest))
    q = a * factors[-1] + factors[-2]
    for factor in factors[-3::-1]:
        q = q * a + factor
    half = x * 0.5
    return (half + T.abs(half)) - a * T.exp2(q)
