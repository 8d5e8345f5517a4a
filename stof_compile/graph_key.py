"""The key of a captured graph: equal in every process that captures the same program."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

MAX_TOLD = 3  # inputs that are named in words


def graph_key(gm: GraphModule, *, grad_enabled: bool) -> str:
    """Hash a graph up to the names of its nodes and the places of its source.

    The key covers operations, edges, constants, and shapes, dtypes, strides and device types of
    all values; not contents of tensors, module paths, files and lines, nor which GPU of a machine
    it is. Symbols are numbered in the order in which they are met.

    Args:
        gm: as Dynamo captured it, before any pass. grad_enabled: whether gradients are recorded.
    Returns:
        32 hexadecimal digits.
    """
    body = [grad_enabled, *_told(gm, {})]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:32]


def graph_words(gm: GraphModule, inputs: Iterable[Any]) -> str:
    """A graph in words, for messages: how many operations, on which inputs of the user."""
    count = sum(node.op.startswith("call_") for node in gm.graph.nodes)
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    told = [
        f"{str(t.dtype).removeprefix('torch.')} [{', '.join(map(str, t.shape))}]" for t in tensors
    ]
    more = f" and {len(told) - MAX_TOLD} more" if len(told) > MAX_TOLD else ""
    return f"{count} operations on {', '.join(told[:MAX_TOLD]) or 'no tensor'}{more}"


def _told(gm: GraphModule, symbols: dict[str, int]) -> Iterator[Any]:
    """Nodes as plain values."""
    numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        body: Any = ""
        if node.op == "get_attr":
            held = _attribute(gm, str(node.target))
            body = list(_told(held, symbols)) if isinstance(held, GraphModule) else ""
        elif node.op != "placeholder":
            body = _plain(node.target, numbers, symbols)
        args = [_plain(part, numbers, symbols) for part in (node.args, node.kwargs)]
        if node.op == "placeholder":
            args = []
        yield [node.op, body, args, _plain(node.meta.get("example_value"), numbers, symbols)]


def _attribute(gm: GraphModule, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _plain(value: Any, numbers: dict[Node, int], symbols: dict[str, int]) -> Any:
    """A value as JSON; of what has no lasting name, its type."""
    if isinstance(value, Node):
        return ["node", numbers[value]]
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout == torch.strided else ()
        sizes = [_plain(n, numbers, symbols) for n in (*value.shape, *strides)]
        return ["tensor", str(value.dtype), value.device.type, sizes]
    if isinstance(value, bool | int | float | str | type(None)):
        return repr(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return re.sub(
            r"[a-z]+\d+", lambda m: f"#{symbols.setdefault(m.group(), len(symbols))}", str(value)
        )
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format | complex):
        return str(value)
    if isinstance(value, slice):
        return ["slice", *_plain((value.start, value.stop, value.step), numbers, symbols)]
    if isinstance(value, dict):
        return {str(key): _plain(value[key], numbers, symbols) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple | torch.Size):
        return [_plain(part, numbers, symbols) for part in value]
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(value)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if name else type(value).__qualname__
