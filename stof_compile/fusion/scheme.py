"""Schemes: how an op chain is cut into segments, and the bit code of the cut.

A scheme is an ordered partition of ops 0..n-1 into contiguous segments. In its code all ops of a
segment share a bit, and the bit toggles at each boundary; the first bit is 0, so the 2^(n-1)
schemes of n ops and their codes are one to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

MAX_COMPUTE_INTENSIVE = 2  # of a segment; the paper's limit: a third product does not fit the chip


@dataclass(frozen=True)
class Scheme:
    """A partition of an op chain into segments.

    Args:
        lengths: ops of each segment from left to right, all >= 1, at least one segment; a segment
            of one op is an op left unfused.
    Raises:
        ValueError: no segment, or a length that is no int >= 1.
    Source: numerical encoding of fusion schemes, STOF paper, section 4.3.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths:
            raise ValueError("a scheme needs at least one segment, got none")
        for index, length in enumerate(self.lengths):
            if type(length) is not int or length < 1:
                raise ValueError(
                    f"segment {index} of a scheme has length {length!r}; lengths are ints >= 1"
                )

    @classmethod
    def singletons(cls, ops: int) -> Scheme:
        """The scheme that fuses nothing: ``ops`` segments of one op.

        Raises:
            ValueError: ``ops`` < 1.
        """
        return cls((1,) * ops)

    @classmethod
    def decode(cls, bits: Sequence[int]) -> Scheme:
        """The scheme of a code: its maximal runs of equal bits are the segments.

        Args:
            bits: one 0 or 1 for each op; the complement of a code means the same scheme.
        Raises:
            ValueError: no bits, or a value other than 0 and 1.
        """
        for index, bit in enumerate(bits):
            if bit not in (0, 1):
                raise ValueError(f"bit {index} of a code is {bit!r}; bits are 0 or 1")
        return cls(tuple(len(list(run)) for _, run in groupby(bits)))

    @classmethod
    def from_hex(cls, text: str, ops: int) -> Scheme:
        """The scheme of a code written in hexadecimal (see ``hex``).

        Args:
            text: ceil(ops / 4) digits without a prefix, either case.
            ops: ops of the chain, >= 1; the text alone does not tell it.
        Raises:
            ValueError: ``ops`` < 1, another number of digits, no hexadecimal digits, or a value
                that needs more than ``ops`` bits.
        """
        if ops < 1:
            raise ValueError(f"a scheme needs at least one op, got ops={ops}")
        digits = -(-ops // 4)
        if len(text) != digits or not set(text.lower()) <= set("0123456789abcdef"):
            raise ValueError(f"code {text!r} of {ops} ops: {digits} hexadecimal digits are needed")
        value = int(text, 16)
        if value >> ops:
            raise ValueError(f"code {text!r} needs {value.bit_length()} bits, the chain has {ops}")
        return cls.decode([value >> (ops - 1 - i) & 1 for i in range(ops)])

    @property
    def ops(self) -> int:
        """Ops of the chain."""
        return sum(self.lengths)

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each segment; stop is the first op after it."""
        found, start = [], 0
        for length in self.lengths:
            found.append((start, start + length))
            start += length
        return tuple(found)

    @property
    def code(self) -> tuple[int, ...]:
        """One bit for each op, toggling at each boundary; the first is 0."""
        return tuple(i % 2 for i, length in enumerate(self.lengths) for _ in range(length))

    @property
    def hex(self) -> str:
        """The code as a number, first op in its highest bit, in ceil(ops / 4) lower-case digits."""
        value = int("".join(map(str, self.code)), 2)
        return f"{value:0{-(-self.ops // 4)}x}"

    def merge(self, first: int, last: int) -> Scheme:
        """Join segments ``first`` to ``last``, both included, into one; the others stay.

        Raises:
            ValueError: not 0 <= first < last < number of segments.
        """
        if not 0 <= first < last < len(self.lengths):
            raise ValueError(
                f"cannot merge segments {first} to {last} of {len(self.lengths)}: "
                "0 <= first < last < number of segments is needed"
            )
        joined = sum(self.lengths[first : last + 1])
        return Scheme((*self.lengths[:first], joined, *self.lengths[last + 1 :]))

    def move_boundary(self, index: int, by: int) -> Scheme:
        """Shift the boundary between segments ``index`` and ``index + 1`` by some ops.

        Args:
            index: the segment left of the boundary.
            by: > 0 gives ops of the right segment to the left one, < 0 the other way. A segment
                that loses all its ops vanishes.
        Raises:
            ValueError: there is no such boundary, ``by`` is 0, or the giving segment is too short.
        """
        if not 0 <= index < len(self.lengths) - 1:
            raise ValueError(
                f"no boundary right of segment {index}: the scheme has {len(self.lengths)} segments"
            )
        left, right = self.lengths[index] + by, self.lengths[index + 1] - by
        if by == 0 or left < 0 or right < 0:
            raise ValueError(
                f"cannot move the boundary between segments of {self.lengths[index]} and "
                f"{self.lengths[index + 1]} ops by {by}"
            )
        moved = tuple(length for length in (left, right) if length)
        return Scheme((*self.lengths[:index], *moved, *self.lengths[index + 2 :]))


def fits(code: str, ops: int) -> bool:
    """Whether a scheme code in hexadecimal is one of a chain with so many ops."""
    try:
        Scheme.from_hex(code, ops)
    except ValueError:
        return False
    return True
