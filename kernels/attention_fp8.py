"""Block-wise attention on the e4m3 operands of ``rounding.py``.

The kernel is that of ``blockwise_kernel.py``. Scores are sums in fp32 of products of e4m3 numbers,
times the scales of their heads; weights are rounded to e4m3 before the second product, and added up
by it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention_blockwise import KERNELS, attention_block_forward
from .problem import Rounded
from .rounding import KEY_STEP, ONES

__all__ = ["KERNELS"]


def attention_fp8_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Sequence[Tensor],
    dtype: torch.dtype,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    config: Sequence[int],
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the block-wise kernel on operands of ``round_heads``.

    Args:
        q: e4m3 [batch, heads, q_len, head_dim].
        k: e4m3 [batch, kv_heads, k_len, head_dim].
        v: e4m3 [batch, kv_heads, value_dim + ONES, k_len up to a multiple of KEY_STEP]: zeros
            behind the keys, ones behind the dimensions.
        scales: fp32, of q [batch, heads], of k and of v [batch, kv_heads].
        dtype: of the result.
        mask, key_keep, bias, scale, softcap, q_offset, band, config, return_lse: as for
            ``attention_block_forward``; tiles of config have 32 keys at least, ``hopper`` is 0.

    Returns:
        out: as ``attention_block_forward`` has it, in ``dtype``. lse: likewise, of the weights as
            they were rounded, so that results that are merged by it are as if they were one.

    Raises:
        ValueError: an argument does not fit the others.
    """
    k_len = k.shape[2]
    whole = -(-k_len // KEY_STEP) * KEY_STEP
    if v.dim() != 4 or v.shape[3] != whole or v.shape[2] <= ONES or not v.is_contiguous():
        raise ValueError(
            f"attention kernel: v must be contiguous [batch, kv_heads, value_dim + {ONES}, {whole}]"
            f" for {k_len} keys in e4m3; got {tuple(v.shape)}, strides {v.stride()}"
        )
    seen = v.transpose(2, 3).narrow(2, 0, k_len).narrow(3, 0, v.shape[2] - ONES)
    q_scale, k_scale, v_scale = (s.contiguous() for s in scales)
    rounded = Rounded(q_scale, k_scale, v_scale, dtype, v)
    return attention_block_forward(
        q, k, seen, mask, key_keep, bias, scale, softcap, q_offset, band, config, return_lse,
        rounded,
    )  # fmt: skip
