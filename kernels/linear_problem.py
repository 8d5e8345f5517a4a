"""Argument checks and launch facts that the launchers of linear layers share."""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .limits import tf32_allowed
from .linear_epilogue import ACTIVATIONS

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_STRIDE = (1 << 31) // 256  # offsets within a tile of at most 256 rows are 32-bit numbers
_TMA_BYTES = 16  # what addresses and strides of a tensor descriptor are multiples of


class Rows(NamedTuple):
    """A tensor [..., columns] as the kernels see it: [rows, columns] with unit column stride."""

    tensor: Tensor
    stride: int  # elements from one row to the next


class Weight(NamedTuple):
    """A weight [N, K] as the kernels see it: rows of N, or rows of K if ``kn``."""

    tensor: Tensor
    stride: int  # elements from one row to the next
    kn: bool  # N is the contiguous dimension


def check_input(x: Tensor, operator: str) -> None:
    """Check dtype, device and rank of x.

    Raises:
        ValueError: x is not fp16, bf16 or fp32 on a GPU (or under Triton's interpreter).
    """
    require(x.dtype in DTYPES, operator, "x must be fp16, bf16 or fp32", x.dtype)
    require(x.dim() >= 1 and x.shape[-1] > 0, operator, "x must be [..., K], K > 0", x.shape)
    require(
        x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1",
        operator,
        "x must be on a GPU: the kernel is Triton's; use torch.nn.functional.linear on a CPU",
        x.device,
    )


def check_activation(activation: str, operator: str) -> None:
    """Check the name of an activation; '' is none.

    Raises:
        ValueError: it is no key of ``stof_compile.fusion.recipe.ACTIVATIONS``.
    """
    names = ("", *ACTIVATIONS)
    require(activation in names, operator, f"activation must be one of {names}", repr(activation))


def check_blocks(operator: str, **blocks: int) -> None:
    """Check tile edges.

    Raises:
        ValueError: one is no power of two of at least 16.
    """
    for name, block in blocks.items():
        require(
            block >= 16 and block & (block - 1) == 0,
            operator,
            f"{name} must be a power of two >= 16",
            block,
        )


def rows_of(name: str, tensor: Tensor, x: Tensor, columns: int, operator: str) -> Rows:
    """Flatten a tensor [..., columns] to rows; copied only where its strides leave no choice.

    Raises:
        ValueError: its columns, dtype, device or number of rows differ from what x asks for.
    """
    require(
        tensor.dim() >= 1 and tensor.shape[-1] == columns,
        operator,
        f"{name} must be [..., {columns}]",
        tuple(tensor.shape),
    )
    _check_like(name, tensor, x, operator)
    flat = tensor.reshape(-1, columns)
    wanted = x.numel() // x.shape[-1]
    require(
        flat.shape[0] == wanted,
        operator,
        f"{name} must have as many rows as x ({wanted})",
        tuple(tensor.shape),
    )
    if (columns > 1 and flat.stride(1) != 1) or flat.stride(0) >= _MAX_STRIDE:
        flat = flat.contiguous()
    # a single row has no neighbour: its stride says nothing and must not make another kernel
    return Rows(flat, flat.stride(0) if flat.shape[0] > 1 else columns)


def weight_of(name: str, weight: Tensor, x: Tensor, columns: int, operator: str) -> Weight:
    """Check a weight [N, columns] and find its contiguous dimension; never copied.

    Raises:
        ValueError: its shape, dtype or device do not fit x, or no dimension has unit stride.
    """
    require(
        weight.dim() == 2 and weight.shape[1] == columns,
        operator,
        f"{name} must be [N, {columns}]",
        tuple(weight.shape),
    )
    _check_like(name, weight, x, operator)
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
    """Check a bias and make it [columns] with unit stride.

    Raises:
        ValueError: it has another number of elements, dtype or device.
    """
    if bias is None:
        return None
    require(
        bias.shape[-1:] == (columns,) and bias.numel() == columns,
        operator,
        f"{name} must be [{columns}]",
        tuple(bias.shape),
    )
    _check_like(name, bias, x, operator)
    return bias.reshape(columns).contiguous()


def describable(tensor: Tensor, stride: int) -> bool:
    """Whether the copy engine can address a matrix: 16-byte rows at a 16-byte address.

    Storage itself is aligned (allocators and Inductor see to it), so its offset decides.
    """
    size = tensor.element_size()
    return (
        tensor.is_cuda
        and torch.cuda.is_available()
        and torch.version.hip is None
        and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
        and stride > 0
        and stride * size % _TMA_BYTES == 0
        and tensor.storage_offset() * size % _TMA_BYTES == 0
    )


def ensure_scratch_allocator() -> None:
    """Let Triton allocate the memory of descriptors made on the device, unless it can already.

    Inductor's launcher brings its own allocator; this one serves calls outside of torch.compile.
    """
    import triton
    from triton.runtime import _allocation

    held: Any = getattr(_allocation, "_allocator", None)
    current = held.get() if hasattr(held, "get") else held
    if isinstance(current, getattr(_allocation, "NullAllocator", type(None))):
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )


def precision_of(x: Tensor) -> str:
    """``input_precision`` of the products: exact unless the user lets fp32 use TF32."""
    return "tf32" if x.dtype == torch.float32 and tf32_allowed() else "ieee"


def processors(x: Tensor) -> int:
    """Multiprocessors of the device of x; a few under the interpreter."""
    if x.is_cuda and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
    return 3


def honest_parts(steps: int, wanted: int) -> int:
    """The largest number of parts, at most ``wanted``, of which none is without a step."""
    parts = min(steps, wanted)
    while -(-steps // parts) * (parts - 1) >= steps:
        parts -= 1
    return parts


def pieces(
    block_m: int,
    block_n: int,
    num_warps: int,
    persistent: bool,
    full_operands: bool,
    split: bool = False,
) -> int:
    """In how many pieces, side by side, a tile is finished.

    A piece needs registers beside the sums, more so with operands as large as the tile or parts to
    add, and memory that persistent programs share with the next loads.
    """
    per_thread = block_m * block_n // (32 * num_warps)
    wanted = 1
    if per_thread >= 128:
        wanted = 4 if full_operands or split else 2
    elif (split and per_thread >= 64) or (persistent and block_m * block_n >= 128 * 128):
        wanted = 2
    return min(wanted, block_n // 16)


def require(holds: bool, operator: str, rule: str, got: object) -> None:
    """Raise a ValueError that names the operator, the rule and the value, unless the rule holds."""
    if not holds:
        raise ValueError(f"{operator}: {rule}; got {got}")


def _check_like(name: str, tensor: Tensor, x: Tensor, operator: str) -> None:
    require(
        tensor.dtype == x.dtype, operator, f"{name} must have x's dtype {x.dtype}", tensor.dtype
    )
    require(tensor.device == x.device, operator, f"{name} must be on {x.device}", tensor.device)
