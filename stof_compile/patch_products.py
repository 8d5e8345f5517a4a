"""Convolutions over patches of an image that matrix products compute.

    conv2d(x, w, b, stride=kernel).flatten(2).transpose(1, 2)    # [B, O, h, w] -> [B, h*w, O]
    ->
    linear(patches of x [B, h*w, C*p*q], w.reshape(O, C*p*q), b)

Where the kernel is as large as its stride, as in the patch embedding of a vision Transformer, no
patch overlaps another: each is a row of one matrix, read once. Inputs are read at the place of the
convolution, so it does not matter what is written to them behind it. The product is contiguous
where the transposition was not: to be run where all that sees its strides is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stof_compile.between import no_border
from stof_compile.dead_code import erase_dead
from stof_compile.emit import emit, in_fake_mode
from stof_compile.example_values import values_behind
from stof_compile.node_ops import (
    argument,
    dtype_of,
    is_inplace,
    operation,
    permutation,
    same_size,
    shape_of,
    tensor_meta,
)

DEVICES = frozenset({"cuda"})  # not measured on others
DTYPES = frozenset({torch.float16, torch.bfloat16})  # fp32 convolutions may use TF32 by default
FLATTENING = frozenset({"flatten", "reshape", "view"})


@dataclass(frozen=True)
class Patches:
    """A convolution over patches.

    Args:
        conv: its node; nothing but ``result`` sees what it returns. result: node of the patches
            as rows, [B, h*w, O].
        x, weight, bias: its inputs, [B, C, h*p, w*q], [O, C, p, q] and [O].
        grid: (h, w), patches in each direction.
    """

    conv: Node
    result: Node
    x: Node
    weight: Node
    bias: Node | None
    grid: tuple[int, int]


def patches_as_products(gm: GraphModule) -> int:
    """Compute convolutions over patches as matrix products.

    Args:
        gm: graph, rewritten but not recompiled.
    Returns:
        Number of convolutions that are gone.
    """
    count = sum(_rewritten(gm, node) for node in list(gm.graph.nodes))
    if count:
        erase_dead(gm.graph)
    return count


def _rewritten(gm: GraphModule, conv: Node) -> bool:
    patches = _find_patches(conv)
    if patches is None:
        return False
    value = tensor_meta(patches.result)
    assert value is not None, "what was matched has a shape"
    with in_fake_mode(value):
        rows = torch.empty_like(value, memory_format=torch.contiguous_format)
    values = values_behind(patches.result, rows)
    if values is None:
        return False
    inputs = [n for n in (patches.x, patches.weight, patches.bias) if n is not None]
    (product,) = emit(gm.graph, conv, conv, _product(patches), *inputs)
    patches.result.replace_all_uses_with(product)
    for node in (patches.result, *patches.result.all_input_nodes[:1], conv):
        gm.graph.erase_node(node)
    values[product] = values.pop(patches.result)
    for node, new in values.items():
        node.meta["example_value"] = new
    return True


def _product(patches: Patches) -> Callable[..., Any]:
    channels, *kernel = (shape_of(patches.weight) or ())[1:]
    (h, w), (p, q) = patches.grid, kernel
    width = channels * p * q

    def build(x: Any, weight: Any, bias: Any = None) -> Any:
        rows = x.reshape(-1, channels, h, p, w, q).permute(0, 2, 4, 1, 3, 5)
        return F.linear(rows.reshape(-1, h * w, width), weight.reshape(-1, width), bias)

    return build


def _find_patches(conv: Node) -> Patches | None:
    """The patches that a node convolves, None where a product cannot or should not do it."""
    kernel = _kernel(conv)
    result = _rows_of(conv)
    if kernel is None or result is None or not no_border(conv, result):
        return None
    x, weight, bias = (argument(conv, i, n) for i, n in enumerate(("input", "weight", "bias")))
    if not all(_is_fit(node) for node in (x, weight, conv, result)):
        return None
    if bias is not None and not _is_fit(bias):
        return None
    tensors = [x, weight, conv, result] + ([] if bias is None else [bias])
    if len({dtype_of(node) for node in tensors}) != 1:
        return None
    held = tensor_meta(weight)
    if held is None or not held.is_contiguous():  # to copy it at each call would cost
        return None
    sizes = (shape_of(x) or ())[1:]
    if len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
        return None
    if sizes[1] % kernel[0] or sizes[2] % kernel[1] or prod(sizes) == 0:
        return None  # what is left over at the border is not convolved
    grid = (sizes[1] // kernel[0], sizes[2] // kernel[1])
    return Patches(conv, result, x, weight, bias, grid)


def _kernel(conv: Node) -> tuple[int, int] | None:
    """The kernel of a convolution if it is its stride as well, and nothing is padded or grouped."""
    name = operation(conv)
    if name not in ("conv2d", "convolution") or is_inplace(conv):
        return None
    transposed = name == "convolution" and argument(conv, 6, "transposed") is not False
    shape = shape_of(argument(conv, 1, "weight"))
    if shape is None or len(shape) != 4 or not all(isinstance(size, int) for size in shape):
        return None
    padding, groups = argument(conv, 4, "padding", 0), 6 if name == "conv2d" else 8
    plain = (
        not transposed
        and (padding == "valid" or _pair(padding) == (0, 0))
        and _pair(argument(conv, 5, "dilation", 1)) == (1, 1)
        and argument(conv, groups, "groups", 1) == 1
    )
    kernel = (shape[2], shape[3])
    same = plain and _pair(argument(conv, 3, "stride", 1)) == kernel
    return kernel if same and kernel != (1, 1) and shape[0] > 0 else None


def _pair(value: Any) -> tuple[int, int] | None:
    """Heights and widths as torch reads them: a number stands for both."""
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    if len(given) not in (1, 2) or not all(isinstance(one, int) for one in given):
        return None
    return given[0], given[-1]


def _rows_of(conv: Node) -> Node | None:
    """The node that has the result of a convolution as [B, h*w, O], if all else sees only that."""
    flat = _only_user(conv)
    rows = None if flat is None else _only_user(flat)
    shape, flat_shape = shape_of(conv), shape_of(flat)
    if flat is None or rows is None or shape is None or flat_shape is None:
        return None
    if len(shape) != 4 or len(flat_shape) != 3 or operation(flat) not in FLATTENING:
        return None
    sizes = (shape[0], shape[1], shape[2] * shape[3])
    if not all(same_size(a, b) for a, b in zip(sizes, flat_shape, strict=True)):
        return None
    return rows if permutation(rows) == (0, 2, 1) else None


def _only_user(node: Node) -> Node | None:
    """The one node that reads another, if it is what that one views."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if user.all_input_nodes[:1] == [node] and not is_inplace(user) else None


def _is_fit(node: Any) -> bool:
    """Whether a node is a plain tensor that products were measured for."""
    value = tensor_meta(node)
    if value is None or is_traceable_wrapper_subclass(value):
        return False
    dense = value.layout == torch.strided
    return dense and value.device.type in DEVICES and value.dtype in DTYPES
