"""What our Triton kernels write, worked out once a kernel instead of several times a call site.

Functionalisation and Inductor ask torch which arguments a user's kernel writes wherever it is
called, and torch lowers the kernel to Triton's IR each time it is asked (pytorch/pytorch#193227):
for twelve layers with four of our kernels each this was most of a cold compile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

KERNELS = "stof_compile.kernels."
ASKED = ("identify_accessed_tensors", "identify_mutated_tensors")  # torch 2.13; 2.11

_known: dict[tuple[Any, ...], Any] = {}
_lock = RLock()


@contextmanager
def remembered_kernel_effects() -> Iterator[None]:
    """Answer torch's question from memory, for our own kernels, while this context is open.

    What a kernel writes depends on its source, its constants and the kinds of its arguments only.
    Where torch has no such function, nothing is changed.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    name = next((name for name in ASKED if hasattr(triton_kernel_wrap, name)), None)
    if name is None:
        yield
        return
    with _lock:
        asked = getattr(triton_kernel_wrap, name)
        setattr(triton_kernel_wrap, name, _remembering(asked))
        try:
            yield
        finally:
            setattr(triton_kernel_wrap, name, asked)


def _remembering(asked: Callable[..., Any]) -> Callable[..., Any]:
    def answer(kernel: Any, kwargs: dict[str, Any], *descriptors: Any) -> Any:
        key = _key(kernel, kwargs, descriptors)
        if key is None:
            return asked(kernel, kwargs, *descriptors)
        if key not in _known:
            _known[key] = asked(kernel, kwargs, *descriptors)
        return copy.copy(_known[key])

    return answer


def _key(
    kernel: Any, kwargs: dict[str, Any], descriptors: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """What the answer depends on; None for what is not ours or cannot be told."""
    module = getattr(getattr(kernel, "fn", None), "__module__", None) or ""
    if not module.startswith(KERNELS) or any(descriptors):
        return None
    kinds: list[tuple[Any, ...]] = []
    for name, value in sorted(kwargs.items()):
        if isinstance(value, torch.Tensor):
            kinds.append((name, "tensor", value.dtype))
        elif hasattr(value, "get_dtype"):  # Inductor's own tensors
            kinds.append((name, "tensor", value.get_dtype()))
        elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
            kinds.append((name, type(value).__name__, value))
        else:
            return None
    return (kernel.fn, tuple(kinds))
