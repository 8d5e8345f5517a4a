"""Who reads the result of a layer, and whether one with other strides will do for them.

A slice of a wider result has the same values with other strides, and shares its memory with the
other slices. The result of an attention kernel has its own memory, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from stof_compile.emit import in_fake_mode
from stof_compile.example_values import is_static, run_on
from stof_compile.fusion.op_kind import is_attention
from stof_compile.node_ops import CASTS, VIEWS, hint, is_inplace, operation, raw_name, tensor_meta

# Readers of the memory itself: a slice shows them something else.
STRIDE_READERS = frozenset(
    {"as_strided", "stride", "storage_offset", "is_contiguous", "data_ptr", "untyped_storage"}
)

_OF_DEVICES = frozenset({"cpu", "cuda", "data", "getattr", "_get_data_attr"})


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
    value = tensor_meta(result)
    assert value is not None, "a result is a tensor"
    views = [alias for alias in _aliases(result) if alias is not result]
    # without a fake mode where that will do: a model has hundreds of such views
    bare = is_static(value) and all(map(_is_plain_view, views))
    place = torch.device("meta") if bare else value.device
    with ExitStack() if bare else in_fake_mode(value), torch.no_grad():
        wide = torch.empty((*value.shape[:-1], total), dtype=value.dtype, device=place)
        return strides_matter(result, wide.narrow(-1, start, value.shape[-1]))


def strides_matter(result: Node, other: Any) -> bool:
    """Whether the readers of a value could not read one of other strides, or of shared memory.

    Args:
        result: node of a tensor. other: a fake tensor of its shape and dtype, a view of another.
    """
    aliases = list(_aliases(result))
    for alias in aliases:
        for user in alias.users:
            if user.op == "output" or not _takes_strides(user):
                return True
    return not _views_hold(result, aliases, other)


def order_matters(result: Node, other: Any) -> bool:
    """Whether the readers of a value count on the order its dimensions have in memory.

    Follows what is computed of it as far as that inherits the order. Memory is not shared here.

    Args:
        result: node of a tensor. other: a fake tensor of its shape and dtype in another order.
    """
    values = {result: other}
    node = result.next
    with in_fake_mode(other), torch.no_grad():
        while True:
            changed = [source for source in node.all_input_nodes if source in values]
            if changed and (node.op == "output" or not _takes_strides(node)):
                return True
            if node.op == "output":
                return False
            if changed:
                try:
                    value = run_on(node, values)
                except (RuntimeError, ValueError, KeyError):  # a view across gaps; unknown operands
                    return True
                if _orders(value) != _orders(node.meta.get("example_value")):
                    values[node] = value
            node = node.next


def _orders(value: Any) -> list[list[int]]:
    """The memory orders of a result: a tensor, some, or none where it is a size."""
    return [memory_order(one) for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, the one with the largest stride first; those of size 1, whose
    stride says nothing, stay in their place."""
    strides = [hint(stride) for stride in value.stride()]
    wide = [d for d, size in enumerate(value.shape) if hint(size) != 1]
    inner = iter(sorted(wide, key=lambda d: -strides[d]))
    return [next(inner) if d in wide else d for d in range(value.dim())]


def _is_plain_view(node: Node) -> bool:
    """Whether a view depends on its source and numbers alone, and on no device."""
    return len(node.all_input_nodes) == 1 and operation(node) in VIEWS - CASTS - _OF_DEVICES


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


def _views_hold(result: Node, aliases: list[Node], other: Any) -> bool:
    """Whether all views of a value can be taken of another one in its place, too."""
    with in_fake_mode(other), torch.no_grad():
        values: dict[Node, Any] = {result: other}
        for node in sorted(aliases):
            if node is result:
                continue
            try:
                values[node] = run_on(node, values)
            except (RuntimeError, ValueError):  # a view across the gap between two rows
                return False
    return True
