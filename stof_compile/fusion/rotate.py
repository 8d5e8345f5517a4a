"""Rotary embeddings in halves: the definition that kernels are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def rotated(
    x: Any, cos: Any, sin: Any, sizes: tuple[int, int, int], head_dim: int, heads: Sequence[int]
) -> tuple[Any, ...]:
    """Rotate the first heads of every row: ``h cos + (-h_high, h_low) sin``.

    Args:
        x: [M, N], tensor or fx proxy: heads of ``head_dim`` elements side by side.
        cos, sin: [T, head_dim]; row r of x reads row r % T, and M is a multiple of T.
        sizes: M, N, T.
        heads: of each value that is rotated by itself (Q's, K's), from column 0 on.
    Returns:
        The rotated values [M, heads * head_dim] in order; then the columns of x that stay as they
        are, where there are any. Side by side they are the whole result.
    Source: the rotation of GPT-NeoX, as Hugging Face's LLaMA writes it.
    """
    rows, columns, period = sizes
    half, first = head_dim // 2, 0
    parts = []
    for number in heads:
        last = first + number * head_dim
        h = x[:, first:last].reshape(rows // max(period, 1), period, number, head_dim)
        low, high = h[..., :half], h[..., half:]
        turned = h * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
        parts.append(turned.reshape(rows, last - first))
        first = last
    return (*parts, x[:, first:]) if first < columns else tuple(parts)
