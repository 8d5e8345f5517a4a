"""Kernel launchers, imported when an operator first meets a device that needs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch


@cache
def load_launcher(operator: str, module: str, function: str) -> Callable[..., Any]:
    """Import the launcher of a Triton operator and make its kernels known to torch's caches.

    torch reads the kernels of an operator when the operator is defined, before ours are imported;
    it needs their source in the keys of its compile caches, or an edited kernel would be ignored.

    Args:
        operator: qualified name, ``stof::...``.
        module: module of ``stof_compile.kernels`` with the launcher and a tuple ``KERNELS`` of the
            Triton kernels it may start.
        function: name of the launcher.
    """
    loaded = import_module(f"stof_compile.kernels.{module}")
    known = getattr(torch._library.triton, "triton_ops_to_kernels", None)
    if known is not None:
        known[operator] = list(loaded.KERNELS)
    launcher: Callable[..., Any] = getattr(loaded, function)
    return launcher
