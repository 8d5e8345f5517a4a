"""Checks for infinities that the kernel of a product does on its way.

    any(isinf(product(x)))    ->    product(x, marks, i); marks[i] != 0

T5 and its kin clamp their fp16 states so that one infinity does not become NaN, by a limit that
depends on whether there is one anywhere: a pass over all elements that a product has just stored.
Its kernel sees them before they are stored, and writes a mark where one is infinite, which hardly
ever happens (a result full of infinities writes as many times). All marks of a graph on one device
are one small tensor of zeros. To be run when products have
become operators of ours; what those of other kernels return is checked as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from stof_compile.between import region_states, writer_between
from stof_compile.dead_code import erase_dead
from stof_compile.emit import emit
from stof_compile.node_ops import (
    argument,
    dtype_of,
    is_inplace,
    operation,
    shape_of,
    tensor_meta,
)
from stof_compile.ops_linear import mark_step

REGROUPED = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"}
)  # the same elements, if they are of the same dtype


def mark_infinities(gm: GraphModule) -> int:
    """Let products say whether their results hold an infinity.

    Args:
        gm: graph whose products have been replaced by operators.
    Returns:
        Number of checks that products do now.
    """
    checks: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        product = _checked_product(node)
        if product is not None:
            checks.setdefault(product, []).append(node)
    if not checks:
        return 0
    states = region_states(gm.graph)
    alike: dict[tuple[object, ...], list[Node]] = {}
    for node in gm.graph.nodes:  # in this order: the first of them makes the words
        value = tensor_meta(node)
        if node in checks and value is not None:
            # no words that were made in one region are written in another (inference mode)
            alike.setdefault((value.device, *states[node]), []).append(node)
    for products in alike.values():
        _mark(gm, {product: checks[product] for product in products})
    erase_dead(gm.graph)
    return sum(map(len, checks.values()))


def _mark(gm: GraphModule, checks: Mapping[Node, Sequence[Node]]) -> None:
    """Give products one tensor of words, and their checks what stands in it."""
    first, step = next(iter(checks)), mark_step()
    words = len(checks) * step
    (marks,) = emit(
        gm.graph, first, first, lambda x, *_: x.new_zeros((words,), dtype=torch.int32),
        *first.all_input_nodes,
    )  # fmt: skip
    for number, (product, places) in enumerate(checks.items()):
        mark = number * step
        (marked,) = emit(
            gm.graph, product, product, _marked(product, mark), *product.all_input_nodes, marks
        )
        product.replace_all_uses_with(marked)
        gm.graph.erase_node(product)
        for check in places:
            (seen,) = emit(gm.graph, check, check, partial(_is_set, mark), marks)
            check.replace_all_uses_with(seen)
            gm.graph.erase_node(check)


def _is_set(mark: int, marks: Tensor) -> Tensor:
    return marks.select(0, mark).ne(0)


def _checked_product(node: Node) -> Node | None:
    """The product all of whose elements a node looks for infinities in, None if it does not."""
    if operation(node) != "any" or len(node.args) + len(node.kwargs) != 1:
        return None
    infinite = argument(node, 0, "input")
    if not isinstance(infinite, Node) or operation(infinite) != "isinf" or is_inplace(infinite):
        return None
    if writer_between([infinite], infinite, node) is not None:
        return None
    source = argument(infinite, 0, "input")
    dtype = dtype_of(source)
    while isinstance(source, Node) and operation(source) in REGROUPED and not is_inplace(source):
        source = argument(source, 0, "input")
        if dtype_of(source) != dtype:  # a view of the bytes
            return None
    if not isinstance(source, Node) or not _can_mark(source):
        return None
    return None if writer_between([source], source, infinite) is not None else source


def _can_mark(node: Node) -> bool:
    if node.target is torch.ops.stof.hopper_linear.default:
        fits = node.args[2] is None
    else:
        fits = node.target is torch.ops.stof.fused_linear.default
    return fits and not node.kwargs and 0 not in (shape_of(node) or (0,))


def _marked(product: Node, mark: int) -> Callable[..., Any]:
    """A function of the product's input nodes and the marks that calls its marking twin."""
    inputs = product.all_input_nodes

    def build(*given: Tensor) -> Any:
        *values, marks = given
        held = dict(zip(inputs, values, strict=True))
        args = torch.fx.node.map_arg(product.args, lambda node: held[node])
        if product.target is torch.ops.stof.hopper_linear.default:
            x, weight, _, *rest = args
            return torch.ops.stof.hopper_linear_marked.default(x, weight, *rest, marks, mark)
        return torch.ops.stof.fused_linear_marked.default(*args, marks, mark)

    return build
