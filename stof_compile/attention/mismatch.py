"""Why something that looks like attention is not taken."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from stof_compile.attention.origin import Sizes
from stof_compile.node_ops import argument, raw_name


@dataclass(frozen=True)
class Mismatch:
    """Why something that looks like attention is not taken.

    Args:
        reason: in one sentence.
        undecided: pairs of sizes that would have to be equal, and are not known to be.
        maskable: a mask can be and-ed into it, or it is an error that it cannot; False = it was
            told by its looks only, and what it attends to is not known.
    """

    reason: str
    undecided: Sizes = ()
    maskable: bool = True


def described(node: Node) -> str:
    """A node in the words of a reason."""
    if node.op == "output":
        return "the graph's result"
    return f"'{node.name}' ({raw_name(node) or node.op})"


def tensor_input(node: Node, index: int) -> Node | Mismatch:
    """The node that an operation on one tensor reads."""
    source = argument(node, index, "input")
    return source if isinstance(source, Node) else Mismatch(f"cannot read {described(node)}")
