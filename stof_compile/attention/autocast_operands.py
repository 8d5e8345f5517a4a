"""Operands of a product as the autocast region around it sees them."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from stof_compile.emit import autocast_dtype, emit
from stof_compile.node_ops import dtype_of


def cast_operands(gm: GraphModule, product: Node, before: Node, *operands: Node) -> list[Node]:
    """Operands as the autocast region around a product sees them: cast to the dtype of its
    result."""
    wanted = dtype_of(product)
    if (
        wanted is None
        or autocast_dtype(gm.graph, product) != wanted
        or all(dtype_of(n) == wanted for n in operands)
    ):
        return list(operands)
    cast: list[Node] = []
    for node in operands:
        cast += (
            [node]
            if dtype_of(node) == wanted
            else emit(gm.graph, before, product, lambda t: t.to(wanted), node)
        )
    return cast
