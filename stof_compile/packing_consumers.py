"""Who reads the result of a layer, and whether a slice of a wider result will do for them.

A slice has the same values with other strides, and shares its memory with the other slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from stof_compile.emit import autocast_at, fake_mode_of, fake_result
from stof_compile.fusion.op_kind import is_attention, op_kind
from stof_compile.node_ops import VIEWS, is_inplace, operation, raw_name, tensor_meta

# Readers of the memory itself: a slice shows them something else.
STRIDE_READERS = frozenset(
    {"as_strided", "stride", "storage_offset", "is_contiguous", "data_ptr", "untyped_storage"}
)


def consumer_problem(result: Node) -> str | None:
    """Why a value must not become a slice of another one: something writes to it."""
    for alias in _aliases(result):
        for user in alias.users:
            if is_inplace(user) and _writes_to(user, alias):
                return f"'{user.name}' writes to '{result.name}'"
    return None


def needs_copy(result: Node, total: int, start: int) -> bool:
    """Whether a value has to be copied out of a wider one.

    True when it, or a view of it, is returned (the caller would get memory that results share),
    when a view of it would fail (``view(-1)``), and when a reader is not known to take any strides
    (a kernel of the user, which got the strides as numbers).

    Args:
        result: node of shape [..., n]. total: elements of the wider value's last dimension.
        start: where in it the value begins.
    """
    aliases = list(_aliases(result))
    for alias in aliases:
        for user in alias.users:
            if user.op == "output" or not _takes_strides(user):
                return True
    return not _views_hold(result, aliases, total, start)


def update_values(graph: Graph, start: Node) -> None:
    """Compute the example values anew of what reads a node, as far as they change."""
    regions = any(raw_name(node) == "_enter_autocast" for node in graph.nodes)
    changed = {start}
    node = start.next
    while node.op != "root":
        if not changed.isdisjoint(node.all_input_nodes) and _is_known(node):
            with autocast_at(graph, node) if regions else ExitStack():
                value = fake_result(node)
            if value is not None and not _alike(value, node.meta.get("example_value")):
                node.meta["example_value"] = value
                changed.add(node)
        node = node.next


def _aliases(result: Node) -> Iterator[Node]:
    """The node and all views of it, in graph order of their sources."""
    waiting, seen = [result], {result}
    while waiting:
        node = waiting.pop(0)
        yield node
        for user in node.users:
            first = user.args[0] if user.args else None
            if user not in seen and operation(user) in VIEWS and first is node:
                seen.add(user)
                waiting.append(user)


def _writes_to(node: Node, target: Node) -> bool:
    written = node.kwargs.get("out") or (node.args[0] if node.args else None)
    return target in (written if isinstance(written, list | tuple) else (written,))


def _takes_strides(node: Node) -> bool:
    """Whether a reader is an operation of torch or of ours, all of which take any strides."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return is_attention(node)
    name = raw_name(node)
    ours = "::" not in name or name.startswith("stof::")
    return bool(name) and ours and name not in STRIDE_READERS


def _is_known(node: Node) -> bool:
    """Whether a node may be run once more on example values: no write, no new symbols."""
    if node.op not in ("call_function", "call_method") or is_inplace(node):
        return False
    return op_kind(node) is not None or operation(node) in VIEWS


def _views_hold(result: Node, aliases: list[Node], total: int, start: int) -> bool:
    """Whether all views of a value can be taken of a slice, too."""
    value = tensor_meta(result)
    assert value is not None, "a result is a tensor"
    mode = fake_mode_of([value])
    with mode if mode is not None else ExitStack(), torch.no_grad():
        wide = value.new_empty((*value.shape[:-1], total))
        values: dict[Node, Any] = {result: wide.narrow(-1, start, value.shape[-1])}
        for node in sorted(aliases):
            if node is result:
                continue
            try:
                values[node] = _run(node, lambda n: values.get(n, n.meta.get("example_value")))
            except (RuntimeError, ValueError):  # a view across the gap between two rows
                return False
    return True


def _run(node: Node, value: Callable[[Node], Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target), "call_function nodes have a callable target"
    return node.target(*args, **kwargs)


def _alike(a: Any, b: Any) -> bool:
    """Whether two example values have the same shapes, strides and dtypes."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.dim()) == (b.dtype, b.dim()) and all(
            str(m) == str(n)
            for m, n in zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True)
        )
    return type(a) is type(b)
