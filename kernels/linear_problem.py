"""Launch facts that the launchers of linear layers share."""

from typing import Any

import torch
from torch import Tensor

from .limits import PRECISIONS, fp32_precision
from .linear_epilogue import ACTIVATIONS
from .operand_checks import require

_TMA_BYTES = 16  # what addresses and strides of a tensor descriptor are multiples of


def check_activation(activation: str, operator: str) -> None:
    """Check the name of an activation; '' is none.

    Raises:
        ValueError: it is no key of ``stof_compile.fusion.recipe.ACTIVATIONS``.
    """
    names = ("", *ACTIVATIONS)
    require(activation in names, operator, f"activation must be one of {names}", repr(activation))


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
    """``input_precision`` of the products: exact unless the user lets fp32 use TF32, in three
    products of TF32 numbers where these pay."""
    precision = PRECISIONS[fp32_precision(x.dtype)]
    there = x.is_cuda and torch.cuda.is_available()
    if precision == "tf32x3" and there and not pays(torch.cuda.get_device_capability(x.device)):
        return "ieee"
    return precision


def pays(capability: tuple[int, int]) -> bool:
    """Whether three products of TF32 numbers take less time than one of fp32 numbers: tensor cores
    of other GPUs than these multiply TF32 at most twice as fast as the ordinary units fp32.
    """
    return capability == (8, 0) or capability[0] in (9, 10)


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
