"""Config spaces: the settings a template can be built with, pruned before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

Value = int | float | str | bool
Config = dict[str, Value]
"""Dimension -> value, plain JSON."""


@dataclass(frozen=True)
class ConfigSpace:
    """All combinations of some named dimensions that fit the device.

    Args:
        dims: dimension -> its values, in order of size where they have one.
        refusal: config -> why it cannot run here (shared memory, registers, a tile larger than the
            problem), None if it can; asked before anything is compiled.
        kept: values of the only configs that are not refused, where they are known, those that
            are estimated to be fastest first; None = ``refusal`` is asked for each.
    """

    dims: Mapping[str, tuple[Value, ...]]
    refusal: Callable[[Mapping[str, Value]], str | None] = lambda config: None
    kept: tuple[tuple[Value, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.configs())

    def __contains__(self, config: Mapping[str, Value]) -> bool:
        known = config.keys() == self.dims.keys()
        known = known and all(config[name] in values for name, values in self.dims.items())
        return known and self._runs(tuple(config[name] for name in self.dims))

    @property
    def points(self) -> int:
        """Combinations before pruning."""
        return prod(len(values) for values in self.dims.values())

    def configs(self) -> list[Config]:
        """Every config that can run: in the order of ``kept``, or else of the dimensions."""
        if self.kept is not None:
            return [self._config(values) for values in self.kept]
        combinations = product(*self.dims.values())
        return [self._config(values) for values in combinations if self._runs(values)]

    def _runs(self, values: tuple[Value, ...]) -> bool:
        if self.kept is not None:
            return values in self.kept
        return self.refusal(self._config(values)) is None

    def _config(self, values: tuple[Value, ...]) -> Config:
        return dict(zip(self.dims, values, strict=True))


def near(first: Mapping[str, Value], second: Mapping[str, Value]) -> bool:
    """Whether two configs of one space differ in one dimension only."""
    return first.keys() == second.keys() and sum(first[k] != second[k] for k in first) == 1
