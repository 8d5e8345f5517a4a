"""Attention in spellings that no pattern takes: told by what is typical of it.

softmax    whose scores come into the graph, or whose weights leave it: a graph break in between
softmax    over the first of two positions, as where keys are multiplied by queries
exp        of a product's scores on the way to a product: a softmax written out, or a log_softmax
a kernel   of PyTorch's that is called by name
"""

from __future__ import annotations

from torch.fx import Node

from stof_compile.attention.mismatch import Mismatch
from stof_compile.attention.scores import SCORE_OPERATIONS, has_product
from stof_compile.attention.weights import read_weights
from stof_compile.node_ops import (
    argument,
    dtype_of,
    is_cast,
    is_module_tensor,
    operation,
    raw_name,
    shape_of,
    swaps_last_two,
)

KERNELS = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention")
ON_THE_WAY = frozenset({"div", "mul", "contiguous", "clone", "dropout"})  # from exp to the product
MOST_STEPS = 16  # of such operations


def unmatched_attention(node: Node, cut: bool) -> Mismatch | None:
    """Why a node belongs to an attention that stays; None where nothing says that it does.

    Args:
        cut: the graph ends in a graph break; what leaves another one is a result of the function.
    """
    name = operation(node)
    if raw_name(node).startswith(KERNELS) and not name.endswith("_backward"):
        return Mismatch(f"'{raw_name(node)}' is called by name", maskable=False)
    scores = argument(node, 0, "input")
    if not isinstance(scores, Node):
        return None
    if name == "exp":
        source = argument(scores, 0, "input") if operation(scores) == "log_softmax" else scores
        if isinstance(source, Node) and has_product(source) and _reaches_product(node):
            return Mismatch("its softmax is written out with exp", maskable=False)
    if name != "softmax":
        return None
    if not has_product(scores):
        if _comes_in(scores) and read_weights(node) is not None:
            return Mismatch("its scores come from outside of this graph", maskable=False)
    elif any(swaps_last_two(user) and _reaches_product(user) for user in node.users):
        return Mismatch("its softmax runs over the first position of the scores", maskable=False)
    elif cut and any(user.op == "output" for user in node.users):
        return Mismatch("its weights leave this graph before their product with the values")
    return None


def _reaches_product(node: Node, steps: int = MOST_STEPS) -> bool:
    """Whether a value is multiplied by values [.., K, D], with numbers of each row in between."""
    for user in node.users:
        name = operation(user)
        if name in ("matmul", "bmm"):
            reached = len(shape_of(user) or ()) > 2
        else:
            goes_on = steps > 0 and (is_cast(user) or name in ON_THE_WAY)
            reached = goes_on and _reaches_product(user, steps - 1)
        if reached and argument(user, 0, "input") is node:
            return True
    return False


def _comes_in(node: Node, steps: int = MOST_STEPS) -> bool:
    """Whether scores are an input of the graph with nothing but operations on scores behind it."""
    if node.op == "placeholder":
        dtype = dtype_of(node)
        floating = dtype is not None and dtype.is_floating_point
        return floating and len(shape_of(node) or ()) > 2 and not is_module_tensor(node)
    if steps == 0 or not (is_cast(node) or operation(node) in SCORE_OPERATIONS):
        return False
    return any(_comes_in(source, steps - 1) for source in node.all_input_nodes)
