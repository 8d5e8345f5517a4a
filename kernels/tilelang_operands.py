"""Brings the operands of TileLang launchers into the form the programs take, and checks them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
# Elements of a half type in 16 bytes: what the bulk copies and vector loads want rows to start on.
LANES = 8


def as_rows(name: str, tensor: Tensor, width: int, rows: int | None = None) -> Tensor:
    """``tensor`` [..., width] as a contiguous matrix [rows, width] that starts on 16 bytes."""
    require(tensor.shape[-1:] == (width,), f"{name} must end in {width}", tuple(tensor.shape))
    require(width % LANES == 0, f"the width of {name} must be a multiple of {LANES}", width)
    matrix = _plain(tensor).view(-1, width)
    require(rows in (None, matrix.shape[0]), f"{name} must have {rows} rows", tuple(tensor.shape))
    return matrix


def as_vector(name: str, tensor: Tensor | None, width: int) -> Tensor | None:
    """``tensor`` of ``width`` elements as a contiguous vector; None stays None."""
    if tensor is None:
        return None
    require(tensor.numel() == width, f"{name} must have {width} elements", tuple(tensor.shape))
    return _plain(tensor).view(width)


def as_weight(name: str, weight: Tensor, weight_kn: bool) -> tuple[Tensor, bool]:
    """A weight as a contiguous matrix, and whether that is [K, N] rather than [N, K].

    The transpose of a contiguous matrix is that matrix, read the other way.
    """
    require(weight.dim() == 2, f"{name} must be a matrix", tuple(weight.shape))
    sizes = tuple(weight.shape)
    require(
        all(size % LANES == 0 for size in sizes), f"sizes of {name} must be multiples of 8", sizes
    )
    if not weight.is_contiguous() and weight.t().is_contiguous():
        return _plain(weight.t()), not weight_kn
    return _plain(weight), weight_kn


def check_alike(x: Tensor, others: dict[str, Tensor | None]) -> None:
    """All operands have the dtype and device of x, and x is of a half type on CUDA."""
    require(x.dtype in DTYPES, "x must be fp16 or bf16", x.dtype)
    require(x.is_cuda, "TileLang kernels run on CUDA devices", x.device)
    for name, tensor in others.items():
        if tensor is not None:
            require(tensor.dtype == x.dtype, f"{name} must be {x.dtype}", tensor.dtype)
            require(tensor.device == x.device, f"{name} must be on {x.device}", tensor.device)


def check_config(config: Sequence[int], fields: tuple[str, ...]) -> tuple[int, ...]:
    """The config as a tuple, one number for each field."""
    require(
        len(config) == len(fields) and all(value > 0 for value in config),
        f"config must be {len(fields)} positive numbers: {', '.join(fields)}",
        list(config),
    )
    return tuple(config)


def require(holds: bool, rule: str, got: object) -> None:
    """Raise ValueError unless a rule holds."""
    if not holds:
        raise ValueError(f"TileLang kernel: {rule}; got {got}")


def run(kernel: Any, x: Tensor, *operands: Tensor | None) -> None:
    """Launch a compiled program on the device of x."""
    if x.device.index == torch.cuda.current_device():  # a guard costs more than this question
        kernel(*operands)
        return
    with torch.cuda.device(x.device):
        kernel(*operands)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy that is contiguous and starts on 16 bytes; without gradient."""
    tensor = tensor.detach() if tensor.requires_grad else tensor  # DLPack takes no other
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
