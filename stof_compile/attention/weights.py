"""The weights of an attention, read off the nodes from a softmax to its product with the values."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from stof_compile.attention.head_reshape import HEAD_RESHAPES, splits_heads
from stof_compile.attention.mismatch import Mismatch, described
from stof_compile.node_ops import argument, is_cast, operation, shape_of

CUTS = ("getitem", "narrow")  # leave a part of the weights


@dataclass
class Weights:
    """softmax -> [casts] -> matmul(., v) -> output; ``nodes`` lie between softmax and output (both
    excluded)."""

    output: Node
    v: Node
    nodes: tuple[Node, ...]


def read_weights(softmax: Node) -> Weights | Mismatch | None:
    """Follow a softmax to the product with the values; None when there is no such product."""
    node, passed, cut = softmax, [], None
    while True:
        products = [
            u
            for u in node.users
            if operation(u) in ("matmul", "bmm") and argument(u, 0, "input") is node
        ]
        if products:
            break
        followers = [
            u
            for u in node.users
            if is_cast(u) or operation(u) in ("contiguous", "dropout", *CUTS, *HEAD_RESHAPES)
        ]
        if not followers:
            return None
        if operation(followers[0]) == "dropout":
            rate = argument(followers[0], 1, "p", 0.5)
            return Mismatch(f"dropout with p = {rate} between softmax and values")
        if operation(followers[0]) in HEAD_RESHAPES and not splits_heads(node, followers[0]):
            return None
        node = followers[0]
        passed.append(node)
        if operation(node) in CUTS:
            cut = cut or node
    product = products[0]
    v = argument(product, 1, "mat2", product.kwargs.get("other"))
    if not isinstance(v, Node) or (v.op == "placeholder" and len(shape_of(v) or ()) < 3):
        return None
    if cut is not None:  # attention sinks: a column beside the keys takes a part of the weight
        return Mismatch(f"the attention weights pass through {described(cut)}")
    for inner in (softmax, *passed):
        others = [u for u in inner.users if u is not product and u not in passed]
        if others:
            return Mismatch(f"the attention weights are also used by {described(others[0])}")
    return Weights(product, v, tuple(passed))
