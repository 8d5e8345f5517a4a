"""Reading a rotation in halves, ``v * cos + cat((-v_high, v_low)) * sin``, from the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from stof_compile.node_ops import VIEWS, argument, is_inplace, operation, tensor_meta

# Views of a table that keep its elements in order.
_ORDERED = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "contiguous"}
    | {"reshape_as"}
)


@dataclass(frozen=True)
class Rotation:
    """One rotated value.

    Args:
        result: the rotated value. nodes: what it is computed by, ``result`` among it.
        value, low, high: what is rotated, and its halves; views of ``root``.
        root: the value they are views of.
        cos, sin: factors, as they are broadcast. tables: nodes with their elements in order,
            as early in the graph as possible.
    """

    result: Node
    nodes: tuple[Node, ...]
    value: Node
    low: Node
    high: Node
    root: Node
    cos: Node
    sin: Node
    tables: tuple[Node, Node]


def read_rotations(node: Node) -> Rotation | str | None:
    """Read the rotation that ends with a sum.

    Returns:
        None for other nodes; the reason where it is a rotation of another kind.
    """
    if operation(node) != "add" or not _plain(node):
        return None
    for first, second in (node.args, node.args[::-1]):
        if not all(isinstance(m, Node) and operation(m) == "mul" and _plain(m) for m in node.args):
            return None
        assert isinstance(first, Node) and isinstance(second, Node)
        for cat, sin in (second.args, second.args[::-1]):
            if not isinstance(cat, Node) or not isinstance(sin, Node):
                continue
            if _interleaved(cat):
                return "neighbours are rotated, not halves (interleaved rotary embeddings)"
            halves = _halves(cat)
            if halves is None:
                continue
            minus, high, low = halves
            root = root_of(low)
            for value, cos in (first.args, first.args[::-1]):
                if not isinstance(value, Node) or not isinstance(cos, Node):
                    continue
                if root_of(value) is root is root_of(high):
                    nodes = (node, first, second, cat, minus)
                    return _behind(node, nodes, value, low, high, root, cos, sin)
    return None


def root_of(node: Node) -> Node:
    """The value that a node is a view of."""
    while operation(node) in VIEWS and not is_inplace(node):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            break
        node = source
    return node


def same_memory_of(value: Any, storage: int) -> bool:
    """Whether all tensors of a value lie in a storage."""
    if isinstance(value, list | tuple):
        return bool(value) and all(same_memory_of(part, storage) for part in value)
    held = isinstance(value, Tensor)
    return held and StorageWeakRef(value.untyped_storage()).cdata == storage


def _plain(node: Node) -> bool:
    return len(node.args) == 2 and not node.kwargs and not is_inplace(node)


def _halves(cat: Node) -> tuple[Node, Node, Node] | None:
    """(-high, high, low) of a concatenation of them along the last dimension."""
    parts, value = argument(cat, 0, "tensors"), tensor_meta(cat)
    if operation(cat) != "cat" or value is None or not isinstance(parts, list | tuple):
        return None
    if argument(cat, 1, "dim", cat.kwargs.get("axis", 0)) not in (-1, value.dim() - 1):
        return None
    if len(parts) != 2 or not all(isinstance(part, Node) for part in parts):
        return None
    minus, low = parts
    if operation(minus) != "neg" or is_inplace(minus):
        return None
    high = argument(minus, 0, "input")
    return (minus, high, low) if isinstance(high, Node) else None


def _interleaved(node: Node) -> bool:
    """Whether a value is (-odd, even) of neighbours, stacked and flattened."""
    stack = root_of(node)
    parts = argument(stack, 0, "tensors")
    if operation(stack) != "stack" or not isinstance(parts, list | tuple) or len(parts) != 2:
        return False
    return isinstance(parts[0], Node) and operation(parts[0]) == "neg"


def _behind(
    result: Node,
    nodes: tuple[Node, ...],
    value: Node,
    low: Node,
    high: Node,
    root: Node,
    cos: Node,
    sin: Node,
) -> Rotation:
    """The rotation, with a concatenation behind it that adds nothing (all of a head is rotated)."""
    reader = next(iter(result.users), None)
    if reader is not None and len(result.users) == 1 and operation(reader) == "cat":
        parts, after = argument(reader, 0, "tensors"), tensor_meta(reader)
        before = tensor_meta(result)
        one = isinstance(parts, list | tuple) and len(parts) == 2 and parts[0] is result
        if one and after is not None and before is not None and after.shape == before.shape:
            result, nodes = reader, (reader, *nodes)
    tables = _table(cos), _table(sin)
    return Rotation(result, nodes, value, low, high, root, cos, sin, tables)


def _table(node: Node) -> Node:
    """The earliest node with the elements of a table in the same order."""
    while node.op in ("call_function", "call_method") and not is_inplace(node):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            break
        before, after = tensor_meta(source), tensor_meta(node)
        if before is None or after is None or before.dtype != after.dtype:
            break
        if not (operation(node) in _ORDERED or _adds_dimensions(node)):
            break
        node = source
    return node


def _adds_dimensions(node: Node) -> bool:
    """Whether an index only adds dimensions: ``table[:, None]``."""
    if operation(node) != "getitem" or len(node.args) != 2:
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(i is None or i is Ellipsis or i == slice(None) for i in index)
