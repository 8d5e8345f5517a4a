"""What is made of a block mask when it is first asked for, and when it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stof_compile.errors import StofMaskError

Made = TypeVar("Made")


def derive(device: torch.device, what: str, make: Callable[[], Made]) -> Made:
    """What ``make`` returns, made outside of any tracing; any stream may read it then.

    Args:
        device: where it is. what: it in words, for the error.
    Raises:
        StofMaskError: the current CUDA stream is being captured.
    """
    refuse_in_capture(device, what)
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        made = make()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return made


def refuse_in_capture(device: torch.device, what: str) -> None:
    """See that what is to be made can wait for the device.

    Raises:
        StofMaskError: the current CUDA stream is being captured; says what to do.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise StofMaskError(
            f"{what}: not there yet, and making it waits for the device, which a CUDA stream "
            "that is being captured cannot; call the function once with these lengths before the "
            "capture, with its backward pass if that is captured too"
        )
