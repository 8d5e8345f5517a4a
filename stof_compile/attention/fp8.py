"""Attention with q, k and v rounded to e4m3: where it can run, and the eager call.

It is never chosen by STOF: the option ``fp8`` and the keyword of `sparse_attention` ask for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.attention.problem import AttentionProblem
from stof_compile.errors import StofUnsupportedError
from stof_compile.masks import MaskSpec, cached_block_mask
from stof_compile.ops_first_config import first_gpu_config
from stof_compile.ops_fp8 import attend_rounded, refusal_on, round_operands

KERNEL = "block"  # the only one with an e4m3 form


def fp8_obstacle(problem: AttentionProblem, attention: str) -> str:
    """Why a site keeps its normal kernel though the options ask for fp8, empty where it need not.

    Args:
        attention: the option of that name.
    """
    if problem.training:
        return "gradients are recorded, and it has none"
    refusal = refusal_on(problem.device, problem.q.dtype, problem.head_dim, problem.v.shape[3])
    if not refusal and attention not in ("auto", KERNEL):
        return f"attention={attention!r} takes kernels that have no e4m3 form; give auto or block"
    return refusal


def refuse_fp8(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, forced: str | None) -> None:
    """Check a call of ``sparse_attention(..., fp8=True)``.

    Args:
        forced: kernel of `attention_kernel`, None for none.
    Raises:
        StofUnsupportedError: it cannot run in e4m3.
    """
    leaves = (q, k, v) if bias is None else (q, k, v, bias)
    reason = ""
    if forced not in (None, KERNEL):
        reason = f"attention_kernel({forced!r}) takes a kernel that has no e4m3 form"
    elif torch.is_grad_enabled() and any(t.requires_grad for t in leaves):
        reason = "gradients are recorded, and it has none; call it under torch.no_grad()"
    elif not torch.compiler.is_compiling() or q.device.type != "cuda":
        reason = refusal_on(q.device, q.dtype, q.shape[3], v.shape[3])  # else the operator asks
    if reason:
        raise StofUnsupportedError(f"sparse_attention: fp8 cannot be used: {reason}")


def attend_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: MaskSpec,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Round the operands, build the block mask (or find it) and run the first config."""
    batch, heads, q_len, _ = q.shape
    first = first_gpu_config(KERNEL, q, v.shape[3], False, fp8=True)
    tile = (first[0], first[1])
    block_mask = cached_block_mask(
        spec, q_len, k.shape[2], tile, batch=batch, heads=heads, device=q.device
    )
    config = honest_config(block_mask, first, batch * heads)
    band = [] if block_mask.band is None else block_mask.band.as_ints()
    arrays = mask_arrays(block_mask, config).values()
    result: Any = attend_rounded(
        *round_operands(q, k, v), *arrays, key_keep, bias, scale, softcap, 0, band, list(config),
        return_lse, q.dtype,
    )  # fmt: skip
    return result[0], result[1]
