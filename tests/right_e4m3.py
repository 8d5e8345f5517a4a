"""Conversions to and from e4m3 in Triton's interpreter, as a GPU makes them.

The interpreter's own lose a carry into the exponent (1.95 becomes 1.0), and NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

TYPES = {
    "fp8e4nv": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
LARGEST = 448.0


def _convert(given, source, target, rounding, *, otherwise):
    if "fp8e4nv" not in (source.name, target.name):
        return otherwise(given, source, target, rounding)
    values = torch.frombuffer(bytearray(given.tobytes()), dtype=TYPES[source.name]).float()
    if target.name == "fp8e4nv":  # GPUs stay at the largest number
        values = values.clamp(-LARGEST, LARGEST)
    bits = values.to(TYPES[target.name]).view(getattr(torch, f"int{target.primitive_bitwidth}"))
    kind = getattr(np, f"uint{target.primitive_bitwidth}")
    return bits.numpy().view(kind).reshape(given.shape)


@contextmanager
def right_e4m3() -> Iterator[None]:
    """While this is open the interpreter rounds to e4m3 as a GPU does."""
    own = interpreter._convert_float

    def convert(given, source, target, rounding):
        return _convert(given, source, target, rounding, otherwise=own)

    with mock.patch.object(interpreter, "_convert_float", convert):
        yield
