"""A small attention layer whose weights can be spread over the ranks."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention with a projection for each of q, k, v; heads are split over the ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
