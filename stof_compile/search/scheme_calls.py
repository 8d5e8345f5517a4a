"""Schemes as functions that can be timed against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stof_compile.fusion.recipe import Recipe

Launch = Callable[..., Any]


def scheme_calls(
    schemes: Sequence[Sequence[tuple[Recipe, Launch]]],
    operands: Mapping[str, Sequence[tuple[Any, ...]]],
) -> list[Callable[[int], None]]:
    """A function for each scheme, which runs its segments one after the other.

    Args:
        schemes: segments in order, each with the call of its candidate. operands: by the key of a
            recipe, sets of operands.
    Returns:
        Functions of a turn; another turn takes other sets, and alike segments of a turn read
        weights of their own.
    """
    calls: list[Callable[[int], None]] = []
    for scheme in schemes:
        count = Counter(recipe.key for recipe, _ in scheme)
        seen: Counter[str] = Counter()
        parts = []
        for recipe, call in scheme:
            key = recipe.key
            parts.append((call, operands[key], count[key], seen[key]))
            seen[key] += 1

        def run(turn: int, parts: Any = parts) -> None:
            for call, sets, alike, number in parts:
                call(*sets[(turn * alike + number) % len(sets)])

        calls.append(run)
    return calls
