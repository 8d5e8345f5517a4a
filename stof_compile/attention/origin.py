"""Where the keys of an attention come from: the queries' own sequence, another one, or a cache.

Decides whether a site is cross-attention, and which absolute position its first query row has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from stof_compile.attention.slices import taken_rows
from stof_compile.memory import storage_base
from stof_compile.node_ops import (
    VIEWS,
    argument,
    hint,
    is_inplace,
    is_module_tensor,
    operation,
    raw_name,
    same_size,
    shape_of,
    tensor_meta,
)
from stof_compile.static_values import is_size

# A projection ends the local computation of q or k; the residual stream continues through
# everything else.
PROJECTIONS = frozenset(
    {
        "linear",
        "addmm",
        "matmul",
        "bmm",
        "mm",
        "baddbmm",
        "embedding",
        "scaled_dot_product_attention",
    }
)
CACHE_WRITES = frozenset(
    {"index_copy", "index_put", "setitem", "copy", "slice_scatter", "scatter", "index_add"}
)

FACTORIES = frozenset(
    {"zeros", "empty", "ones", "full", "new_zeros", "new_empty", "new_full", "zeros_like"}
    | {"empty_like", "full_like"}
)


@dataclass(frozen=True)
class QueryOffset:
    """Absolute position of the query rows.

    Args:
        kind: "length": row i stands at i + k_len - q_len. "position": row i stands at ``node[i]``
            (or ``value + i``), in a preallocated cache. "slice": row i stands at ``value + i``, as
            the queries are taken from the keys' sequence there. "unknown": cannot be told, see
            ``reason``.
        value: the offset when it is a plain number.
        node: tensor of positions [Q] (or a single one) for a preallocated cache.
        reason: why it is unknown, or where it comes from.
    """

    kind: Literal["length", "position", "slice", "unknown"]
    value: int | None = None
    node: Node | None = None
    reason: str = ""


ENDS_WITH_KEYS = QueryOffset("length")
UNTOLD = QueryOffset("unknown", reason="queries and keys could not be told apart")


def key_writes(graph: Graph, key: Node, reader: Node) -> list[Node]:
    """Writes into the memory of the keys that happen before they are read."""
    base = _memory(key)
    found = []
    for node in graph.nodes:
        if node is reader:
            break
        if (
            is_inplace(node)
            and node.args
            and isinstance(node.args[0], Node)
            and storage_base(node.args[0]) is base
        ):
            found.append(node)
    functional = base if operation(base) in CACHE_WRITES else None
    return found + ([functional] if functional is not None and functional not in found else [])


def _memory(node: Node) -> Node:
    """Storage base, seen through the copies a repeated or cast key makes."""
    while True:
        base = storage_base(node)
        if operation(base) in ("repeat_interleave", "clone", "repeat", "mul") and isinstance(
            base.args[0], Node
        ):
            node = base.args[0]
        else:
            return base


def query_offset(graph: Graph, q: Node, k: Node, reader: Node, k_axis: int = -2) -> QueryOffset:
    """Tell the position of the first query row from how the keys were made.

    Args:
        graph: graph. q, k: queries [B, H, Q, D] and keys [B, H, K, D].
        reader: the node that reads the keys. k_axis: sequence axis of ``k``.
    """
    q_shape, k_shape = shape_of(q), shape_of(k)
    if q_shape is None or k_shape is None:
        return QueryOffset("unknown", reason="sizes of queries or keys are unknown")
    writes = key_writes(graph, k, reader)
    base = _memory(k)
    if not writes:
        q_len, k_len = q_shape[-2], k_shape[k_axis]
        difference = k_len - q_len if isinstance(q_len, int) and isinstance(k_len, int) else None
        if same_size(q_len, k_len):
            difference = 0
        some = difference is None or difference > 0
        taken = _taken(q, k, q_len, k_len) if some else None
        if taken is not None:
            return taken
        if base.op == "placeholder" and difference != 0:
            return QueryOffset(
                "length",
                difference,
                reason="keys are an input of the graph; taken to end with the queries",
            )
        return QueryOffset("length", difference)
    positions = [_written_position(node) for node in writes]
    found = next((p for p in positions if p is not None), None)
    if found is None:
        return QueryOffset(
            "unknown",
            reason=f"keys are written by '{writes[-1].name}' at a place that cannot be told",
        )
    value, node = found
    if value is None and node is None:
        return QueryOffset(
            "unknown",
            reason=f"keys are written by '{writes[-1].name}' at a place that cannot be told",
        )
    return QueryOffset(
        "position", value, node, f"position of '{writes[-1].name}' in the preallocated cache"
    )


def _taken(q: Node, k: Node, q_len: Any, k_len: Any) -> QueryOffset | None:
    """Position of queries that are some rows of the keys' sequence, as ``x[:, :1]``."""
    rows = taken_rows(q, k, q_len, k_len)
    if not rows:
        return None
    if all(taken.to_end and (taken.start or 0) < 0 for taken in rows):
        return QueryOffset("length", reason=f"the last rows, by '{rows[0].node.name}'")
    starts = {_from_the_front(taken.start, k_len) for taken in rows}
    names = ", ".join(f"'{taken.node.name}'" for taken in rows)
    if len(starts) > 1 or None in starts:
        return QueryOffset("unknown", reason=f"it is not known which rows they are, by {names}")
    return QueryOffset("slice", starts.pop(), reason=f"rows of the sequence by {names}")


