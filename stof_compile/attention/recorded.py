"""What records a call of attention that is traced or run eagerly, and who gives its gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def is_recorded(*operands: Tensor | None) -> bool:
    """Whether autograd, a mode, a tracer or a transform of torch may record an eager call, which
    then has to be one of an operator with a gradient."""
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None:
        return True
    if torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0:
        return True
    if torch._C._are_functorch_transforms_active():  # what vmap hands over hides requires_grad
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def wants_kernel_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether gradients of a call may come from kernels, for which it keeps its log-sum-exp: some
    are wanted, on a GPU, and none of the bias."""
    if not q.is_cuda or not torch.is_grad_enabled():
        return False
    return not (bias is not None and bias.requires_grad) and any(t.requires_grad for t in (q, k, v))
