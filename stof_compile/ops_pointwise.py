"""The operator of elementwise chains: schema, fake and the way to its generated kernels.

For inference: it has no gradient. Triton is imported when it first meets a device that needs it.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stof_compile.launchers import load_launcher


@torch.library.triton_op("stof::fused_pointwise", mutates_args=())
def fused_pointwise(
    operands: Sequence[Tensor], program: str, shape: Sequence[int], config: Sequence[int]
) -> Tensor:
    """Compute a chain of elementwise steps; see ``pointwise_forward`` in kernels/pointwise.py."""
    done: Tensor = _launcher()(operands, program, shape, config)
    return done


def _launcher() -> Callable[..., Any]:
    return load_launcher("stof::fused_pointwise", "pointwise", "pointwise_forward")


@fused_pointwise.register_fake
def _(
    operands: Sequence[Tensor], program: str, shape: Sequence[int], config: Sequence[int]
) -> Tensor:
    if operands[0].is_cuda:  # makes the generator part of torch's cache keys
        _launcher()
    return operands[0].new_empty(shape, dtype=getattr(torch, json.loads(program)["dtype"]))
