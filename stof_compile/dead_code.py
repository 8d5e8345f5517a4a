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

from stof_compile.memory import written_arguments
from stof_compile.node_ops import VIEWS, argument, operation, raw_name

# What passes leave behind and models compute in vain. Others stay: whether they write, draw random
# numbers or switch something need not show in their name or schema, and AOTAutograd erases them.
_COMPUTING = (VIEWS - {"dropout", "requires_grad_", "cpu", "cuda"}) | {
    # sizes
    "size", "shape", "dim", "ndim", "numel", "stride", "dtype", "device", "len",
    # new values
    "arange", "zeros", "ones", "full", "eye", "linspace", "tensor", "scalar_tensor", "empty",
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
    "new_empty", "new_tensor", "tril", "triu", "one_hot", "clone", "cat", "stack", "repeat",
    "repeat_interleave", "pad", "roll", "flip", "gather", "index_select", "take_along_dim",
    "embedding", "meshgrid", "broadcast_tensors", "outer", "diag",
    # arithmetic
    "add", "sub", "rsub", "mul", "div", "floordiv", "floor_divide", "mod", "remainder", "pow",
    "neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal", "square", "sin",
    "cos", "tanh", "erf", "sigmoid", "floor", "ceil", "round", "trunc", "sign", "maximum",
    "minimum", "max", "min", "clamp", "sum", "mean", "var", "prod", "cumsum", "any", "all", "amax",
    "amin", "argmax", "argmin", "logsumexp", "nan_to_num", "isinf", "isnan", "isfinite",
    "sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "lshift", "rshift",
    # logic
    "and", "or", "not", "xor", "logical_xor", "bitwise_xor", "eq", "ne", "lt", "le", "gt", "ge",
    "where", "masked_fill",
    # layers
    "linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "softmax", "log_softmax",
    "layer_norm", "rms_norm", "gelu", "relu", "silu", "softplus",
    "scaled_dot_product_attention",
}  # fmt: skip
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
    """Whether the graph may be another one without a node that nothing reads; True if unsure."""
    if node.op == "get_attr":
        return False
    if node.op not in ("call_function", "call_method") or written_arguments(node):
        return True
    if node.meta.get("unbacked_bindings"):  # a size that others have without reading this node
        return True
    name = raw_name(node)
    if "stof_emitted" in node.meta or name.startswith("stof::"):
        return node.op == "call_function" and node.is_impure()
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return name != "flex_attention"
    known = operation(node) in _COMPUTING and not (_drops_out(node) or _is_transform(node))
    return not known or not _is_value(node.meta.get("example_value"))


def _is_transform(node: Node) -> bool:
    """Whether a function is one of torch.func or autograd, which switch and mark things."""
    where = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and any(part in where for part in ("functorch", "autograd"))


def _drops_out(node: Node) -> bool:
    """Whether attention draws random numbers, or may."""
    if raw_name(node) != "scaled_dot_product_attention":
        return False
    p = argument(node, 4, "dropout_p", 0.0)
    return not isinstance(p, int | float) or p != 0


def _is_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_value, value))
    return isinstance(value, _VALUES)
