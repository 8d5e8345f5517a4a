"""The vertical op list: the ops of a chain that a scheme cuts.

Views that only regroup rows (``[B*S, N]`` to ``[B, S, N]``) are no ops of their own: they stay with
the op that made the value. Otherwise they would stand between two ops that fuse, and no single
move of the search could cross them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.op_kind import OpKind
from stof_compile.fusion.read_recipe import is_free


@dataclass(frozen=True)
class ListedOp:
    """One op of the list.

    Args:
        start, stop: ops of the chain that it stands for.
        kind: of the first. columns: length of the last dimension of its result; 0 for a scalar or
            a symbolic size.
    """

    start: int
    stop: int
    kind: OpKind
    columns: int

    @property
    def name(self) -> str:
        """Name of its kind."""
        return self.kind.name

    @property
    def compute_intensive(self) -> bool:
        """CI or MI."""
        return self.kind.compute_intensive


def op_list(chain: OpChain, nodes: Mapping[str, Node]) -> tuple[ListedOp, ...]:
    """The vertical op list of a chain.

    Args:
        nodes: name -> node of the graph the chain was found in.
    """
    starts = [i for i, op in enumerate(chain.ops) if i == 0 or not _stays(chain, i, nodes)]
    listed = []
    for start, stop in zip(starts, [*starts[1:], len(chain)], strict=True):
        shape = chain.ops[stop - 1].value.shape
        last = shape[-1] if shape else 0
        columns = last if isinstance(last, int) else 0
        listed.append(ListedOp(start, stop, chain.ops[start].kind, columns))
    return tuple(listed)


def span(ops: tuple[ListedOp, ...], start: int, stop: int) -> tuple[int, int]:
    """Ops of the chain that ops ``start <= i < stop`` of the list stand for."""
    return ops[start].start, ops[stop - 1].stop


def _stays(chain: OpChain, index: int, nodes: Mapping[str, Node]) -> bool:
    """Whether an op is a free view of the op just before it."""
    op = chain.ops[index]
    return is_free(op, nodes) and op.operands[0].position == index - 1
