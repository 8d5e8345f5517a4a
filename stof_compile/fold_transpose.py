"""Copies of transposed tensors that a matrix product can do without.

    (q @ k.transpose(-2, -1).contiguous())    ->    (q @ k.transpose(-2, -1))

A transposition is a view; ``contiguous()`` or ``clone()`` behind it moves all elements, and the
product would have read the view at the same speed. Weights need no rule of their own: the
transposition of a parameter is folded like any other, so nothing has to be kept up to date.
``contiguous()`` of what is contiguous already goes, too; pairs of transpositions are a matter of
``normalize.cancel_transposes``. To be run after attention has been rewritten: this pass believes
the strides of the example values, and another attention may return others.
Source: FuseTransposeMatmul of the Graph Surgeon write-up; the legality rules are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from stof_compile.between import writer_between
from stof_compile.capture import CaptureFacts
from stof_compile.dead_code import erase_dead
from stof_compile.emit import in_fake_mode
from stof_compile.example_values import is_static, update_values
from stof_compile.node_ops import (
    argument,
    dtype_of,
    is_inplace,
    operation,
    permutation,
    shape_of,
    tensor_meta,
)

# Matrix operands of a product by place and keyword; addmm and baddbmm have a summand first.
MATRICES = {
    "matmul": ((0, "input"), (1, "other")),
    "mm": ((0, "input"), (1, "mat2")),
    "bmm": ((0, "input"), (1, "mat2")),
    "linear": ((0, "input"), (1, "weight")),
    "addmm": ((1, "mat1"), (2, "mat2")),
    "baddbmm": ((1, "batch1"), (2, "batch2")),
}
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
MAX_VIEWS = 3  # views between a copy and its product


def fold_transposes(gm: GraphModule, facts: CaptureFacts) -> int:
    """Let products read transposed views instead of copies of them.

    A copy goes when all its readers are products (or views that only products read), each operand
    keeps a unit stride in one of its last two dimensions and one stride over its batch, and
    nothing writes to the source before the last of them. Tensors of symbolic sizes are left alone.

    Args:
        gm: graph, rewritten but not recompiled. facts: its facts; not needed, every pass has them.
    Returns:
        Number of copies that are gone.
    """
    count = 0
    for node in list(gm.graph.nodes):
        source = argument(node, 0, "input")
        if not isinstance(source, Node) or not _copies(node):
            continue
        if not _is_idle(node, source) and not _is_foldable(node, source):
            continue
        for user in node.users:  # valid with any strides, should a later pass change the source
            if user.op == "call_method" and user.target == "view" and _is_reshape(user):
                user.target = "reshape"
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
        update_values(gm.graph, source)
        count += 1
    if count:
        erase_dead(gm.graph)
    return count


def _copies(node: Node) -> bool:
    """Whether a node is ``contiguous()`` or ``clone()`` in row-major order."""
    if operation(node) not in ("contiguous", "clone") or set(node.kwargs) - {"memory_format"}:
        return False
    layout = node.kwargs.get("memory_format") or (node.args[1:] or (None,))[0]
    return layout in (None, torch.contiguous_format, torch.preserve_format)


def _is_idle(node: Node, source: Node) -> bool:
    """``contiguous()`` of a contiguous tensor: the tensor itself. A clone is memory of its own."""
    value = tensor_meta(source)
    known = value is not None and value.layout == torch.strided and is_static(value)
    return known and operation(node) == "contiguous" and value.is_contiguous()  # type: ignore[union-attr]


def _is_foldable(node: Node, source: Node) -> bool:
    value = tensor_meta(source)
    if permutation(source) is None or value is None or not is_static(value):
        return False
    with in_fake_mode(value), torch.no_grad():
        products = _products(node, value, MAX_VIEWS)
    return bool(products) and writer_between((source,), node, max(products)) is None


def _products(node: Node, value: Tensor, views: int) -> list[Node]:
    """All products that read a node, if with ``value`` in its place each has a good operand.

    Empty when there is another reader, a view that would need a copy, or an operand that no
    matrix product takes as it is.
    """
    found: list[Node] = []
    for user in node.users:
        if _is_matrix_of(user, node):
            if not _is_operand(user, node, value):
                return []
            found.append(user)
            continue
        view = _view_of(user, node, value) if views > 0 else None
        behind = [] if view is None else _products(user, view, views - 1)
        if not behind:
            return []
        found += behind
    return found


def _is_matrix_of(product: Node, operand: Node) -> bool:
    """Whether a node is a product that reads another one as a matrix, and only so."""
    places = MATRICES.get(operation(product))
    if places is None or is_inplace(product):
        return False
    matrices = [argument(product, place, name) for place, name in places]
    read = sum(value is operand for value in (*product.args, *product.kwargs.values()))
    return 0 < read == sum(value is operand for value in matrices)


def _is_operand(product: Node, operand: Node, value: Tensor) -> bool:
    """Whether a product reads a matrix, or a batch of them, without a copy of its own."""
    ranks = [len(shape_of(n) or ()) for n in product.all_input_nodes]
    matrices: Tensor | None = value
    if value.dim() > 2 and (operation(product) == "linear" or min(ranks) < value.dim()):
        matrices = _viewed(value, (-1, value.shape[-1]))  # rows of all batches times one matrix
    elif value.dim() > 3:
        batches = {tuple((shape_of(n) or ())[:-2]) for n in product.all_input_nodes}
        matrices = _viewed(value, (-1, *value.shape[-2:])) if len(batches) == 1 else None
    if matrices is None or matrices.dim() < 2:
        return False
    rows, columns = matrices.shape[-2:]
    row_stride, column_stride = matrices.stride()[-2:]
    by_rows = (column_stride == 1 or columns == 1) and row_stride >= columns
    by_columns = (row_stride == 1 or rows == 1) and column_stride >= rows
    return by_rows or by_columns


def _is_reshape(node: Node) -> bool:
    return operation(node) in RESHAPES and dtype_of(node) == dtype_of(node.args[0])


def _view_of(node: Node, source: Node, value: Tensor) -> Tensor | None:
    """What a view of ``source`` is when that has ``value``; None when it is none, or a copy."""
    shape = shape_of(node)
    if is_inplace(node) or shape is None or argument(node, 0, "input") is not source:
        return None
    order = permutation(node)
    if order is not None:
        return value.permute(order)
    return _viewed(value, shape) if _is_reshape(node) else None


def _viewed(value: Tensor, shape: tuple[Any, ...]) -> Tensor | None:
    """The value in another shape, None when that needs a copy."""
    try:
        return value.view(shape)
    except (RuntimeError, ValueError):
        return None
