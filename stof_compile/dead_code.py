"""Dead code: calls that nothing reads and that do nothing but compute their result.

Each pass that changed something erases them. Left in the graph they would be readers like others:
a value with a second reader is not fused, and its memory counts as read. Inputs of the graph stay,
and what has an effect: writes, random numbers, modes, checks, messages, functions not known here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from stof_compile.between import BARRIERS, GRAD_MODES
from stof_compile.memory import written_arguments
from stof_compile.node_ops import DROPOUTS, RANDOM, argument, raw_name

_UNFILLED = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
_DRAWS = (RANDOM - _UNFILLED) | DROPOUTS | {"rrelu", "gumbel_softmax"}
_DROPOUT_PLACE = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_MODES = (*BARRIERS, "_enter", "_exit")
# where torch and Python keep functions that compute; elsewhere are transforms, hooks and messages
_COMPUTING = frozenset(
    {
        "torch", "torch.functional", "torch.nn.functional", "torch.linalg", "torch.fft",
        "torch.special", "torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special",
        "torch._ops.aten", "_operator", "math", "builtins",
    }
)  # fmt: skip
_VALUES = (Tensor, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def erase_dead(graph: Graph) -> int:
    """Erase all dead nodes of a graph; returns how many.

    Not to be called while nodes are held that nothing in the graph reads (or their names): at the
    end of a pass, when nobody holds any.
    """
    count = 0
    for node in reversed(graph.nodes):
        if _is_dead(node):
            graph.erase_node(node)
            count += 1
    return count


def erase_with_inputs(start: Node) -> int:
    """Erase a node, if it is dead, and what only it kept alive; returns how many."""
    stack, count = [start], 0
    while stack:
        node = stack.pop()
        if node._erased or not _is_dead(node):
            continue
        inputs = list(node.all_input_nodes)
        node.graph.erase_node(node)
        count += 1
        stack.extend(inputs)
    return count


def _is_dead(node: Node) -> bool:
    return not node.users and not has_effect(node)


def has_effect(node: Node) -> bool:
    """Whether the graph may be another one without a node that nothing reads."""
    if node.op == "get_attr":
        return False
    name = raw_name(node)
    if node.op not in ("call_function", "call_method") or not name:
        return True  # a function of the user that Dynamo was told not to look into
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return name != "flex_attention"
    if "::" in name and not name.startswith("stof::"):
        return True  # an operator of others: a collective sends messages
    if node.op == "call_function" and node.is_impure():
        return True
    if name in _DRAWS or name in GRAD_MODES or name == "requires_grad_":
        return True
    if name.startswith(_MODES) or written_arguments(node) or _drops_out(node, name):
        return True
    if node.op == "call_function" and not _computes(node, name):
        return True
    if node.meta.get("unbacked_bindings"):  # a size that others have without reading this node
        return True
    # what gives no value is called for something else; code of ours is known
    return "stof_emitted" not in node.meta and not _is_value(node.meta.get("example_value"))


def _computes(node: Node, name: str) -> bool:
    """Whether a function is one of those that compute a value; private ones of torch may switch
    something, as transforms do.
    """
    if "stof_emitted" in node.meta or name.startswith("stof::"):
        return True
    private = name.startswith("_") and not name.endswith("__") and "softmax" not in name
    return getattr(node.target, "__module__", None) in _COMPUTING and not private


def _drops_out(node: Node, name: str) -> bool:
    """Whether attention draws random numbers."""
    place = _DROPOUT_PLACE.get(name)
    p = 0.0 if place is None else argument(node, place, "dropout_p", 0.0)
    return isinstance(p, int | float) and p != 0


def _is_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_value, value))
    return isinstance(value, _VALUES)
