"""Programmatic dependent launch: a kernel starts while the one before it in the stream ends.

On Hopper and newer a kernel launched so gets its blocks onto the multiprocessors as soon as all
blocks of the kernel before it have allowed that, which ours do when they start, or have ended
(those of libraries, of Inductor and of the Hopper linear kernel, which says why). It then waits
where it asks to: here at its first statement (``overlap_kernel.py``), before it reads or writes
memory, so that the order of all memory accesses stays that of ordinary launches. What is saved is
the gap between two kernels.

Every block of such a kernel has to wait: else the kernel after it could pass the one before it.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch

from . import bound_launch
from .bound_launch import Repeat

ARGUMENT = "PDL"
"""The constant of a kernel that calls ``start_after_previous``."""
REGISTERS = "REGISTERS"
"""The constant of a kernel that says how many registers a thread may have; 0: any number."""

_traced: ContextVar[bool] = ContextVar("stof_overlapping_launches_in_traces", default=False)


@contextlib.contextmanager
def overlap_in_traces() -> Iterator[None]:
    """Let launches that are traced meanwhile overlap, too.

    Whoever opens this has to see to it that the compiler passes the launch attribute on
    (``launch_pdl``), and limits of registers, and does not take the wait for a write to all
    arguments.
    """
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)


class OverlappingKernel:
    """A kernel with the argument ``PDL``, which is set where the device and the caller allow it.

    A limit of registers (``REGISTERS``) reaches the assembler, too; in traces whoever opened
    :func:`overlap_in_traces` sees to it.

    Args:
        kernel: a Triton kernel whose constants come last. device: it runs there.
        again: give the launch back as ``bound_launch.launch`` does, in the kernel's order of
            arguments; None in traces, and on AMD, where a compiled form depends on more than that
            knows.
    """

    def __init__(self, kernel: Any, device: torch.device, again: bool = False) -> None:
        self._kernel, self._device, self._again = kernel, device, again

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """The kernel on a grid, to be called with its arguments."""

        def start(*arguments: Any, **named: Any) -> Repeat | None:
            from torch._library.triton import is_wrap_triton_enabled

            able = _overlaps(self._device)
            if is_wrap_triton_enabled():  # traced
                named[ARGUMENT] = able and _traced.get()
                if REGISTERS in named and not _traced.get():
                    named[REGISTERS] = 0  # nobody passes it on
                torch.library.wrap_triton(self._kernel)[grid](*arguments, **named)
                return None
            named[ARGUMENT] = able
            if able:
                named["launch_pdl"] = True
            if named.get(REGISTERS) and torch.version.hip is None:
                named["maxnreg"] = named[REGISTERS]
            if self._again and torch.version.hip is None:
                names = [name for name in self._kernel.arg_names if name in named]
                constants = {name: named.pop(name) for name in names}
                return bound_launch.launch(self._kernel, grid[0], arguments, constants, named)
            self._kernel[grid](*arguments, **named)
            return None

        return start


@lru_cache(maxsize=16)
def _overlaps(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
