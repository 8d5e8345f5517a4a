"""The contract of a template: a parametrised kernel for a family of segments.

A template describes; it imports neither Triton nor TileLang. The kernel is an operator of
``torch.ops.stof`` (schema and fake in ``stof_compile/ops_*.py``, code in ``kernels/``), which takes
the config as an argument, so that ``build`` only writes down a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from stof_compile.templates.space import Config, ConfigSpace, Value
from torch import Tensor

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, run_recipe

TILELANG = "tilelang_"
"""How the names of TileLang's templates begin: compiling a config takes seconds, loading one from
the disk cache tenths of a second."""


@dataclass(frozen=True)
class Slot:
    """Place of an operand among the arguments of a call."""

    operand: int


@dataclass(frozen=True)
class Call:
    """A call of an operator, with operands left open.

    Args:
        op: callable on tensors and on fx proxies alike, such as
            ``torch.ops.stof.fused_linear.default``.
        args: positional arguments; a :class:`Slot`, or a list that has some, stands for operands.
        shape: of the result; the operator's own is reshaped to it.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    shape: tuple[int, ...]

    def run(self, operands: Sequence[Any]) -> Any:
        """Call it on tensors, or on proxies to write it into a graph."""
        result = self.op(*(_filled(argument, operands) for argument in self.args))
        return result.reshape(self.shape)


class Template(ABC):
    """A parametrised kernel.

    Attributes:
        name: unique, stable: stored trials and plans hold it.
        device_kinds: kinds of devices (``DeviceFacts.kind``) it has a kernel for.
        is_library: whether its kernel is a library's. No other process compiles it ahead then, and
            a trial also looks whether it keeps NaN.
    """

    name: ClassVar[str]
    device_kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    is_library: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, recipe: Recipe, device: DeviceFacts) -> str | None:
        """Why this template cannot run a recipe on a device, None if it can."""

    @abstractmethod
    def space(self, recipe: Recipe, device: DeviceFacts) -> ConfigSpace:
        """The configs worth trying for a recipe that is accepted; at least one remains."""

    @abstractmethod
    def first(self, recipe: Recipe, device: DeviceFacts) -> Config:
        """The config that rules choose when nothing may be measured; one of ``space``."""

    @abstractmethod
    def build(self, recipe: Recipe, config: Mapping[str, Value]) -> Call:
        """The call that runs a recipe with a config."""

    def accepts(self, recipe: Recipe, device: DeviceFacts) -> bool:
        """Whether this template can run a recipe on a device."""
        return self.refusal(recipe, device) is None

    def reference(
        self, recipe: Recipe, operands: Sequence[Tensor], dtype: torch.dtype | None = None
    ) -> Tensor:
        """What the kernel has to compute (see ``run_recipe``)."""
        return run_recipe(recipe, operands, dtype)

    def flops(self, recipe: Recipe) -> int:
        """Multiplications and additions of one call."""
        return recipe.flops

    def nbytes(self, recipe: Recipe) -> int:
        """Bytes one call has to move at least."""
        return recipe.nbytes


def _filled(argument: Any, operands: Sequence[Any]) -> Any:
    if isinstance(argument, Slot):
        return operands[argument.operand]
    if isinstance(argument, list | tuple):
        return [_filled(item, operands) for item in argument]
    return argument
