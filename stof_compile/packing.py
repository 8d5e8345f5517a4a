"""Weights that share an input become one product: Q/K/V, gate and up projections.

    q, k, v = x @ Wq.T + bq, x @ Wk.T + bk, x @ Wv.T + bv
    y = F.linear(x, cat(Wq, Wk, Wv), cat(bq, bk, bv));  q, k, v = slices of y

Whether that is faster depends on device and shape (1.13-1.19x at 128 rows, 0.91x at 32768 on one
GPU), so finding packs and applying them are two steps, with a measurement in between. The original
parameters stay what they are; ``PackedWeights.refresh`` keeps the copies up to date.
Source: QKV fusion of the Graph Surgeon write-up; the legality rules are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from stof_compile.capture import CaptureFacts, add_buffer
from stof_compile.dead_code import erase_dead
from stof_compile.emit import emit
from stof_compile.example_values import update_values
from stof_compile.node_ops import dtype_of
from stof_compile.packing_guard import PackedSlice, PackedWeights
from stof_compile.packing_search import (
    ALREADY_PACKED,
    Pack,
    PackRefusal,
    find_packs,
    packs_bytes,
    search_packs,
)
from stof_compile.packing_siblings import Constants, read_linear

__all__ = [
    "ALREADY_PACKED",
    "Pack",
    "PackRefusal",
    "PackedWeights",
    "apply_packs",
    "find_packs",
    "packs_bytes",
    "search_packs",
]
Names = tuple[str | None, ...]


def apply_packs(gm: GraphModule, facts: CaptureFacts, packs: Sequence[Pack]) -> PackedWeights:
    """Compute each pack with one product.

    Args:
        gm: the graph the packs were found in, or a copy; rewritten, but not recompiled.
        facts: its facts. packs: those to apply.
    Returns:
        The guard that keeps the packed weights equal to the originals; its ``refresh`` has to be
        called with the inputs of the graph before each call.
    """
    nodes = {node.name: node for node in gm.graph.nodes}
    buffers = _Buffers(gm, facts, nodes)
    for number, pack in enumerate(packs):
        assert all(name in nodes for name in pack.nodes), "packs of another graph"
        first = read_linear(nodes[pack.before], buffers.constants)
        assert first is not None, "the graph was changed after its packs were found"
        # not by the name of x: it may be the result of a pack before this one
        operands = [first.x, buffers.packed("weight", pack, pack.weights, number)]
        if any(pack.biases):
            operands.append(buffers.packed("bias", pack, pack.biases, number))
        _rewrite(gm.graph, pack, nodes, operands)
    if packs:
        erase_dead(gm.graph)  # reshapes of x, transposes of weights
    return PackedWeights(buffers.slices)


class _Buffers:
    """Packed copies of parameters, as buffers of the graph; equal ones are shared.

    Args:
        gm: graph that gets them. facts: its facts. nodes: its nodes by name.
    """

    def __init__(self, gm: GraphModule, facts: CaptureFacts, nodes: Mapping[str, Node]) -> None:
        self.constants = Constants(gm, facts)
        self.slices: list[PackedSlice] = []
        self._gm, self._nodes = gm, nodes
        self._places = {name: place for place, name in enumerate(facts.inputs)}
        self._made: dict[Names, Node] = {}

    def packed(self, kind: str, pack: Pack, names: Names, number: int) -> Node:
        """The node of the concatenation of some parameters; zeros stand for a missing bias."""
        if names in self._made:
            return self._made[names]
        values = [self.constants.value(self._nodes[name]) if name else None for name in names]
        dim = 1 if kind == "weight" and pack.layout == "kn" else 0
        tensor = _concatenate(values, pack.sizes, dim)
        starts = accumulate((0, *pack.sizes[:-1]))
        for name, value, start, size in zip(names, values, starts, pack.sizes, strict=True):
            if name is not None and value is not None:
                part = tensor.narrow(dim, start, size)
                self.slices.append(PackedSlice(number, self._places.get(name), value, part))
        node = add_buffer(self._gm, f"stof_packed_{kind}_{number}", tensor)
        node.meta["stof_packed"] = True
        self._made[names] = node
        return node


def _concatenate(values: Sequence[Tensor | None], sizes: Sequence[int], dim: int) -> Tensor:
    """One tensor of several along ``dim``; zeros for what is missing."""
    like = next(value for value in values if value is not None)
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        parts = [
            torch.zeros(size, dtype=like.dtype, device=like.device) if value is None else value
            for value, size in zip(values, sizes, strict=True)
        ]
        return torch.cat([part.detach() for part in parts], dim)


def _rewrite(graph: Graph, pack: Pack, nodes: Mapping[str, Node], operands: Sequence[Node]) -> None:
    before = nodes[pack.before]

    def product(x: Any, weight: Any, bias: Any = None) -> Any:
        if pack.form == "linear":
            return F.linear(x, weight if pack.layout == "nk" else weight.t(), bias)
        weight = weight.t() if pack.layout == "nk" else weight
        if pack.form == "addmm":
            return torch.addmm(bias, x, weight)
        return torch.matmul(x, weight) if bias is None else torch.matmul(x, weight) + bias

    (whole,) = emit(graph, before, before, product, *operands)
    written = []
    parts = zip(
        pack.results, accumulate((0, *pack.sizes[:-1])), pack.sizes, pack.copied, strict=True
    )
    for name, start, size, copied in parts:
        result = nodes[name]

        def part(y: Any, start: int = start, size: int = size, copied: bool = copied) -> Any:
            y = y.narrow(-1, start, size)
            return y.clone(memory_format=torch.contiguous_format) if copied else y

        (new,) = emit(graph, before, result, part, whole)
        assert dtype_of(new) == dtype_of(result), "a pack changes no dtype"
        result.replace_all_uses_with(new)
        written.append(new)
    update_values(graph, *written)
    for name in reversed(pack.nodes):
        graph.erase_node(nodes[name])
