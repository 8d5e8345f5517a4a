"""The operator of the ``stof`` namespace that attends under a block mask on the CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stof_compile.ops import attention_gradient, save_attention
from stof_compile.ops_fakes import fake_attention


@torch.library.custom_op("stof::attention_cpu", mutates_args=(), device_types="cpu")
def attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plane_map: Tensor,
    row_ptr: Tensor,
    full_start: Tensor,
    col_idx: Tensor,
    bitmap_id: Tensor,
    bitmap: Tensor,
    row_order: Tensor,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    config: Sequence[int],
    return_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Attend on the CPU; see ``kernels.attention_cpu.attention_cpu_forward``.

    Args:
        config: (block_q, block_k) of the mask. kernel: "gather", "flex" or "sdpa".
    """
    from stof_compile.kernels.attention_cpu import attention_cpu_forward

    mask = (plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order)
    block = (config[0], config[1])
    out, lse = attention_cpu_forward(
        q, k, v, mask, key_keep, bias, scale, softcap, q_offset, band, block, return_lse, kernel
    )
    return out, lse


@attention_cpu.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return fake_attention(q, v, rest[-2])


attention_cpu.register_autograd(attention_gradient, setup_context=save_attention)
