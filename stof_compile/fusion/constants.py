"""Canonical text of what a call is given besides tensors: eps, scale, dimensions, flags."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from stof_compile.fusion.op_kind import OpKind
from stof_compile.node_ops import operation, permutation

Slot = Callable[[Node], str]


def call_constants(node: Node, kind: OpKind | None, slot: Slot) -> str:
    """Write the arguments of a call as JSON, with a slot for each node among them.

    Two calls of one kind, with operands and results of the same shapes and dtypes, do the same
    when their texts are equal. Names of nodes never appear. The arguments of a reshape, an
    expansion or a cast are left out, because the shape and dtype of the result tell all; a
    transposition in any spelling is its order of dimensions.

    Args:
        node: the call.
        kind: its kind, None for an inner node of an attention written out.
        slot: node among the arguments -> text of its place.
    """
    order = permutation(node)
    if kind is not None and (kind.name in ("reshape", "expand", "cast") or order is not None):
        told = list(order) if order is not None and kind.name == "permute" else []
        return json.dumps([kind.name, told, [slot(node.all_input_nodes[0])]])
    kwargs = {key: _plain(value, slot) for key, value in node.kwargs.items()}
    parts = [operation(node), [_plain(value, slot) for value in node.args], kwargs]
    return json.dumps(parts, sort_keys=True)


def size_text(size: Any) -> int | str:
    """A size that can stand in JSON: an int, or the expression of a symbolic one."""
    return size if isinstance(size, int) else str(size)


def _plain(value: Any, slot: Slot) -> Any:
    """A JSON value; what is no constant that can be written down is told apart by its type."""
    if isinstance(value, Node):
        return {"slot": slot(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, list | tuple):
        return [_plain(item, slot) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(k, slot), _plain(v, slot)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_plain(v, slot) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis or isinstance(
        value, torch.dtype | torch.device | torch.memory_format | torch.layout | torch.SymInt
    ):
        return {"torch": str(value)}
    # repr may hold an address: then such calls are never equal, which loses a match and no more
    return {type(value).__name__: repr(value)}
