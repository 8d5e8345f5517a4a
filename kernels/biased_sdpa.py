"""PyTorch's SDPA with an additive bias that has more bits than the queries, which keeps them: a
score of hundreds rounded to fp16 or bf16 is another score."""

from collections.abc import Sequence

import torch
from torch import Tensor


def bias_dtype(q_dtype: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a bias of this dtype is given to SDPA as: the queries' dtype if that holds all of it,
    else fp32."""
    return q_dtype if torch.promote_types(q_dtype, dtype) == q_dtype else torch.float32


def operand_dtype(q_dtype: torch.dtype, added: torch.dtype, device_type: str) -> torch.dtype:
    """What SDPA takes q, k and v as beside a bias of ``bias_dtype``: its fused kernels take one of
    fp32 beside half types on a CPU, and of the operands' dtype only on a GPU."""
    return q_dtype if device_type == "cpu" else added


def converted(tensors: Sequence[Tensor], dtype: torch.dtype, q_dtype: torch.dtype) -> list[Tensor]:
    """The tensors in a dtype, of which ``q_dtype`` says what they have."""
    return list(tensors) if dtype == q_dtype else [tensor.to(dtype) for tensor in tensors]
