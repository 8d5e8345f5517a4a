"""FlexAttention's kernels for the CPU, begun before Inductor gets the graph around them.

FlexAttention is compiled apart from the graph, at the first call of its operator; g++ alone takes
3 s for it. Where the graph shows the operands, g++ starts here, and works while Inductor's
Python leaves all cores but one idle.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from stof_compile.example_values import is_static
from stof_compile.measure import real_tensors
from stof_compile.node_ops import tensor_meta

logger = logging.getLogger("stof_compile")


def begin_flex_kernels(gm: GraphModule) -> None:
    """Begin to compile FlexAttention for the calls of a graph; nothing runs.

    Calls whose sizes are symbols, or whose mask is no buffer, wait for their first call, as do
    those that fail here.
    """
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.stof.attention_cpu.default)
    for operands in (_operands(gm, node) for node in calls):
        if operands is not None:
            _begin(*operands)


def _begin(q: Any, k: Any, v: Any, mask: list[Tensor], key_keep: Any, *rest: Any) -> None:
    from stof_compile.kernels.attention_cpu_flex import FlexCall, flex_ahead

    try:
        with real_tensors(), torch.inference_mode(False):
            keep = None if key_keep is None else _like(key_keep)
            flex_ahead(FlexCall(_like(q), _like(k), _like(v), mask, keep, *rest))
    except Exception as failure:  # the first call tries again, and tells
        logger.info("FlexAttention is compiled at its first call: %r", failure)


def _like(example: Tensor) -> Tensor:
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)


def _operands(gm: GraphModule, node: Node) -> tuple[Any, ...] | None:
    """What ``FlexCall`` takes, tensors as example values; None where it cannot be told."""
    given: tuple[Any, ...] = node.args
    if len(given) != 19 or node.kwargs or given[18] != "flex":
        return None
    key_keep, bias, scale, softcap, q_offset, band, config = given[10:17]
    tensors, arrays = [*given[:3], *([] if key_keep is None else [key_keep])], given[3:10]
    values = [tensor_meta(x) for x in tensors]
    if any(value is None or not is_static(value) for value in values) or bias is not None:
        return None
    if not all(isinstance(x, Node) and x.op == "get_attr" for x in arrays):
        return None
    if not all(isinstance(x, int | float) for x in (scale, softcap, q_offset, *band, *config)):
        return None
    mask = [getattr(gm, str(x.target)) for x in arrays]
    keep = None if key_keep is None else values[3]
    return (*values[:3], mask, keep, scale, softcap, q_offset, list(band), tuple(config))
