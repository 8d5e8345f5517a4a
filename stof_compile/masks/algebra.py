"""The operators `&`, `|` and `~` on mask rules, by element and, with three values, by tile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks.spec import EMPTY, FULL, MIXED, MaskSpec, Tiles


@dataclass(frozen=True, eq=False, repr=False)
class And(MaskSpec):
    """Positions kept by every operand."""

    operands: tuple[MaskSpec, ...]
    rule: ClassVar[str] = "and"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Conjunction of the operands."""
        return reduce(torch.logical_and, (one.keep(b, h, q, k) for one in self.operands))

    def classes(self, tiles: Tiles) -> Tensor:
        """Empty if one operand is, full if all are."""
        return reduce(_both, (one.classes(tiles) for one in self.operands))

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """All operands' signatures."""
        return _joint_signature(self.operands, tiles)

    def canonical(self) -> dict[str, Any]:
        """Flattened, in a fixed order, without repetition."""
        return {"rule": "and", "operands": _canonical_operands(self)}

    def __repr__(self) -> str:
        return self._shown or "(" + " & ".join(map(repr, self.operands)) + ")"


@dataclass(frozen=True, eq=False, repr=False)
class Or(MaskSpec):
    """Positions kept by at least one operand."""

    operands: tuple[MaskSpec, ...]
    rule: ClassVar[str] = "or"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Disjunction of the operands."""
        return reduce(torch.logical_or, (one.keep(b, h, q, k) for one in self.operands))

    def classes(self, tiles: Tiles) -> Tensor:
        """Full if one operand is, empty if all are."""
        return reduce(_either, (one.classes(tiles) for one in self.operands))

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """All operands' signatures."""
        return _joint_signature(self.operands, tiles)

    def canonical(self) -> dict[str, Any]:
        """Flattened, in a fixed order, without repetition."""
        return {"rule": "or", "operands": _canonical_operands(self)}

    def __repr__(self) -> str:
        return self._shown or "(" + " | ".join(map(repr, self.operands)) + ")"


@dataclass(frozen=True, eq=False, repr=False)
class Not(MaskSpec):
    """Positions the operand masks."""

    operand: MaskSpec
    rule: ClassVar[str] = "not"

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Negation of the operand."""
        return ~self.operand.keep(b, h, q, k)

    def classes(self, tiles: Tiles) -> Tensor:
        """Empty and full trade places."""
        kind = self.operand.classes(tiles)
        return torch.where(kind == MIXED, kind, 1 - kind)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """The operand's signature."""
        return self.operand.signature(tiles)

    def __invert__(self) -> MaskSpec:
        return self.operand

    def __repr__(self) -> str:
        return f"~{self.operand!r}"


def operand(value: object, sign: str) -> MaskSpec:
    """Return one side of an operator.

    Raises:
        StofMaskError: it is no mask rule.
    """
    if isinstance(value, MaskSpec):
        return value
    raise StofMaskError(
        f"'{sign}' needs a mask rule on both sides, got {type(value).__name__}; wrap a function "
        "mask_mod(b, h, q_idx, kv_idx) with masks.rule and a bool tensor with masks.from_tensor"
    )


def _both(left: Tensor, right: Tensor) -> Tensor:
    return torch.maximum(left, right).masked_fill((left == EMPTY) | (right == EMPTY), EMPTY)


def _either(left: Tensor, right: Tensor) -> Tensor:
    return torch.maximum(left, right).masked_fill((left == FULL) | (right == FULL), FULL)


def _joint_signature(operands: Sequence[MaskSpec], tiles: Tiles) -> tuple[Tensor, ...] | None:
    parts = [one.signature(tiles) for one in operands]
    if any(part is None for part in parts):
        return None
    return tuple(column for part in parts if part is not None for column in part)


def _canonical_operands(spec: And | Or) -> list[dict[str, Any]]:
    flat: dict[str, dict[str, Any]] = {}
    for operand in spec.operands:
        node = operand.canonical()
        inner = node["operands"] if node["rule"] == spec.rule else [node]
        flat.update((json.dumps(one, sort_keys=True), one) for one in inner)
    return [flat[text] for text in sorted(flat)]
