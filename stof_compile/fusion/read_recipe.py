"""From a segment of a graph to its recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from stof_compile.fusion.chain import ChainOp, OpChain
from stof_compile.fusion.op_kind import op_kind
from stof_compile.fusion.recipe import (
    ACTIVATIONS,
    BINARY,
    UNARY,
    Attribute,
    Recipe,
    Ref,
    Step,
    TensorSpec,
)
from stof_compile.node_ops import (
    argument,
    is_cast,
    is_inplace,
    number,
    operation,
    tensor_meta,
)


class _UnreadableError(Exception):
    """A node that no step stands for; the message is the reason."""


def segment_operands(chain: OpChain, start: int, stop: int) -> tuple[str, ...]:
    """Names of the nodes a segment reads from outside, in the order of its recipe's operands."""
    names: dict[str, None] = {}
    for op in chain.ops[start:stop]:
        for operand in op.operands:
            if operand.position is None or operand.position < start:
                names.setdefault(operand.name)
    return tuple(names)


def read_recipe(
    gm: GraphModule,
    chain: OpChain,
    start: int,
    stop: int,
    nodes: Mapping[str, Node] | None = None,
) -> Recipe | str:
    """Read what a segment computes.

    Args:
        gm: the graph the chain was found in, unchanged since.
        chain: the chain. start, stop: its ops ``start <= i < stop``.
        nodes: those of the graph by name; who asks often makes the table once.
    Returns:
        The recipe, or why there is none: an operation that no step stands for (attention, a
        product of two activations, a permutation), a symbolic size, a value that is no
        floating-point tensor.
    """
    if nodes is None:
        nodes = {node.name: node for node in gm.graph.nodes}
    outside = segment_operands(chain, start, stop)
    refs = {nodes[name]: Ref("operand", i) for i, name in enumerate(outside)}
    steps: list[Step] = []
    try:
        operands = tuple(_spec(nodes[name]) for name in outside)
        for op in chain.ops[start:stop]:
            node = _only_node(op, nodes)
            steps.append(_step(node, refs))
            refs[node] = Ref("step", len(steps) - 1)
    except _UnreadableError as reason:
        return str(reason)
    return Recipe(operands, tuple(steps))


def read_product(node: Node) -> tuple[tuple[Node, ...], bool] | None:
    """Read a matrix product with a weight.

    Returns:
        ((x, weight) or (x, weight, bias), whether the weight is [K, N]); None for other nodes.
    """
    read = _READERS.get(operation(node))
    if is_inplace(node) or tensor_meta(node) is None or read is None:
        return None
    try:
        kind, inputs, attrs = read(node)
    except _UnreadableError:
        return None
    if kind != "linear" or not all(isinstance(value, Node) for value in inputs):
        return None
    return tuple(inputs), bool(attrs.get("weight_kn", False))


def tensor_spec(node: Node) -> TensorSpec | None:
    """What the tensor of a node looks like; None where no recipe can have it as an operand."""
    try:
        return _spec(node)
    except _UnreadableError:
        return None


def is_free(op: ChainOp, nodes: Mapping[str, Node]) -> bool:
    """Whether an op only regroups the rows of a tensor: a view that keeps the last dimension and
    that no kernel needs to run.
    """
    if op.kind.name != "reshape" or len(op.operands) != 1:
        return False
    source, shape = op.operands[0].value, op.value.shape
    if len(op.nodes) != 1 or not source.shape or not shape:
        return False
    cast = op.value.dtype != source.dtype
    return not cast and source.layout == "contiguous" and source.shape[-1] == shape[-1]


def _only_node(op: ChainOp, nodes: Mapping[str, Node]) -> Node:
    if len(op.nodes) != 1:
        raise _UnreadableError(f"'{op.name}' is an attention")
    return nodes[op.name]


def _spec(node: Node) -> TensorSpec:
    tensor = tensor_meta(node)
    if tensor is None:
        raise _UnreadableError(f"'{node.name}' is no tensor")
    if not tensor.is_floating_point():
        raise _UnreadableError(f"'{node.name}' is of {tensor.dtype}")
    return TensorSpec(
        _sizes(tensor, node), tuple(_strides(tensor)), tensor.dtype, tensor.device.type
    )


def _sizes(tensor: Tensor, node: Node) -> tuple[int, ...]:
    if any(not isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
        raise _UnreadableError(f"'{node.name}' has a symbolic size")
    return tuple(tensor.shape)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride())


def _step(node: Node, refs: Mapping[Node, Ref]) -> Step:
    tensor = tensor_meta(node)
    kind = op_kind(node)
    if tensor is None or kind is None:
        raise _UnreadableError(f"'{node.name}' has no tensor result")
    if not tensor.is_floating_point():
        raise _UnreadableError(f"'{node.name}' is of {tensor.dtype}")
    name = operation(node)
    read = _READERS.get(name)
    if read is None and kind.name == "reshape":
        read = _reshape
    if read is None and is_cast(node):
        read = _cast
    if read is None and name in ACTIVATIONS:
        read = _activation
    if read is None and name in BINARY:
        read = _binary
    if read is None and name in UNARY:
        read = _unary
    if read is None:
        raise _UnreadableError(f"no template knows '{name}' ('{node.name}')")
    step, inputs, attrs = read(node)
    if any(not isinstance(value, Node) or value not in refs for value in inputs):
        raise _UnreadableError(f"'{node.name}' reads something that is no tensor of the segment")
    return Step(
        step,
        tuple(refs[value] for value in inputs),
        _sizes(tensor, node),
        tensor.dtype,
        tuple(sorted(attrs.items())),
    )


