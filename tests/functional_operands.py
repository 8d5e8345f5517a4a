"""Operands and a mask for the tests of sparse_attention."""

import torch

from stof_compile import masks

WINDOW = masks.causal() & masks.sliding_window(20)


def operands(
    q_len: int = 70, k_len: int = 70, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, q_len, 16), (2, 2, k_len, 16), (2, 2, k_len, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
