"""Modes of torch that a graph is compiled under, for a process that compiles it for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
SDPA = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")  # may be switched off


@dataclass(frozen=True)
class TorchModes:
    """Modes of torch that are part of what a graph is compiled for.

    Args:
        dtype: the default one. fp32_precision, reduced: of products on CUDA. sdpa: kernels that
            are on, by name. deterministic: whether algorithms have to be, whether others only warn,
            and whether memory that nothing has set is filled. threads: on the CPU.
    """

    grad: bool
    inference: bool
    dtype: torch.dtype
    fp32_precision: str
    reduced: tuple[tuple[str, Any], ...]
    sdpa: tuple[tuple[str, bool], ...]
    deterministic: tuple[bool, bool, bool]
    threads: int

    @classmethod
    def here(cls) -> TorchModes:
        """Those of this process.

        Raises:
            RuntimeError: torch cannot tell, since the older and the newer of its ways to choose the
                precision were mixed.
        """
        cuda, sure = torch.backends.cuda, torch.utils.deterministic
        _ = cuda.matmul.allow_tf32  # Inductor will ask, too
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            cuda.matmul.fp32_precision,
            tuple((name, getattr(cuda.matmul, name)) for name in REDUCED),
            tuple((name, getattr(cuda, f"{name}_enabled")()) for name in SDPA),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                sure.fill_uninitialized_memory,  # type: ignore[attr-defined]
            ),
            torch.get_num_threads(),
        )  # fmt: skip

    @contextmanager
    def on(self) -> Iterator[None]:
        """Compile under them; those without a context of their own stay."""
        cuda = torch.backends.cuda
        if cuda.matmul.fp32_precision != self.fp32_precision:
            cuda.matmul.allow_tf32 = self.fp32_precision == "tf32"  # either way can be read then
        for name, value in self.reduced:
            setattr(cuda.matmul, name, value)
        for name, value in self.sdpa:
            getattr(cuda, f"enable_{name}")(value)
        enabled, warn_only, fill = self.deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.threads)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            yield
