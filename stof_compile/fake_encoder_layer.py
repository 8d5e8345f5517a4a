"""Tells torch what its fused encoder layer returns, where torch does not know for symbolic sizes.

torch 2.11 works an example value of ``torch._transformer_encoder_layer_fwd`` out by running it,
which takes sizes that are numbers. With symbolic ones Dynamo runs the layer eagerly: no backend
sees it, and a mask of the options would be dropped without a word. torch 2.13 has a kernel like
this one.
"""

from typing import Any

import torch
from torch import Tensor

OPERATOR = "aten::_transformer_encoder_layer_fwd"


def _fake(src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if src.is_nested:  # FakeTensorMode takes this error for "no kernel", as there was none before
        raise NotImplementedError(f"{OPERATOR} has no fake kernel for nested tensors")
    return torch.empty_like(src, memory_format=torch.contiguous_format)


if not torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, "Meta"):
    _LIBRARY = torch.library.Library("aten", "IMPL")  # the kernel goes where this object goes
    _LIBRARY.impl(OPERATOR, _fake, "Meta")
