"""Attention without tiles on the CPU: what runs on gathered keys, and on the whole mask."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from stof_compile.kernels.biased_sdpa import bias_dtype, biased_sdpa
from stof_compile.kernels.reference import tile_keep_rows
from torch import Tensor


def dense_forward(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    q_offset: int,
    band: Sequence[int],
    block: tuple[int, int],
) -> None:
    """Fill ``out``, and ``lse`` when it is not empty, through the whole q_len x k_len mask."""
    q_len, k_len = q.shape[2], k.shape[2]
    keep = tile_keep_rows(mask, *block, q_len, k_len, q_offset, band)(0, q_len)
    assert keep is not None, "a block mask always expands to a mask"
    if key_keep is not None:
        keep = keep & key_keep[:, None, None, :]
    if not lse.numel():
        out.copy_(biased_sdpa(q, k, v, keep, bias, scale))
        return
    group = q.shape[1] // k.shape[1]
    added = torch.zeros((), dtype=q.dtype) if bias is None else bias
    additive = added.to(bias_dtype(q.dtype, added.dtype)).masked_fill(~keep, -torch.inf)
    k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
    result, sums = fused_attention(q, k, v, additive, scale, return_lse=True)
    out.copy_(result)
    lse.copy_(sums)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Run the library's fused CPU attention.

    Args:
        q: [N, H, M, D]; k: [N, H, K, D]; v: [N, H, K, E].
        extra: added to the scores, [N or 1, H or 1, M, K], dtype of q or fp32, or None.

    Returns:
        out [N, H, M, E], 0 on rows of -inf; lse fp32 [N, H, M], -inf on such rows if it is wanted.
    """
    head_dim, value_dim = q.shape[3], v.shape[3]
    # the fused kernel wants equal head dims: zeros change neither the scores nor the wanted values
    if value_dim < head_dim:
        v = F.pad(v, (0, head_dim - value_dim))
    elif head_dim < value_dim:
        q, k = (F.pad(t, (0, value_dim - head_dim)) for t in (q, k))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=extra, scale=scale
    )
    if return_lse and extra is not None:
        # the library leaves a row of -inf undefined here
        lse = lse.masked_fill(extra.amax(-1) == -torch.inf, -torch.inf)
    return out[..., :value_dim], lse


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Same as ``fused_attention`` with softcap * tanh(score / softcap), in separate steps and fp32
    or fp64.

    Half types are widened: a score rounded to 8 bits before the softmax would cost the accuracy
    that the fused kernels have.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    x = (q.to(dtype) @ k.to(dtype).mT).mul_(scale / softcap).tanh_().mul_(softcap)
    if extra is not None:
        x = x.add_(extra)
    lse = torch.logsumexp(x, -1)
    p = torch.softmax(x, -1).masked_fill_((lse == -torch.inf).unsqueeze(-1), 0.0)
    return p @ v.to(dtype), lse.float()
