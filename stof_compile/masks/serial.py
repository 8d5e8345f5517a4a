"""Reading mask rules back from their JSON tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks import patterns, rules, tensor_rules
from stof_compile.masks.algebra import And, Not, Or
from stof_compile.masks.computed import Computed
from stof_compile.masks.opaque import Opaque
from stof_compile.masks.random_tiles import RandomTiles
from stof_compile.masks.spec import MaskSpec

RULES: tuple[type[MaskSpec], ...] = (
    And,
    Or,
    Not,
    rules.Dense,
    rules.Band,
    rules.LowerRight,
    rules.Range,
    rules.BlockDiagonal,
    rules.Multiple,
    rules.Phase,
    RandomTiles,
    patterns.GlobalTokens,
    patterns.Longformer,
    patterns.BigBird,
    patterns.Dilated,
    patterns.Strided,
    patterns.Fixed,
    patterns.PrefixLM,
    patterns.LongformerAE,
    patterns.BigBirdAE,
    patterns.PerHead,
    tensor_rules.Document,
    tensor_rules.BatchPrefix,
    tensor_rules.TensorRule,
    tensor_rules.BlockTable,
    tensor_rules.Points,
    Opaque,
    Computed,
)


def decode(node: Any, tensors: Sequence[Tensor]) -> MaskSpec:
    """Build the rule of one JSON node.

    Args:
        node: dictionary with "rule" and the fields of that rule.
        tensors: what the tree's tensor numbers refer to.
    Raises:
        StofMaskError: unknown rule or fields that don't fit.
    """
    if not isinstance(node, dict) or "rule" not in node:
        raise StofMaskError(f"a mask rule is a JSON object with 'rule', got {node!r}")
    found = [one for one in RULES if one.rule == node["rule"]]
    if not found:
        known = ", ".join(sorted(one.rule for one in RULES))
        raise StofMaskError(f"unknown mask rule {node['rule']!r}; known: {known}")
    names = {field.name for field in dataclasses.fields(found[0])}  # type: ignore[arg-type]
    given = set(node) - {"rule"}
    if not given <= names:
        raise StofMaskError(
            f"mask rule {node['rule']!r} has no field {sorted(given - names)}; fields: "
            f"{sorted(names)}"
        )
    try:
        return found[0](**{name: _value(node[name], tensors) for name in given})
    except TypeError as error:
        raise StofMaskError(f"mask rule {node['rule']!r} is incomplete: {error}") from error


def _value(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, dict) and "tensor" in value:
        number = value["tensor"]
        if not 0 <= number < len(tensors):
            raise StofMaskError(
                f"the mask rule refers to tensor {number}, but {len(tensors)} were given"
            )
        return tensors[number]
    if isinstance(value, dict):
        return decode(value, tensors)
    return tuple(_value(one, tensors) for one in value) if isinstance(value, list) else value