_Read = tuple[str, list[Any], dict[str, Attribute]]


def _linear(node: Node) -> _Read:
    x, weight, bias = (argument(node, i, n) for i, n in enumerate(("input", "weight", "bias")))
    return "linear", [x, weight] if bias is None else [x, weight, bias], {}


def _addmm(node: Node) -> _Read:
    if set(node.kwargs) - {"input", "mat1", "mat2"}:
        raise _UnreadableError(f"'{node.name}' is an addmm with alpha, beta or out")
    bias, x, weight = (argument(node, i, n) for i, n in enumerate(("input", "mat1", "mat2")))
    shape = tensor_meta(bias)
    if shape is None or shape.dim() != 1:
        raise _UnreadableError(f"'{node.name}' adds a matrix")
    return "linear", [x, weight, bias], {"weight_kn": True}


def _matmul(node: Node) -> _Read:
    x, weight = argument(node, 0, "input"), argument(node, 1, "other")
    if weight is None:
        weight = argument(node, 1, "mat2")
    shape, x_shape = tensor_meta(weight), tensor_meta(x)
    if shape is None or shape.dim() != 2 or x_shape is None or x_shape.dim() < 1:
        raise _UnreadableError(f"'{node.name}' multiplies two batches of matrices")
    return "linear", [x, weight], {"weight_kn": True}


def _activation(node: Node) -> _Read:
    name = operation(node)
    second = "approximate" if name == "gelu" else "inplace"
    if len(node.args) > 2 or set(node.kwargs) - {"input", second}:
        raise _UnreadableError(f"'{node.name}' has further arguments")
    if is_inplace(node):
        raise _UnreadableError(f"'{node.name}' writes to its input")
    approximate = argument(node, 1, "approximate", "none") if name == "gelu" else "none"
    if approximate not in ("none", "tanh"):
        raise _UnreadableError(f"'{node.name}' is a GELU approximated by {approximate!r}")
    attrs: dict[str, Attribute] = {"name": name if approximate == "none" else "gelu_tanh"}
    return "activation", [argument(node, 0, "input")], attrs


def _norm(node: Node) -> _Read:
    name = operation(node)
    shape = argument(node, 1, "normalized_shape")
    sizes = tuple(shape) if isinstance(shape, list | tuple | torch.Size) else (shape,)
    if len(sizes) != 1 or not isinstance(sizes[0], int):
        raise _UnreadableError(f"'{node.name}' normalises over several dimensions")
    weight = argument(node, 2, "weight")
    bias = argument(node, 3, "bias") if name == "layer_norm" else None
    place, default = (4, 1e-5) if name == "layer_norm" else (3, None)
    eps = argument(node, place, "eps", default)
    x = argument(node, 0, "input")
    tensor = tensor_meta(x)
    if eps is None and tensor is not None:
        # of the dtype PyTorch computes in: fp32 for half types
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        eps = torch.finfo(wide).eps
    if number(eps) is None:
        raise _UnreadableError(f"'{node.name}' has an eps that is no number")
    inputs = [x, *(value for value in (weight, bias) if value is not None)]
    attrs: dict[str, Attribute] = {
        "eps": float(eps),
        "width": sizes[0],
        "has_weight": weight is not None,
        "has_bias": bias is not None,
    }
    return name, inputs, attrs


def _binary(node: Node) -> _Read:
    if set(node.kwargs) - {"input", "other", "self", "exponent"}:
        raise _UnreadableError(f"'{node.name}' has {', '.join(sorted(node.kwargs))}")
    name = operation(node)
    sides = [argument(node, 0, "input"), argument(node, 1, "other", node.kwargs.get("exponent"))]
    numbers = [number(side) for side in sides]
    for place, value in enumerate(numbers):
        if value is not None:
            return name, [sides[1 - place]], {"number": value, "number_first": place == 0}
    return name, sides, {}


def _unary(node: Node) -> _Read:
    if len(node.args) != 1 or node.kwargs:
        raise _UnreadableError(f"'{node.name}' has further arguments")
    return operation(node), [node.args[0]], {}


def _cast(node: Node) -> _Read:
    source, result = tensor_meta(node.args[0]), tensor_meta(node)
    if source is None or result is None or source.device != result.device:
        raise _UnreadableError(f"'{node.name}' moves a tensor")
    return "cast", [node.args[0]], {}


def _reshape(node: Node) -> _Read:
    return "reshape", [node.all_input_nodes[0]], {}


_READERS: dict[str, Callable[[Node], _Read]] = {
    "linear": _linear,
    "addmm": _addmm,
    "matmul": _matmul,
    "mm": _matmul,
    "layer_norm": _norm,
    "rms_norm": _norm,
}
