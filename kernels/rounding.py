"""q, k and v as e4m3 numbers with a scale for each head, and where those can be used."""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
# So small that it hardly matters, so large that a product of two is a normal number of fp32: a head
# of zeros needs no other care.
SMALLEST_SCALE = 2.0**-60
KEY_STEP = 128  # v has zeros behind its keys up to a multiple of this, the longest tile
DIM_STEP = 16  # q and k have zeros behind a head up to a multiple of this: 16 bytes
ONES = 16  # dimensions of ones behind those of v, by which a kernel adds up weights
MAX_HEAD_DIM = 128
HALF_TYPES = (torch.float16, torch.bfloat16)


def fp8_refusal(
    head_dim: int, value_dim: int, dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Why a problem cannot run on e4m3 operands, None where it can.

    Args:
        head_dim, value_dim: of q and k, and of v.
        dtype: of q, k and v before they are rounded.
        capability: (major, minor) of the device.
    """
    if capability < (8, 9) or torch.version.hip is not None:
        return "it needs an NVIDIA GPU of capability 8.9 or newer"
    if dtype not in HALF_TYPES:
        return f"it takes fp16 and bf16, not {dtype}"
    if max(head_dim, value_dim) > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {head_dim}, {value_dim}"
    return None


def round_heads(x: Tensor, keys_last: bool) -> tuple[Tensor, Tensor]:
    """Round each head to e4m3, relative to its largest finite value.

    Plain tensor operations, which a compiler can join with what made ``x``. What is not finite
    becomes NaN (e4m3 has no infinity) and leaves the scale alone, so that it spoils what reads it
    and nothing else.

    Args:
        x: [batch, heads, length, dim], any float dtype and strides.
        keys_last: the layout of v.

    Returns:
        values: e4m3, contiguous: [batch, heads, length, dim up to a multiple of DIM_STEP], or with
            ``keys_last`` [batch, heads, dim + ONES, length up to a multiple of KEY_STEP]; zeros
            fill up.
        scale: fp32 [batch, heads]; values * scale is ``x`` with three bits behind the leading one.
    """
    wide = x.float()
    finite = wide.isfinite()
    if x.shape[2] == 0 or x.shape[3] == 0:
        largest = wide.new_zeros(x.shape[:2])
    else:
        largest = torch.where(finite, wide.abs(), 0.0).amax((2, 3))
    scale = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
    values = torch.where(finite, wide / scale.unsqueeze(2).unsqueeze(3), float("nan"))
    if keys_last:
        values = F.pad(values.transpose(2, 3), (0, -x.shape[2] % KEY_STEP))
        values = F.pad(values, (0, 0, 0, ONES), value=1.0)
    else:
        values = F.pad(values, (0, -x.shape[3] % DIM_STEP))
    return values.to(E4M3, memory_format=torch.contiguous_format), scale
