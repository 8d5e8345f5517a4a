"""What Triton looks compiled kernels up by, apart from the kernels: settled early, and handed on.

Inductor chooses the assembler (and in newer versions the device library) for Triton when it first
compiles a kernel, and the folder of Triton's cache when it first makes one. What was compiled
before, here or in another process, would not be found any more and be compiled a second time.

Triton knows an assembler by its version, which it asks for once in a process. Whatever torch
compiles before its first Triton kernel makes that the version of Triton's own assembler, since the
key of torch's cache contains it, while Inductor's workers begin with the choice and have that of
torch's. What they had compiled, a process that loaded it by itself compiled anew: 3.4 s of
BERT-base's second start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

PREFIX = "TRITON_"
CACHE_DIR = "TRITON_CACHE_DIR"
CHOICES = ("_set_triton_ptxas_path", "_set_triton_libdevice_path")  # torch 2.11 has the first only


@dataclass(frozen=True)
class TritonEnvironment:
    """What kernels that one process compiles need to be found by another.

    Args:
        variables: of the environment, those that Triton reads. compiler: what Triton's cache knows
            the compiler by, "" where it compiles for no GPU; it asks the assembler for its version
            once in a process, whatever becomes of the variables afterwards.
    """

    variables: tuple[tuple[str, str], ...]
    compiler: str = ""

    @classmethod
    def of_this_process(cls, device: torch.device) -> TritonEnvironment:
        """What holds here and now, for kernels of a device."""
        found = tuple(sorted(kv for kv in os.environ.items() if kv[0].startswith(PREFIX)))
        return cls(found, _compiler().hash() if device.type == "cuda" else "")

    def take(self) -> None:
        """Compile from now on so that the process this comes from finds the kernels.

        For processes that do nothing else.
        """
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]
        os.environ.update(self.variables)
        if self.compiler:
            type(_compiler()).hash = lambda _, compiler=self.compiler: compiler


def settle_triton_environment(device: torch.device) -> None:
    """Make Inductor's choices for Triton now; does nothing where Triton compiles nothing.

    Args:
        device: that kernels are compiled for.
    """
    if device.type != "cuda":
        return
    from torch._inductor.runtime import compile_tasks
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    for name in CHOICES:
        getattr(compile_tasks, name, lambda: None)()
    _ask_for_the_version_again()
    if os.environ.get(CACHE_DIR) is None:
        os.environ[CACHE_DIR] = triton_cache_dir(device.index or 0)


@cache
def _ask_for_the_version_again() -> None:
    """Have Triton ask the assembler that is chosen now for its version, once in a process."""
    try:
        from triton.backends.nvidia import compiler
    except ImportError:  # another backend
        return
    for asked in (
        getattr(compiler, "get_ptxas_version", None),
        getattr(getattr(compiler, "CUDABackend", None), "hash", None),
    ):
        forget = getattr(asked, "cache_clear", None)
        if forget is not None:
            forget()


def _compiler() -> Any:
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver

    return make_backend(driver.active.get_current_target())
