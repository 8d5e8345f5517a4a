"""Models of the zoo: attention as people write it by hand, with its inputs."""

from collections.abc import Callable
from typing import Any

import torch
from model_inputs import HEADS, HIDDEN, Built, hidden_states
from torch import Tensor, nn
from torch.nn import functional as F


class HandWritten(nn.Module):
    """Attention as people write it; ``style`` picks the spelling."""

    def __init__(self, style: str, kv_heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.style = style
        self.kv_heads = kv_heads
        self.head_dim = HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, kv_heads * self.head_dim)
        self.value = nn.Linear(HIDDEN, kv_heads * self.head_dim)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("tril", torch.tril(torch.ones(64, 64, dtype=torch.bool))[None, None])

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, HIDDEN] -> [B, S, HIDDEN]."""
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = getattr(self, f"_{self.style}")
        q = self._split(self.query(x), HEADS)
        k = self._split(self.key(x), self.kv_heads)
        v = self._split(self.value(x), self.kv_heads)
        y = attend(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.out(y)

    def _masked_fill_buffer(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[2]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / self.head_dim**0.5)
        scores = scores.masked_fill(self.tril[:, :, :s, :s].logical_not(), float("-inf"))
        return self.dropout(F.softmax(scores, dim=-1)) @ v

    def _masked_fill_inplace(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[2]
        scores = torch.matmul(q, k.transpose(2, 3)).div_(self.head_dim**0.5)
        scores.masked_fill_(self.tril[:, :, :s, :s] == 0, float("-inf"))
        return torch.matmul(scores.softmax(-1), v)

    def _where_einsum(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.arange(q.shape[2], device=q.device)
        scores = torch.einsum("bhid,bhjd->bhij", q * self.head_dim**-0.5, k)
        scores = torch.where(s[:, None] >= s[None, :], scores, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    def _einsum_bshd(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.head_dim**0.5
        out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)
        return out.transpose(1, 2)

    def _bmm(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        q, k, v = (t.reshape(b * h, s, d) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) / self.head_dim**0.5
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(b, h, s, d)

    def _baddbmm(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        q, k, v = (t.reshape(b * h, s, d) for t in (q, k, v))
        bias = torch.zeros(s, s, device=q.device).masked_fill(~self.tril[0, 0, :s, :s], -1e4)
        scores = torch.baddbmm(bias[None], q, k.mT, beta=1, alpha=d**-0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(b, h, s, d)

    def _repeat_interleave(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = HEADS // self.kv_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def _weights_escape(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.mT / self.head_dim**0.5, dim=-1)
        return weights @ v + weights.mean()

    def _sdpa_dropout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    def _scale_both(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = self.head_dim**-0.25
        scores = torch.matmul(q * factor, k.transpose(-1, -2) * factor)
        return torch.matmul(torch.nn.Softmax(dim=3)(scores), v)

    def _sdpa_user_and_rule(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.arange(q.shape[2], device=q.device)
        window = (s[:, None] - s[None, :]).abs() <= 4
        return F.scaled_dot_product_attention(q, k, v, attn_mask=window)


def hand_written(style: str, **options: Any) -> Built:
    """Two hand-written attention layers with a residual."""
    torch.manual_seed(0)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(HandWritten(style, **options) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    return Stack().eval(), {"x": hidden_states()}
