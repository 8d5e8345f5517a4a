"""Inductor's kernels start while the one before them ends, as ours do (kernels/overlap.py).

On Hopper and newer, where calls are replayed from CUDA graphs: Inductor's quick launcher cannot
pass the attribute on, which would cost each kernel that is launched by itself more of the host's
time than the gap between two kernels is long.

Inductor can write such kernels itself (``triton.enable_pdl``), and leaves the wait out of a kernel
that reads nothing the kernel before it wrote. The one behind could then pass the one before. Here
every kernel that starts early waits at its first statement, so that the order of all memory
accesses stays that of ordinary launches. The setting says where, by a value of its own: Inductor's
caches tell it from False and True, and Inductor, where it writes code without what is here, takes
it for False.

Only short kernels do: a gap of a microsecond is nothing beside a long one, whose programs would be
in the way of those of the kernel before it. (With all kernels LLaMA with 4,096 rows and T5 with
32,768 became 1 to 3 % slower, T5 with 128 rows 8 to 13 % faster; H100, one run each.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

from torch._logging._internal import warning_once

logger = logging.getLogger("stof_compile")

SETTING = "triton.enable_pdl"
EARLY = ""  # neither False nor True, and false
HEURISTICS = ("pointwise", "reduction", "persistent_reduction")
"""Kinds of kernels that may start early; others stay as torch.compile launches them."""
MOST_ELEMENTS = 1 << 20
"""Elements that a kernel may go through to start early, each size rounded up to a power of two."""

WAIT = "    tl.extra.cuda.gdc_wait()\n    tl.extra.cuda.gdc_launch_dependents()\n"
_SIZES = re.compile(r"size_hints=\{([^}]*)\}")
_KIND = re.compile(r"@triton_heuristics\.(\w+)\(")
_HOPPER = re.compile(r"DeviceProperties\(type='cuda'[^)]*?\bcc=(?:9\d|\d{3,})\b")
_SIGNATURE = re.compile(r"def [\w.]+\([^\n]*\):\n")


def early_start_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Inductor and, where torch has it and they do not switch it off, early starts."""
    from torch._inductor import config

    asked = settings.get(SETTING, EARLY)
    off = not asked and asked != EARLY
    if off or not hasattr(config.triton, SETTING.rpartition(".")[2]):
        return dict(settings)
    return {**settings, SETTING: EARLY}


def with_every_wait(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Inductor, without early starts as it writes them itself, which leave waits out:
    the user or torch's environment may ask for these, and is told."""
    from torch._inductor import config

    if not settings.get(SETTING, getattr(config.triton, SETTING.rpartition(".")[2], False)):
        return dict(settings)
    warning_once(
        logger,
        "Inductor's %s leaves waits out that STOF's kernels rely on: it is off in what STOF "
        "compiles, where short kernels start early by STOF's own rule unless it is set to False",
        SETTING,
    )
    return {**settings, SETTING: False}


@contextmanager
def kernels_starting_early() -> Iterator[None]:
    """Have Inductor write kernels that start early, where its settings are ours.

    Not to be entered by two threads at a time: ``remembered_kernel_facts`` around it has a lock.
    """
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    writer: Any = TritonKernel
    write: Callable[..., Any] | None = writer.__dict__.get("codegen_kernel")
    if write is None:
        yield
        return

    def codegen_kernel(self: Any, *given: Any, **named: Any) -> Any:
        code = write(self, *given, **named)
        asked = getattr(config.triton, "enable_pdl", False) == EARLY
        return with_early_start(code) if asked and isinstance(code, str) else code

    writer.codegen_kernel = codegen_kernel
    try:
        yield
    finally:
        writer.codegen_kernel = write


def with_early_start(code: str) -> str:
    """Inductor's code of one of its kernels; waiting first where it is to start early."""
    head, mark, rest = code.partition("@triton.jit\n")
    kind, signature = _KIND.search(head), _SIGNATURE.match(rest)
    if kind is None or kind[1] not in HEURISTICS or signature is None or not _HOPPER.search(head):
        return code
    if not 0 < _elements(head) <= MOST_ELEMENTS:
        return code
    if "'launch_pdl': False" in head:
        head = head.replace("'launch_pdl': False", "'launch_pdl': True", 1)
    else:
        head = head.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1)
    return head + mark + rest[: signature.end()] + WAIT + rest[signature.end() :]


def _elements(head: str) -> int:
    """Elements that a kernel goes through by its decorator; 0 where it does not say."""
    sizes = _SIZES.search(head)
    hints = re.findall(r":\s*(\d+)", sizes[1]) if sizes else []
    return prod(map(int, hints)) if hints else 0
