"""Checks of what users hand to sparse attention."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from stof_compile.errors import StofError, StofMaskError


def autocast_operands(*operands: Tensor) -> tuple[Tensor, ...]:
    """Cast operands as autocast casts those of SDPA, where it is on for their device."""
    device = operands[0].device.type
    # Dynamo of torch 2.11 cannot trace is_autocast_available, and traces no device without autocast
    known = torch.compiler.is_dynamo_compiling() or torch.amp.is_autocast_available(device)
    if not known or not torch.is_autocast_enabled(device):
        return operands
    wide, dtype = (torch.float64,), torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype not in wide else x for x in operands
    )


def check_operands(
    q: Tensor, k: Tensor, v: Tensor, key_keep: Tensor | None, bias: Tensor | None, enable_gqa: bool
) -> None:
    """Check shapes, dtypes and devices of `sparse_attention`'s operands.

    Raises:
        StofError: something does not fit; the message shows what came and what is wanted.
    """
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise StofError(
            "sparse_attention: q, k and v have 4 dimensions [batch, heads, length, dim]; "
            f"got {q.dim()}, {k.dim()}, {v.dim()}"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise StofError(
            "sparse_attention: q [B,H,Q,D], k [B,G,K,D] and v [B,G,K,E] must agree; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[3] == 0:
        raise StofError(
            f"sparse_attention: q has head dim 0, it must be at least 1; {list(q.shape)}"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype or not q.is_floating_point():
        raise StofError(
            f"sparse_attention: q, k and v share one float dtype; "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.device != k.device or q.device != v.device:
        raise StofError(
            f"sparse_attention: q, k and v are on one device; "
            f"got {q.device}, {k.device}, {v.device}"
        )
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise StofError(
            f"sparse_attention: q has {q.shape[1]} heads and k has {k.shape[1]}; "
            "pass enable_gqa=True to share them"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise StofError(
            f"sparse_attention: q's {q.shape[1]} heads are no multiple of k's {k.shape[1]}"
        )
    if key_keep is not None and (
        key_keep.dtype != torch.bool
        or key_keep.dim() != 2
        or key_keep.shape[0] not in (1, q.shape[0])
        or key_keep.shape[1] != k.shape[2]
    ):
        raise StofError(
            f"sparse_attention: key_keep is bool [1 or {q.shape[0]}, {k.shape[2]}]; "
            f"got {key_keep.dtype} {list(key_keep.shape)}"
        )
    if bias is not None:
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        fits = bias.dim() <= 4 and all(
            size in (1, wanted)
            for size, wanted in zip(reversed(bias.shape), reversed(full), strict=False)
        )
        if not bias.is_floating_point() or not fits:
            raise StofError(
                f"sparse_attention: bias is a float tensor broadcastable to {list(full)}; "
                f"got {bias.dtype} {list(bias.shape)}"
            )


def check_numbers(scale: float | None, softcap: float | None) -> None:
    """Check the factor of the scores and their cap.

    Raises:
        StofError: one is no number, not finite, wants a gradient, or the cap is negative.
    """
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | numbers.Real | Tensor):
            raise StofError(f"sparse_attention: {name} is a number, got {value!r}")
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            step = "multiply q by it, and give scale=1.0"
            if name == "softcap":
                step = "give its .item(), or write the attention in plain PyTorch to learn it"
            raise StofError(
                f"sparse_attention: {name} is a constant, and got a tensor that requires a "
                f"gradient, which would be lost; {step}"
            )
        if torch.compiler.is_compiling():  # its value may be a symbol
            continue
        if not math.isfinite(value) or (name == "softcap" and value < 0):
            least = " of at least 0 (0 = none)" if name == "softcap" else ""
            raise StofError(f"sparse_attention: {name} is a finite number{least}, got {value}")


def check_tensor_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """Check a mask tensor; SDPA would add a float one and broadcast one that is too small.

    Raises:
        StofMaskError: it is not bool, or does not fit.
    """
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    leading = {2: (), 3: full[:1], 4: full[:2]}.get(mask.dim())
    if (
        leading is None
        or mask.shape[-2:] != full[2:]
        or any(size not in (1, wanted) for size, wanted in zip(mask.shape, leading, strict=False))
    ):
        raise StofMaskError(
            "sparse_attention: a mask tensor is [q_len, k_len], [batch, q_len, k_len] or [batch, "
            f"heads, q_len, k_len], here {list(full)}, batch and heads may be 1; "
            f"got {list(mask.shape)}; give a rule where lengths vary"
        )
    if mask.dtype != torch.bool:
        raise StofMaskError(
            f"sparse_attention: a mask tensor is bool with True = attend, got {mask.dtype}; "
            "pass what is added to the scores as bias="
        )
