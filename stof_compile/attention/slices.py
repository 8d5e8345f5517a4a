"""Queries that are some of the sequence the keys are made of, as ``x[:, :1]`` or a part of a
concatenation: which ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from stof_compile.node_ops import (
    argument,
    is_module_tensor,
    operation,
    same_size,
    shape_of,
    tensor_meta,
)

_PIECES = frozenset({"chunk", "split", "tensor_split", "unbind"})


@dataclass(frozen=True)
class Rows:
    """What a node takes of a sequence.

    Args:
        node: the one that takes it, or that the sequence is put together by.
        start: the first row, None where only the run tells it, the rows do not follow each other
            or are not as many as the queries. From the end where it is negative.
        to_end: up to the last row.
    """

    node: Node
    start: int | None
    to_end: bool = False


def taken_rows(q: Node, k: Node, q_len: Any, k_len: Any) -> list[Rows]:
    """Where queries are taken from a sequence of as many rows as there are keys, which is made of
    what the keys are made of. Empty where that cannot be seen.

    Args:
        q, k: queries [B, H, Q, D] and keys. q_len, k_len: how many, ints or SymInts.
    """
    of_keys = set(_behind(k))
    found = []
    before = list(_behind(q, of_keys))
    inputs = dict.fromkeys(node for one in before for node in one.all_input_nodes)
    shared = (node for node in inputs if node in of_keys)
    for part in filter(_is_activation, shared):
        found += [
            rows
            for node in part.users
            if node in of_keys and (rows := _part_of(node, part, q_len, k_len)) is not None
        ]
    for node in before:
        source = _source(node)
        if source is None or not _is_activation(source):
            continue
        taken = _rows(node, source, q_len, k_len)
        if taken is not None and _is_all_of_the_keys(source, taken[0], of_keys, k_len):
            found.append(taken[1])
    return [rows for rows in found if rows.start is not None] or found


def _is_all_of_the_keys(source: Node, axis: int, of_keys: set[Node], k_len: Any) -> bool:
    """Whether an axis of as many entries as there are keys is theirs: they are made of what the
    source is made of, of all of that axis, and are not put behind others as those of a cache are.
    Else that the numbers agree is an accident: of q, k and v in one tensor, or of heads."""
    behind = set(_behind(source))
    made_of = set(filter(_is_activation, behind))
    if not made_of & of_keys:
        return False
    for node in of_keys - behind:
        if _source(node) is source:
            if any(taken[0] == axis for taken in _taken(node, source, shape_of(source) or ())):
                return False
        elif _puts_together(node, k_len):
            parts = (part for part in node.all_input_nodes if _is_activation(part))
            if any(made_of.isdisjoint(_behind(part)) for part in parts):
                return False
    return True


def _puts_together(node: Node, k_len: Any) -> bool:
    """Whether a node is a concatenation to as many rows as there are keys."""
    shape, axis = shape_of(node), argument(node, 1, "dim", 0)
    if operation(node) != "cat" or shape is None or not isinstance(axis, int):
        return False
    return same_size(shape[axis], k_len)


def _is_activation(node: Node) -> bool:
    values = tensor_meta(node)
    return values is not None and values.is_floating_point() and not is_module_tensor(node)


def _behind(start: Node, but: frozenset[Node] | set[Node] = frozenset()) -> Iterator[Node]:
    """A node and all that it is made of, the nearest ones first; not what ``but`` holds."""
    seen, queue = {start}, deque([start])
    while queue:
        node = queue.popleft()
        yield node
        for other in node.all_input_nodes:
            if other not in seen and other not in but:
                seen.add(other)
                queue.append(other)


def _part_of(node: Node, part: Node, q_len: Any, k_len: Any) -> Rows | None:
    """Which rows of a concatenation ``node``, of as many as there are keys, one part of it is."""
    parts, axis = argument(node, 0, "tensors"), argument(node, 1, "dim", 0)
    whole, own = shape_of(node), shape_of(part)
    if not _puts_together(node, k_len) or not isinstance(parts, list | tuple):
        return None
    if whole is None or own is None or axis % len(whole) == len(whole) - 1:
        return None
    if not same_size(own[axis], q_len):
        return None
    number = parts.index(part)
    if number == len(parts) - 1:
        return Rows(node, -own[axis] if isinstance(own[axis], int) else -1, True)
    sizes = [(shape_of(other) or own)[axis] for other in parts[:number]]
    return Rows(node, sum(sizes) if all(isinstance(size, int) for size in sizes) else None)


def _source(node: Node) -> Node | None:
    """The tensor that a node takes a part of."""
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if source is not None and operation(node) == "getitem" and operation(source) in _PIECES:
        source = source.args[0] if source.args and isinstance(source.args[0], Node) else None
    return source


def _rows(node: Node, source: Node, q_len: Any, k_len: Any) -> tuple[int, Rows] | None:
    """(axis, the rows that a node takes of its source), where that has as many as there are
    keys."""
    shape = shape_of(source)
    if shape is None or len(shape) < 2:
        return None
    for axis, start, stop, step in _taken(node, source, shape):
        if axis == len(shape) - 1 or not same_size(shape[axis], k_len):
            continue  # the last axis is that of features
        taken = shape_of(node)
        if taken is None:
            return None
        left = 1 if len(taken) < len(shape) else taken[axis]
        known = step in (None, 1) and isinstance(start, int) and same_size(left, q_len)
        return axis, Rows(node, start if known else None, stop is None)
    return None


def _taken(node: Node, source: Node, shape: tuple[Any, ...]) -> Iterator[tuple[int, Any, Any, Any]]:
    """(axis, start, stop, step) of each axis that a node narrows; a start that is no number is
    known only at run time."""
    name, given = operation(node), node.args[0]
    if name == "getitem" and isinstance(given, Node) and operation(given) in _PIECES:
        axis, number = argument(given, 2, "dim", 0), node.args[1]
        if operation(given) == "unbind":
            axis = argument(given, 1, "dim", 0)
        if isinstance(axis, int) and isinstance(number, int):
            yield axis % len(shape), _start_of_piece(given, number, axis), 0, 1
    elif name == "getitem":
        entries = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        for axis, entry in _by_axis(entries, len(shape)):
            if isinstance(entry, slice):
                if entry != slice(None):
                    yield axis, entry.start or 0, entry.stop, entry.step
            elif isinstance(entry, int):
                yield axis, entry, entry + 1 or None, 1
            else:
                yield axis, None, 0, 1
    elif name == "narrow":
        axis = argument(node, 1, "dim")
        if isinstance(axis, int):
            yield axis % len(shape), argument(node, 2, "start"), 0, 1
    elif name in ("select", "index_select"):
        axis, index = argument(node, 1, "dim"), argument(node, 2, "index")
        if isinstance(axis, int):
            yield axis % len(shape), index, None if index == -1 else 0, 1
    elif name == "gather":
        axis = argument(node, 1, "dim")
        if isinstance(axis, int):
            yield axis % len(shape), None, 0, 1


def _by_axis(entries: tuple[Any, ...], rank: int) -> Iterator[tuple[int, Any]]:
    """(axis of the source, entry) of an index; nothing where a mask of booleans may be in it."""
    entries = tuple(e for e in entries if e is not None)
    axes = sum(e is not Ellipsis for e in entries)
    at = 0
    for entry in entries:
        if entry is Ellipsis:
            at += rank - axes
            continue
        meta = entry.meta.get("example_value") if isinstance(entry, Node) else None
        if isinstance(meta, torch.Tensor) and meta.dtype == torch.bool:
            return
        yield at, entry
        at += 1


def _start_of_piece(pieces: Node, number: int, axis: int) -> int | None:
    """Where the ``number``-th of some pieces begins."""
    held = pieces.meta.get("example_value")
    if not isinstance(held, list | tuple) or not all(isinstance(t, torch.Tensor) for t in held):
        return None
    if operation(pieces) == "unbind":
        return number % len(held)
    lengths = [t.shape[axis] for t in held[: number % len(held)]]
    return sum(lengths) if all(isinstance(n, int) for n in lengths) else None
