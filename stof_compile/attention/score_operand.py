"""Operands of ``q @ k^T`` without their constant factors, copies and widening casts."""

from __future__ import annotations

from torch.fx import Node

from stof_compile.attention.mismatch import Mismatch, tensor_input
from stof_compile.node_ops import dtype_of, is_cast, operation, swaps_last_two, tensor_meta
from stof_compile.static_values import StaticValues


def peel_operand(node: Node, static: StaticValues, place: Node) -> tuple[Node, Node, float]:
    """Strip constant factors and copies from an operand; (operand, the same before widening casts,
    factor).

    What is returned is read at ``place``: nothing is stripped from what was written to before that.
    """
    scale, wide = 1.0, node
    while static.holds_at(node, place):
        name = operation(node)
        if name in ("mul", "div") and len(node.args) == 2:
            first, second = node.args
            value = static.scalar(second)
            if value is None and name == "mul":
                first, value = second, static.scalar(node.args[0])
            if value is None or value == 0.0 or not isinstance(first, Node):
                break
            scale *= value if name == "mul" else 1.0 / value
            wide = first if wide is node else wide
            node = first
        elif name in ("contiguous", "clone"):
            source = tensor_input(node, 0)
            if isinstance(source, Mismatch):
                break
            wide = source if wide is node else wide
            node = source
        elif is_cast(node) and _widens(node):
            source = tensor_input(node, 0)
            if isinstance(source, Mismatch):
                break
            node = source
        else:
            break
    if wide is not node and dtype_of(wide) == dtype_of(node):
        wide = node
    # A factor below a widening cast is only taken along with the cast: both operands must tell the
    # same story.
    return wide, node, scale


def peel_key(node: Node, static: StaticValues, place: Node) -> tuple[Node, Node, float, bool]:
    """``peel_operand`` through the transposition of a key; the last result tells of one."""
    wide, narrow, scale = peel_operand(node, static, place)
    if not swaps_last_two(narrow):
        return narrow if wide is not narrow and scale != 1.0 else wide, narrow, scale, False
    inner = narrow.args[0]
    assert isinstance(inner, Node), "a transposition has a node to transpose"
    wide, narrow, inner_scale = peel_operand(inner, static, place)
    return wide, narrow, scale * inner_scale, True


def _widens(node: Node) -> bool:
    before, after = tensor_meta(node.args[0]), tensor_meta(node)
    if before is None or after is None or before.device != after.device:
        return False
    return before.dtype == after.dtype or (
        before.is_floating_point()
        and after.is_floating_point()
        and before.element_size() < after.element_size()
    )
