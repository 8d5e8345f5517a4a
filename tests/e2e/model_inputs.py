"""Sizes of the zoo's models and the inputs they share."""

from typing import Any

import torch
from torch import Tensor, nn

HIDDEN = 64
HEADS = 4
LENGTH = 32
BATCH = 2
VOCABULARY = 96

Built = tuple[nn.Module, dict[str, Any]]
"""A model and its keyword inputs."""


def token_ids(length: int = LENGTH) -> Tensor:
    """Random token ids [BATCH, length]; 0 and 1 are left to padding and start tokens."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, VOCABULARY, (BATCH, length), generator=generator)


def padding_mask(length: int = LENGTH, side: str = "right") -> Tensor:
    """Attention mask [BATCH, length] in Hugging Face's convention (1 = attend); the second row is
    shorter."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    if side == "right":
        mask[1, length - 8 :] = 0
    else:
        mask[1, :8] = 0
    return mask


def hidden_states(length: int = LENGTH) -> Tensor:
    """Random numbers [BATCH, length, HIDDEN]."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(BATCH, length, HIDDEN, generator=generator)
