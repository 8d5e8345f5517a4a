"""The config an attention kernel for GPUs runs with where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from stof_compile.errors import StofUnsupportedError


def first_gpu_config(
    kernel: str, q: Tensor, value_dim: int, plain: bool, *, fp8: bool = False
) -> tuple[int, ...]:
    """The first config of "block", "row" or "gather" for a problem that was not measured.

    Args:
        q: [batch, heads, q_len, head_dim] on a GPU. value_dim: of v.
        plain: no padding, no bias, no softcap, a positive scale. fp8: q, k and v will be e4m3.
    Raises:
        StofUnsupportedError: the kernel has none for these head dims and this dtype.
    """
    from stof_compile.kernels.limits import tf32_allowed

    batch, heads, q_len, head_dim = q.shape
    dtype = torch.float8_e4m3fn if fp8 else q.dtype
    problem = head_dim, dtype, torch.cuda.get_device_capability(q.device)
    found = _first_config(kernel, *problem, value_dim, q_len, batch * heads, plain, tf32_allowed())
    if found is None:
        raise StofUnsupportedError(
            f"no sparse kernel fits head dims {head_dim} and {value_dim} in {dtype} on this GPU"
        )
    return found


@lru_cache(maxsize=1024)  # making all configs takes longer than a launch
def _first_config(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    value_dim: int,
    q_len: int,
    planes: int,
    plain: bool,
    tf32: bool,
) -> tuple[int, ...] | None:
    """The first config of a kernel; None where it has none.

    Args:
        planes: batch times heads. tf32: what ``limits.tf32_allowed`` says, which configs follow.
    """
    from stof_compile.kernels import attention_blockwise, attention_gather, attention_rowwise

    problem = head_dim, dtype, capability
    found: Sequence[tuple[int, ...]]
    if kernel == "row":
        found = attention_rowwise.configs(*problem, value_dim=value_dim)
    elif kernel == "gather":
        found = attention_gather.configs(*problem, value_dim=value_dim, q_len=q_len)
    else:
        found = attention_blockwise.configs(
            *problem, value_dim=value_dim, q_len=q_len, planes=planes, plain=plain
        )
    return found[0] if found else None
