"""Kinds of operations: what one node of a Dynamo graph means to fusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Node

from stof_compile.node_ops import (
    VIEWS,
    argument,
    is_cast,
    is_inplace,
    number,
    operation,
    raw_name,
    shape_of,
    tensor_meta,
)

Family = Literal[
    "attention", "contraction", "convolution", "bias", "activation", "residual", "norm", "scale",
    "cast", "view", "softmax", "embedding", "reduction", "elementwise", "movement",
]  # fmt: skip
ShapeRule = Literal["elementwise", "row_reduction", "view", "contraction", "other"]

COMPUTE_INTENSIVE: frozenset[Family] = frozenset({"attention", "contraction", "convolution"})
CONTRACTIONS = frozenset(
    {"linear", "matmul", "bmm", "addmm", "baddbmm", "addbmm", "mv", "einsum", "bilinear"}
)
CONVOLUTIONS = frozenset(
    {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
    | {"convolution"}
)
ACTIVATIONS = frozenset(
    {
        "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "sigmoid",
        "tanh", "hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign", "logsigmoid",
        "prelu", "glu",
    }
)  # fmt: skip
ELEMENTWISE = frozenset(
    {
        "add", "sub", "mul", "div", "rsub", "neg", "abs", "exp", "exp2", "expm1", "log", "log2",
        "log1p", "sqrt", "rsqrt", "reciprocal", "square", "pow", "sin", "cos", "erf", "floor",
        "ceil", "round", "trunc", "sign", "remainder", "mod", "floordiv", "floor_divide", "where",
        "masked_fill", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "addcmul",
        "addcdiv", "lerp", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor",
        "isnan", "isinf", "isfinite", "nan_to_num", "tril", "triu",
    }
)  # fmt: skip
REDUCTIONS = frozenset(
    {"sum", "mean", "var", "std", "amax", "amin", "max", "min", "prod", "norm", "vector_norm"}
    | {"logsumexp", "any", "all", "argmax", "argmin"}
)
MOVEMENTS = frozenset(
    {"cat", "stack", "roll", "pad", "repeat", "repeat_interleave", "flip", "gather"}
    | {"index_select", "tile"}
)
# One name for views that differ only in how the new shape is written.
VIEW_NAMES = {
    "view": "reshape", "flatten": "reshape", "unflatten": "reshape", "squeeze": "reshape",
    "unsqueeze": "reshape", "ravel": "reshape", "view_as": "reshape", "reshape_as": "reshape",
    "transpose": "permute", "t": "permute", "T": "permute", "mT": "permute", "movedim": "permute",
    "broadcast_to": "expand", "expand_as": "expand",
    "getitem": "slice", "select": "slice", "narrow": "slice",
}  # fmt: skip
# Views that are no step of a computation: they end a gradient, or say where a tensor lives.
NO_STEP = frozenset({"dropout", "detach", "data", "requires_grad_", "index_select_view", "getattr"})


@dataclass(frozen=True)
class OpKind:
    """What a node does.

    Args:
        name: short and stable; the same for all spellings of one operation ("linear",
            "bias_add", "residual_add", "gelu", "layer_norm", "reshape" ...). Segment keys and
            fingerprints are made of it. A "residual_add" adds two tensors of one shape, whatever
            they are; a "bias_add" a vector to the rows of a tensor.
        family: the group of kinds that a template treats alike.
        shape_rule: "elementwise": each element of the (broadcast) operands on its own;
            "row_reduction": each row along trailing dimensions on its own, whether the row keeps
            its length (layer_norm, softmax) or becomes one value (mean); "view": elements keep
            their values and change places only; "contraction": sums products; "other": none of
            these (embedding, cat, reductions of other dimensions, channel norms).
    """

    name: str
    family: Family
    shape_rule: ShapeRule

    @property
    def compute_intensive(self) -> bool:
        """CI; every other kind is memory-intensive (MI)."""
        return self.family in COMPUTE_INTENSIVE


def op_kind(node: Node) -> OpKind | None:
    """Tell the kind of a ``call_function`` or ``call_method`` node.

    Args:
        node: node of a normalised graph with its ``example_value``.
    Returns:
        None for what is no op of a chain: other nodes, nodes without a tensor result (items of
        shapes, asserts, autocast and grad-mode markers), items of a tuple, writes in place,
        random operations (dropout that is still here is active), and operations not known here.
    """
    if node.op not in ("call_function", "call_method") or is_inplace(node):
        return None
    name = operation(node)
    if is_attention(node):  # may return (result, log-sum-exp)
        return OpKind("attention", "attention", "contraction")
    if tensor_meta(node) is None:
        return None
    if name == "mm":
        name = "matmul"
    if name in CONTRACTIONS:
        return OpKind(name, "contraction", "contraction")
    if name in CONVOLUTIONS:
        return OpKind(name, "convolution", "contraction")
    if name in ACTIVATIONS:
        # glu halves a dimension
        return OpKind(name, "activation", "other" if name == "glu" else "elementwise")
    if name in ("add", "mul", "div"):
        return _arithmetic(node, name)
    if name in ELEMENTWISE:
        return OpKind(name, "elementwise", "elementwise")
    if is_cast(node):
        return OpKind("cast", "cast", "elementwise")
    return _row_kind(node, name) or _moving_kind(node, name)


def is_attention(node: Node) -> bool:
    """Whether the node is a whole attention: SDPA, FlexAttention or an operator of ours."""
    name = raw_name(node)
    if name in ("scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward"):
        return True
    return name.startswith("stof::attention_") and not name.endswith("backward")


def _arithmetic(node: Node, name: str) -> OpKind:
    """Add, multiply or divide, by what the operands are."""
    operands = [argument(node, 0, "input"), argument(node, 1, "other")]
    shapes = [shape_of(operand) for operand in operands]
    if name in ("mul", "div"):
        scales = number(operands[1]) is not None or (name == "mul" and number(operands[0]))
        return OpKind(name, "scale" if scales else "elementwise", "elementwise")
    if shapes[0] is None or shapes[1] is None:
        return OpKind(name, "elementwise", "elementwise")
    if len(shapes[0]) > 1 and shapes[0] == shapes[1]:
        return OpKind("residual_add", "residual", "elementwise")
    large, small = sorted(shapes, key=lambda s: -len(s or ()))
    if large and small and len(small) == 1 < len(large) and small[0] == large[-1]:
        return OpKind("bias_add", "bias", "elementwise")
    return OpKind(name, "elementwise", "elementwise")


def _row_kind(node: Node, name: str) -> OpKind | None:
    """Norms, softmax and reductions."""
    source = argument(node, 0, "input")
    rank = len(shape_of(source) or ())
    if name in ("layer_norm", "rms_norm"):
        return OpKind(name, "norm", "row_reduction")
    if name == "group_norm":
        return OpKind(name, "norm", "other")
    if name == "batch_norm":  # in training it writes its running statistics
        training = argument(node, 5, "training", False)
        return None if training is not False else OpKind(name, "norm", "other")
    if name in ("softmax", "log_softmax"):
        dim = argument(node, 1, "dim")
        rows = isinstance(dim, int) and rank > 0 and dim % rank == rank - 1
        return OpKind(name, "softmax", "row_reduction" if rows else "other")
    if name in REDUCTIONS:
        place = 2 if name in ("norm", "vector_norm") else 1  # the order stands before the dimension
        rows = _trailing(argument(node, place, "dim", node.kwargs.get("axis")), rank)
        return OpKind(name, "reduction", "row_reduction" if rows else "other")
    return None


def _trailing(dims: Any, rank: int) -> bool:
    """Whether reduced dimensions are the last ones, and not all."""
    given = dims if isinstance(dims, list | tuple) else (dims,)
    if not given or not all(isinstance(d, int) and not isinstance(d, bool) for d in given):
        return False
    if rank == 0 or len(given) >= max(rank, 2):
        return False
    return {d % rank for d in given} == set(range(rank - len(given), rank))


def _moving_kind(node: Node, name: str) -> OpKind | None:
    """Views, embeddings and copies to other places."""
    source = argument(node, 0, "input")
    if name == "embedding":  # with max_norm it writes its weight
        limited = argument(node, 3, "max_norm") is not None
        return None if limited else OpKind(name, "embedding", "other")
    if name == "getitem":
        if tensor_meta(source) is None:
            return None  # an item of a tuple
        index = argument(node, 1, "index")
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(p is None or p is Ellipsis or isinstance(p, int | slice) for p in parts)
        if not plain or any(isinstance(p, bool) for p in parts):
            return OpKind("index", "movement", "other")
        return OpKind("slice", "view", "view")
    if name in VIEWS and name not in NO_STEP:
        return OpKind(VIEW_NAMES.get(name, name), "view", "view")
    if name in MOVEMENTS:
        return OpKind(name, "movement", "other")
    return None
