"""What our kernels read is stored once.

Inductor gives an operator of a user the strides it was traced with, and makes a copy for that of
whatever it has not computed yet: one for each argument, and in a kernel an absent bias stands for
another argument, for each kernel that reads it. A norm in front of a product was written four
times, and every layer computed its tables of rotations anew. Stored first, a tensor has the strides
it needs and all read the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node

SPACE = "stof"  # of our operators


@contextmanager
def operands_stored(is_ours: Callable[[Any], bool]) -> Iterator[None]:
    """Have Inductor compute what our kernels and operators read before it asks for strides.

    Where torch lowers graphs in another way, nothing is changed.

    Args:
        is_ours: whether a Triton kernel is one of ours; others are treated as torch.compile does.
    """
    from torch._inductor.graph import GraphLowering

    lower: Any = GraphLowering
    asked = getattr(lower, "run_node", None)
    if asked is None:
        yield
        return

    def run_node(self: Any, n: Node) -> Any:
        if _is_read_by_us(n, is_ours):
            env = getattr(self, "env", {})
            for operand in n.all_input_nodes:
                _store(env.get(operand))
        return asked(self, n)

    lower.run_node = run_node
    try:
        yield
    finally:
        lower.run_node = asked


def _is_read_by_us(node: Node, is_ours: Callable[[Any], bool]) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace == SPACE
    if node.target is not torch.ops.higher_order.triton_kernel_wrapper_mutation:
        return False
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    number = node.kwargs.get("kernel_idx")
    return isinstance(number, int) and is_ours(kernel_side_table.get_kernel(number))


def _store(operand: Any) -> None:
    """Compute what an operand shows, if it shows all of it in the same order."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if not isinstance(operand, ir.TensorBox):
        return
    held: Any = operand.data
    while type(held) in (ir.View, ir.SqueezeView):
        held = held.data
    if isinstance(held, ir.StorageBox):
        sizes: Any = V.graph.sizevars
        if sizes.statically_known_equals(held.get_numel(), operand.get_numel()):
            held.realize()
