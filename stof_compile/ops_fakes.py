"""What the attention operators return where nothing is computed: shapes, dtypes and strides."""

from __future__ import annotations

import torch
from torch import Tensor


def fake_attention(
    q: Tensor, v: Tensor, return_lse: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The shapes and strides of every attention operator: (out in [B,Q,H,E] memory, lse)."""
    batch, heads, q_len = q.shape[:3]
    out = q.new_empty((batch, q_len, heads, v.shape[3]), dtype=dtype).transpose(1, 2)
    lse = q.new_empty((batch, heads, q_len) if return_lse else (0,), dtype=torch.float32)
    return out, lse


def fake_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The shapes of (dq, dk, dv, dbias): contiguous, dbias [0] where none is wanted."""
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dbias)
