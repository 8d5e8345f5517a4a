"""PyTorch's SDPA with a mask and an additive bias. One of more bits than the queries keeps them: a
score of hundreds rounded to fp16 or bf16 is another score."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import without_autocast


def bias_dtype(q_dtype: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a bias of this dtype is given to SDPA as: the queries' dtype if that holds all of it,
    else fp32."""
    return q_dtype if torch.promote_types(q_dtype, dtype) == q_dtype else torch.float32


def operand_dtype(q_dtype: torch.dtype, added: torch.dtype, device_type: str) -> torch.dtype:
    """What SDPA takes q, k and v as beside a bias of ``bias_dtype``: its fused kernels take one of
    fp32 beside half types on a CPU, and of the operands' dtype only on a GPU."""
    return q_dtype if device_type == "cpu" else added


def biased_sdpa(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, scale: float
) -> Tensor:
    """SDPA under a mask, a bias or both; fewer key than query heads share them.

    Args:
        q: [B, Hq, Q, D]. k: [B, Hk, K, D]. v: [B, Hk, K, Dv]; of one dtype, autocast is done.
        keep: bool, True where a key is seen. bias: added to the scores. Both broadcastable to
            [B, Hq, Q, K], or None.

    Returns:
        [B, Hq, Q, Dv] in the dtype of q.
    """
    dtype = computed = q.dtype
    mask = keep
    if bias is not None:
        bias = bias.to(bias_dtype(dtype, bias.dtype))
        computed = operand_dtype(dtype, bias.dtype, q.device.type)
        if bias.dim() < 2:  # SDPA wants both lengths
            bias = bias.expand(q.shape[2], k.shape[2])
        mask = bias if keep is None else torch.where(keep, bias, float("-inf"))
    if computed != dtype:
        q, k, v = q.to(computed), k.to(computed), v.to(computed)
    with nullcontext() if bias is None else without_autocast(q):  # which would round the bias
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out if computed == dtype else out.to(dtype)
