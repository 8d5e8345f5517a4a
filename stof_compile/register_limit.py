"""Kernels of ours in Inductor's code that may have so many registers a thread and no more.

Inductor hands a fixed choice of options to Triton. The code it writes for such a kernel asks for
the decorator here (``kernel_facts.with_register_limit``), which adds one: ``maxnreg`` of
``triton_meta``. It runs in Inductor's processes that compile, too, and is pickled back from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor.runtime import triton_heuristics

OPTION = "maxnreg"


class LimitedAutotuner(triton_heuristics.CachingAutotuner):
    """Inductor's launcher of a kernel whose ``triton_meta`` has a limit of registers."""

    def _create_compile_options(self, *given: Any) -> dict[str, Any]:
        options: dict[str, Any] = super()._create_compile_options(*given)
        if self.device_props.type == "cuda" and OPTION in self.triton_meta:
            options[OPTION] = self.triton_meta[OPTION]
        return options


def user_autotune(*given: Any, **named: Any) -> Callable[[Any], Any]:
    """``triton_heuristics.user_autotune`` with the limit; without where torch is made otherwise."""
    decorate = triton_heuristics.user_autotune(*given, **named)

    def limited(function: Any) -> Any:
        tuner = decorate(function)
        kind = triton_heuristics.CachingAutotuner
        if type(tuner) is kind and hasattr(kind, "_create_compile_options"):
            tuner.__class__ = LimitedAutotuner
        return tuner

    return limited
