"""What the search knows of an op: its name, and whether it is compute-intensive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Segment = tuple[int, int]
"""(start, stop) of a run of ops; stop is the first op after it."""


class Kind(Protocol):
    """Kind of one op of a chain."""

    @property
    def name(self) -> str:
        """Name of the op kind, such as ``linear`` or ``layer_norm``."""

    @property
    def compute_intensive(self) -> bool:
        """True for matmul, linear, convolution and attention (CI), False for the rest (MI)."""


def compute_intensive_ops(kinds: Sequence[Kind], segment: Segment) -> int:
    """Number of compute-intensive ops of a segment."""
    start, stop = segment
    return sum(kind.compute_intensive for kind in kinds[start:stop])