def _from_the_front(start: int | None, length: Any) -> int | None:
    if start is None or start >= 0:
        return start
    return length + start if isinstance(length, int) else None


def _written_position(node: Node) -> tuple[int | None, Node | None] | None:
    """Where a write puts the new keys: a number, a tensor of positions, or None."""
    name = operation(node)
    if name == "index_copy":
        index = argument(node, 2, "index")
        return (None, index) if isinstance(index, Node) else None
    if name in ("index_put", "setitem"):
        indices = argument(node, 1, "indices")
        entries = indices if isinstance(indices, list | tuple) else (indices,)
        nodes = [i for i in entries if isinstance(i, Node) and tensor_meta(i) is not None]
        if len(nodes) == 1:
            meta = tensor_meta(nodes[0])
            integer = (
                meta is not None
                and not meta.is_floating_point()
                and meta.dtype != torch.bool
                and meta.dim() <= 1
            )
            return (None, nodes[0]) if integer else None
        bounds = [
            i
            for i in entries
            if isinstance(i, slice) and (i.start is not None or i.stop is not None)
        ]
        if len(bounds) == 1 and not nodes:
            return _position_of(bounds[0].start)
    if name == "slice_scatter":
        return _position_of(argument(node, 3, "start"))
    if name == "copy":  # cache[:, :, a:b].copy_(new)
        target = node.args[0]
        if isinstance(target, Node) and operation(target) == "getitem":
            entries = target.args[1] if isinstance(target.args[1], tuple) else (target.args[1],)
            bounds = [
                i
                for i in entries
                if isinstance(i, slice) and (i.start is not None or i.stop is not None)
            ]
            return _position_of(bounds[0].start) if len(bounds) == 1 else None
        if isinstance(target, Node) and operation(target) == "narrow":
            return _position_of(argument(target, 2, "start"))
    return None


def _position_of(start: object) -> tuple[int | None, Node | None] | None:
    if start is None:
        return (0, None)
    if isinstance(start, int):
        return (start, None) if start >= 0 else None  # from the end
    return (None, start) if isinstance(start, Node) else None


Sizes = tuple[tuple[Any, Any], ...]
"""Pairs of sizes that are equal or not, which decides something."""


@dataclass(frozen=True)
class Relation:
    """Whether keys come from another sequence, and whether that could be told from the graph.

    Args:
        cross: they do. known: told by where queries and keys come from, not by their lengths.
        undecided: the lengths that decide, where their symbols do not show whether they are equal.
    """

    cross: bool
    known: bool = True
    undecided: Sizes = ()


def sequence_relation(graph: Graph, q: Node, k: Node, reader: Node, k_axis: int = -2) -> Relation:
    """Tell self-attention from cross-attention.

    Queries and keys are followed back to their projections and on through the residual stream.
    Self-attention shares a node there (also when the keys pass through a cache), cross-attention
    shares none. A graph that was cut behind the projections, by a graph break or as data-parallel
    training does, does not show it: as many new keys as queries are then taken for self-attention,
    and ``known`` is False.
    """
    for deep in (False, True):
        q_stream, q_inputs = _stream(graph, q, reader, deep=deep)
        k_stream, k_inputs = _stream(graph, k, reader, deep=deep)
        if q_stream & k_stream:
            return Relation(cross=False)
    if not (q_stream and k_stream) and q_inputs & k_inputs:
        return Relation(cross=False)
    if q_stream and (k_stream or not _was_cut(graph)):
        return Relation(
            cross=True
        )  # keys that are an input beside projected queries: a cross cache
    q_shape, k_shape = shape_of(q), shape_of(k)
    if q_shape is None or k_shape is None:
        return Relation(cross=True, known=False)
    q_len, k_len = q_shape[-2], k_shape[k_axis]
    lengths = (_new_length(graph, k, reader, k_len), k_len)
    if any(same_size(q_len, length) for length in lengths):
        return Relation(cross=False, known=False)
    symbolic = [
        n for n in lengths if isinstance(q_len, torch.SymInt) or isinstance(n, torch.SymInt)
    ]
    alike = [length for length in symbolic if _alike_now(q_len, length)]
    undecided = tuple((q_len, length) for length in (alike or symbolic)[-1:])
    return Relation(cross=True, known=False, undecided=undecided)


