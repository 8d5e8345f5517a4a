"""One vocabulary for the nodes of a Dynamo graph: operation names, arguments, views, mutations.

The same operation reaches a graph as a method, a function, an operator or an in-place form.
Everything that
matches nodes asks this module, so patterns are written once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

ALIASES = {
    "truediv": "div", "divide": "div", "true_divide": "div", "itruediv": "div", "multiply": "mul",
    "imul": "mul", "iadd": "add", "isub": "sub", "subtract": "sub", "imatmul": "matmul", "and_":
    "and", "iand": "and", "bitwise_and": "and", "logical_and": "and", "or_":
    "or", "ior": "or", "bitwise_or": "or", "logical_or": "or", "invert": "not", "inv": "not",
    "bitwise_not": "not", "logical_not": "not", "not_": "not", "negative": "neg",
    "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim", "concat": "cat",
    "concatenate": "cat", "_softmax": "softmax", "safe_softmax": "softmax", "_unsafe_view": "view",
    "greater": "gt", "less": "lt", "greater_equal": "ge", "less_equal": "le", "not_equal": "ne",
}  # fmt: skip
CASTS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "bool", "long", "int"}
)
# Operations whose result may share memory with their first argument (some only sometimes, e.g.
# reshape).
VIEWS = (
    frozenset(
        {
            "view", "reshape", "transpose", "permute", "expand", "getitem", "unsqueeze", "squeeze",
            "select", "narrow", "split", "chunk", "unbind", "contiguous", "getattr", "flatten",
            "unflatten", "detach", "movedim", "diagonal", "as_strided", "view_as", "expand_as",
            "reshape_as", "broadcast_to", "tensor_split", "ravel", "t", "mT", "T", "dropout",
            "unfold", "positive", "alias", "requires_grad_", "data", "cpu", "cuda",
            "index_select_view", "_get_data_attr",
        }
    )
    | CASTS
)  # fmt: skip
INPLACE_OPERATORS = frozenset(
    {
        "iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "ifloordiv", "imod", "ipow",
        "imatmul", "ilshift", "irshift",
    }
)  # fmt: skip
# Functions with an argument "inplace" -> its position.
_INPLACE_ARGUMENT = {
    "relu": 1, "relu6": 1, "selu": 1, "silu": 1, "mish": 1, "hardswish": 1, "hardsigmoid": 1,
    "elu": 2, "celu": 2, "leaky_relu": 2, "threshold": 3, "hardtanh": 3, "rrelu": 4, "dropout": 3,
    "alpha_dropout": 3, "feature_alpha_dropout": 3, "dropout1d": 3, "dropout2d": 3, "dropout3d": 3,
}  # fmt: skip
DROPOUTS = frozenset(
    {
        "dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
        "dropout1d", "dropout2d", "dropout3d",
    }
)  # fmt: skip


@lru_cache(maxsize=4096)
def _function_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = (
            target._schema.name
            if isinstance(target, torch._ops.OpOverload)
            else target._qualified_op_name
        )
        space, _, short = name.partition("::")
        return short if space in ("aten", "prims") else name
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target._name)
    module = getattr(target, "__module__", None) or ""
    owner = type(getattr(target, "__self__", None)).__module__
    if (
        module.split(".")[0] in ("torch", "_operator", "operator", "builtins", "")
        or owner == "torch"
    ):
        return str(getattr(target, "__name__", ""))
    return ""


def raw_name(node: Node) -> str:
    """Name of the operation as written, in-place spelling included; empty for placeholders and
    foreign functions."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    name = _function_name(node.target)
    if name == "getattr" and len(node.args) > 1:
        return str(node.args[1])  # tensor attributes: mT, T, shape, dtype ...
    return name


def operation(node: Node) -> str:
    """Canonical operation of a node (``div`` for ``/``, ``div_``, ``true_divide`` ...), or an
    empty string."""
    name = raw_name(node)
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]  # torch 2.11 writes a comparison x == y as x.__eq__(y)
    elif name.endswith("_") and not name.endswith("__") and name not in ALIASES:
        name = name[:-1]
    return ALIASES.get(name, name)


