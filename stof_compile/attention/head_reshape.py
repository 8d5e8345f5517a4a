"""Reshapes of attention scores that only split or merge their batch and head dimensions."""

from __future__ import annotations

from torch.fx import Node

from stof_compile.node_ops import same_size, shape_of

HEAD_RESHAPES = ("view", "reshape", "flatten", "unflatten")


def splits_heads(inner: Node, outer: Node) -> bool:
    """Whether a reshape only splits or merges the leading batch and head dimensions of scores."""
    a, b = shape_of(inner), shape_of(outer)
    if a is None or b is None or {len(a), len(b)} - {3, 4}:
        return False
    return same_size(a[-1], b[-1]) and same_size(a[-2], b[-2])
