"""Checks of what the launchers of fused layers are given: operands and numbers of a config.

Every check raises a ValueError with the operator, the argument, the rule and the value got.
"""

import os
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MARK_STEP = 16  # words between two marks: all have one alignment, and a kernel one compiled form
_MAX_STRIDE = (1 << 31) // 256  # offsets within a tile of at most 256 rows are 32-bit numbers


class Rows(NamedTuple):
    """A tensor [..., columns] as the kernels see it: [rows, columns] with unit column stride."""

    tensor: Tensor
    stride: int  # elements from one row to the next


class Weight(NamedTuple):
    """A weight [N, K] as the kernels see it: rows of N, or rows of K if ``kn``."""

    tensor: Tensor
    stride: int  # elements from one row to the next
    kn: bool  # N is the contiguous dimension


def require(holds: bool, operator: str, rule: str, got: object) -> None:
    """Raise a ValueError that names the operator, the rule and the value, unless the rule holds."""
    if not holds:
        raise ValueError(f"{operator}: {rule}; got {got}")


def check_input(x: Tensor, operator: str) -> None:
    """Check dtype, device and rank of x.

    Raises:
        ValueError: x is not fp16, bf16 or fp32 on a GPU (or under Triton's interpreter).
    """
    require(x.dim() >= 1, operator, "x must have rows, [..., columns]", tuple(x.shape))
    check_dtype("x", x, operator)
    check_gpu("x", x, operator)


def check_dtype(name: str, tensor: Tensor, operator: str) -> None:
    """Check that a kernel can read a dtype.

    Raises:
        ValueError: it is none of :data:`DTYPES`.
    """
    require(tensor.dtype in DTYPES, operator, f"{name} must be fp16, bf16 or fp32", tensor.dtype)


def check_gpu(name: str, tensor: Tensor, operator: str) -> None:
    """Check that Triton runs where a tensor is.

    Raises:
        ValueError: it is not on a GPU (nor under Triton's interpreter).
    """
    require(
        tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1",
        operator,
        f"{name} must be on a GPU: the kernel is Triton's; leave the operation to torch elsewhere",
        tensor.device,
    )


def check_operand(
    name: str, tensor: Tensor, x: Tensor, operator: str, *, own_dtype: bool = False
) -> None:
    """Check dtype and device of what is read beside x.

    Args:
        own_dtype: whether it may have another dtype of :data:`DTYPES` than x.
    Raises:
        ValueError: they do not fit x.
    """
    if own_dtype:
        check_dtype(name, tensor, operator)
    rule = f"{name} must have the dtype of x; x's dtype is {x.dtype}"
    require(own_dtype or tensor.dtype == x.dtype, operator, rule, tensor.dtype)
    require(tensor.device == x.device, operator, f"{name} must be on {x.device}", tensor.device)


def rows_of(
    name: str, tensor: Tensor, x: Tensor, columns: int, operator: str, *, own_dtype: bool = False
) -> Rows:
    """Flatten a tensor [..., columns] to rows; copied only where its strides leave no choice.

    Args:
        own_dtype: as for :func:`check_operand`.
    Raises:
        ValueError: its columns, dtype, device or number of rows differ from what x asks for.
    """
    rows = prod(x.shape[:-1])
    require(
        tensor.shape[-1:] == (columns,) and tensor.numel() == rows * columns,
        operator,
        f"{name} must be [..., {columns}] with {rows} rows, as many rows as x has",
        tuple(tensor.shape),
    )
    check_operand(name, tensor, x, operator, own_dtype=own_dtype)
    flat = tensor.reshape(rows, columns)
    if (columns > 1 and flat.stride(1) != 1) or flat.stride(0) >= _MAX_STRIDE:
        flat = flat.contiguous()
    # a single row has no neighbour: its stride says nothing and must not make another kernel
    return Rows(flat, flat.stride(0) if rows > 1 else columns)


def check_weight(name: str, weight: Tensor, x: Tensor, columns: int, operator: str) -> None:
    """Check a weight [N, columns], columns > 0.

    Raises:
        ValueError: its shape, dtype or device do not fit x.
    """
    require(columns > 0, operator, f"what {name} multiplies must be [..., K], K > 0", columns)
    fits = weight.dim() == 2 and weight.shape[1] == columns
    require(fits, operator, f"{name} must be [N, {columns}]", tuple(weight.shape))
    check_operand(name, weight, x, operator)


def weight_of(name: str, weight: Tensor, x: Tensor, columns: int, operator: str) -> Weight:
    """Check a weight [N, columns] and find its contiguous dimension; never copied.

    Raises:
        ValueError: its shape, dtype or device do not fit x, or no dimension has unit stride.
    """
    check_weight(name, weight, x, columns, operator)
    n, k = weight.shape
    require(
        max(weight.stride()) < _MAX_STRIDE,
        operator,
        f"{name} must have strides below {_MAX_STRIDE} elements (call .contiguous())",
        weight.stride(),
    )
    if k == 1 or weight.stride(1) == 1:
        return Weight(weight, weight.stride(0) if n > 1 else k, False)
    require(
        n == 1 or weight.stride(0) == 1,
        operator,
        f"{name} [N, K] must have unit stride along N or K (call .contiguous())",
        weight.stride(),
    )
    return Weight(weight, weight.stride(1), True)


def bias_of(
    name: str, bias: Tensor | None, x: Tensor, columns: int, operator: str
) -> Tensor | None:
    """Check a bias of a product and make it [columns] with unit stride; None stays None.

    Raises:
        ValueError: its shape, dtype or device do not fit.
    """
    if bias is None:
        return None
    fits = bias.shape[-1:] == (columns,) and bias.numel() == columns
    require(fits, operator, f"{name} must be [{columns}]", tuple(bias.shape))
    check_operand(name, bias, x, operator)
    return bias.reshape(columns).contiguous()


def vector_of(
    name: str, vector: Tensor | None, x: Tensor, columns: int, operator: str
) -> Tensor | None:
    """Check what a norm takes for every row, of any shape and of any dtype that kernels read.

    Raises:
        ValueError: it has another number of elements, or its dtype or device do not fit.
    """
    if vector is None:
        return None
    rule = f"{name} must have {columns} elements"
    require(vector.numel() == columns, operator, rule, tuple(vector.shape))
    check_operand(name, vector, x, operator, own_dtype=True)
    return vector.reshape(columns).contiguous()


def check_power_of_two(operator: str, least: int = 1, **numbers: int) -> None:
    """Check numbers of a config.

    Raises:
        ValueError: one is no power of two, or less than ``least``.
    """
    for name, value in numbers.items():
        fits = value > 0 and value & (value - 1) == 0
        require(fits, operator, f"{name} must be a power of two", value)
        require(value >= least, operator, f"{name} must be >= {least}", value)


def check_mark(marks: Tensor, mark: int, x: Tensor, operator: str) -> None:
    """Check the words in which kernels mark results that hold an infinity, and the place of one.

    Raises:
        ValueError: no int32 vector on the device of x, or no such place in it.
    """
    fits = marks.dtype == torch.int32 and marks.dim() == 1 and marks.is_contiguous()
    told = (marks.dtype, tuple(marks.shape), str(marks.device))
    words = "marks must be a contiguous vector of int32 on the device of x"
    require(fits and marks.device == x.device, operator, words, told)
    there = 0 <= mark < marks.numel() and mark % MARK_STEP == 0
    places = f"mark must be a multiple of {MARK_STEP} below {marks.numel()}"
    require(there, operator, places, mark)