def is_inplace(node: Node) -> bool:
    """Whether the node writes into its first argument (or into ``out=``)."""
    name = raw_name(node)
    if not name:
        return False
    bare = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if bare in INPLACE_OPERATORS or bare == "setitem" or node.kwargs.get("out") is not None:
        return True
    place = _INPLACE_ARGUMENT.get(name)
    if node.kwargs.get("inplace") is True:
        return True
    if place is not None and place < len(node.args) and node.args[place] is True:
        return True
    return (
        name.endswith("_")
        and not name.endswith("__")
        and name not in ALIASES
        and name != "requires_grad_"
    )


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """Argument of a call by position (``self`` of a method is 0) or keyword."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def tensor_meta(node: Any) -> torch.Tensor | None:
    """Fake tensor a node stands for, or None when it is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Sizes (ints or SymInts) of a tensor node, or None."""
    value = tensor_meta(node)
    return None if value is None else tuple(map(_settled, value.shape))


def _settled(size: Any) -> Any:
    """A symbolic size as the number that the guards of the graph leave for it, if they do."""
    if isinstance(size, torch.SymInt) and size.node.expr.is_number:
        return int(size.node.expr)
    return size


def dtype_of(node: Any) -> torch.dtype | None:
    """Dtype of a tensor node, or None."""
    value = tensor_meta(node)
    return None if value is None else value.dtype


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal; adds no guard for symbolic sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return False


def guarded_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal, symbolic ones by their present values.

    The answer becomes a guard of the graph, either way: a call for which it is another one compiles
    anew. Sizes without a value (of data) are not equal.
    """
    if same_size(a, b):
        return True
    symbols = [n for n in (a, b) if isinstance(n, torch.SymInt)]
    if not symbols or not all(n.node.has_hint() for n in symbols):
        return False
    return bool(a == b)


def hint(size: int | torch.SymInt) -> int:
    """Return a size as a number; a symbol gives its present value, without a guard on it.

    The program's ``int(symbol)`` would tie the compiled code to this one value.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else 1


def is_one(size: Any) -> bool:
    """Whether a size is the literal 1 (a symbolic size is not)."""
    return isinstance(size, int) and size == 1


def number(value: Any) -> float | None:
    """A Python number as float, else None (bools are no numbers here)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def permutation(node: Node) -> tuple[int, ...] | None:
    """Dimension order of a transposing node: result dim i is input dim ``p[i]``; None for other
    nodes."""
    meta, name = tensor_meta(node), operation(node)
    if meta is None:
        return None
    rank = meta.dim()
    order = list(range(rank))
    if name == "transpose":
        first, second = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        if first is None:
            first, second = node.kwargs.get("axis0"), node.kwargs.get("axis1")
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        first, second = first % rank, second % rank
        order[first], order[second] = order[second], order[first]
    elif name in ("mT", "adjoint") or (name in ("T", "t") and rank == 2):
        order[-1], order[-2] = order[-2], order[-1]
    elif name == "permute":
        dims = node.args[1:] if len(node.args) > 2 else argument(node, 1, "dims")
        given = [d for d in dims if isinstance(d, int)] if isinstance(dims, list | tuple) else []
        if len(given) != rank:
            return None
        order = [d % rank for d in given]
    else:
        return None
    return tuple(order)


def swaps_last_two(node: Node) -> bool:
    """Whether the node is exactly a transposition of the last two dimensions."""
    order = permutation(node)
    return order is not None and order == (*range(len(order) - 2), len(order) - 1, len(order) - 2)


def is_cast(node: Node) -> bool:
    """Whether the node only changes dtype or device."""
    return operation(node) in CASTS and bool(node.args) and isinstance(node.args[0], Node)


def source_text(node: Node) -> str:
    """Dynamo's source expression of a placeholder; the placeholder's target when it has none."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return str(node.target)
    name = source.name
    return str(name() if callable(name) else name)  # a method up to torch 2.11, a property later


def is_module_tensor(node: Node) -> bool:
    """Whether a placeholder is a parameter or buffer of a module."""
    if node.op != "placeholder":
        return False
    text = source_text(node)
    return "._parameters[" in text or "._buffers[" in text


def source_line(node: Node) -> str:
    """The user's source line a node came from, ``file:line in function: code``; empty when
    unknown."""
    lines = (node.meta.get("stack_trace") or node.stack_trace or "").splitlines()
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i].strip()
        if line.startswith("File ") and "/torch/" not in line:
            location = (
                line.removeprefix("File ")
                .replace('"', "")
                .replace(", line ", ":")
                .replace(", in ", " in ")
            )
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            return f"{location}: {code}"
    return ""
