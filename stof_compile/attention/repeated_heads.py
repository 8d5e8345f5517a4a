"""Key and value heads repeated for grouped queries, traced back to where they were not yet."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from stof_compile.node_ops import argument, is_one, operation, same_size, shape_of
from stof_compile.static_values import StaticValues


def ungrouped(
    k: Node, v: Node, gqa: bool, static: StaticValues, place: Node
) -> tuple[Node, Node, bool]:
    """k and v before their heads were repeated, when both were repeated alike and hold the same
    at ``place``, where they are read."""
    k_repeat, v_repeat = unrepeated(k), unrepeated(v)
    if k_repeat is None or v_repeat is None or k_repeat[1] != v_repeat[1]:
        return k, v, gqa
    for end, source in ((k, k_repeat[0]), (v, v_repeat[0])):
        if not all(static.holds_at(node, place) for node in _path(end, source)):
            return k, v, gqa
    return k_repeat[0], v_repeat[0], gqa or k_repeat[1] > 1


def _path(end: Node, source: Node) -> Iterator[Node]:
    """Nodes from a repeated tensor back to its source (excluded)."""
    while end is not source:
        yield end
        first = argument(end, 0, "input")
        assert isinstance(first, Node), "every step of a repeat has a tensor"
        end = first


def unrepeated(node: Node) -> tuple[Node, int] | None:
    """Source and count when each head of [B, Hk, S, D] is repeated in place (grouped queries)."""
    name, out = operation(node), shape_of(node)
    if out is None or len(out) != 4:
        return None
    if name == "repeat_interleave":
        source, times = argument(node, 0, "input"), argument(node, 1, "repeats")
        inner = shape_of(source)
        if (
            isinstance(times, int)
            and inner is not None
            and argument(node, 2, "dim") in (1, -3)
            and len(inner) == 4
        ):
            return source, times
        return None
    if name not in ("reshape", "view", "flatten", "contiguous"):
        return None
    expanded = node.args[0]
    if name == "contiguous" and isinstance(expanded, Node):
        return unrepeated(expanded)
    five = shape_of(expanded)
    if (
        not isinstance(expanded, Node)
        or operation(expanded) not in ("expand", "repeat")
        or five is None
    ):
        return None
    opened = expanded.args[0]
    before = shape_of(opened)
    if (
        len(five) != 5
        or before is None
        or len(before) != 5
        or not is_one(before[2])
        or not isinstance(five[2], int)
    ):
        return None
    if not isinstance(opened, Node) or operation(opened) not in ("getitem", "unsqueeze"):
        return None
    source = opened.args[0]
    inner = shape_of(source)
    if not isinstance(source, Node) or inner is None or len(inner) != 4:
        return None
    unchanged = (before[0], before[1], before[3], before[4])
    if (
        not all(map(same_size, inner, unchanged))
        or not same_size(five[1], inner[1])
        or not same_size(out[2], inner[2])
    ):
        return None
    if not isinstance(inner[1], int) or not isinstance(out[1], int) or out[1] != inner[1] * five[2]:
        return None
    return source, five[2]