def _alike_now(a: Any, b: Any) -> bool:
    """Whether the present values of two sizes are equal."""
    symbols = [n for n in (a, b) if isinstance(n, torch.SymInt)]
    return all(n.node.has_hint() for n in symbols) and hint(a) == hint(b)


def _new_length(graph: Graph, k: Node, reader: Node, k_len: Any) -> Any:
    """How many keys belong to the queries of this call: those behind a growing cache, those that
    are written into a preallocated one, else all."""
    base = _memory(k)
    if operation(base) == "cat":
        parts, dim = argument(base, 0, "tensors"), argument(base, 1, "dim", 0)
    else:
        copies = [n for n in key_writes(graph, k, reader) if operation(n) == "index_copy"]
        if not copies:
            return k_len
        base = copies[-1]
        parts, dim = (argument(base, 3, "source"),), argument(base, 1, "dim")
    whole, part = shape_of(base), shape_of(parts[-1]) if isinstance(parts, tuple | list) else None
    if whole is None or part is None or not isinstance(dim, int):
        return k_len
    along_keys = same_size(whole[dim], k_len)
    return part[dim] if along_keys else k_len


def _was_cut(graph: Graph) -> bool:
    """Whether the graph is a piece of a captured one: its inputs carry no source of Dynamo's."""
    inputs = graph.find_nodes(op="placeholder")
    return all(getattr(node, "_dynamo_source", None) is None for node in inputs)


def _stream(graph: Graph, start: Node, reader: Node, *, deep: bool) -> tuple[set[Node], set[Node]]:
    """Activations the sequence of q or k is made of, and graph inputs reached without a projection.

    The activations are the projection's input and, if ``deep``, everything that adds up to it.
    """
    seen: set[Node] = set()
    inputs: set[Node] = set()
    stack, crossed = [(start, False)], set()
    while stack:
        node, projected = stack.pop()
        if (node, projected) in crossed:
            continue
        crossed.add((node, projected))
        name = operation(node)
        if projected and tensor_meta(node) is not None and not is_module_tensor(node):
            seen.add(node)
            if not deep:
                continue
        if node.op == "placeholder":
            if not is_module_tensor(node):
                (seen if projected else inputs).add(node)
            if not projected:  # a cache, which may be a buffer of the model
                stack.extend((w, False) for w in key_writes(graph, node, reader))
            continue
        if node.op not in ("call_function", "call_method") or is_size(node):
            continue
        if name in FACTORIES and not projected:  # a cache made in this graph
            stack.extend((w, False) for w in key_writes(graph, node, reader))
            continue
        if name in CACHE_WRITES:
            stack.extend((a, projected) for a in _new_values(node))
            continue
        if name in PROJECTIONS:
            if projected:
                continue  # the end of this stretch of the stream: kept as a landmark, not entered
            stack.extend((a, True) for a in node.all_input_nodes if _is_activation(a))
            continue
        if _is_positional(node):
            continue
        stack.extend(
            (a, projected)
            for a in node.all_input_nodes
            if _is_activation(a) or operation(node) in VIEWS
        )
    return {node for node in seen if not _is_shared_constant(node)}, inputs


def _new_values(node: Node) -> list[Node]:
    return [a for a in node.all_input_nodes if a is not node.args[0] and _is_activation(a)]


def _is_activation(node: Node) -> bool:
    meta = tensor_meta(node)
    return meta is None or (meta.is_floating_point() and not is_module_tensor(node))


def _is_positional(node: Node) -> bool:
    """Rotary tables and other trigonometry do not belong to a sequence."""
    return (
        operation(node) in ("cos", "sin", "arange", "outer", "polar")
        or raw_name(node) == "get_attr"
    )


def _is_shared_constant(node: Node) -> bool:
    meta = tensor_meta(node)
    return meta is None or meta.dim() < 2
