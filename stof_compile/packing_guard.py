"""Packed copies of parameters that stay equal to the originals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from stof_compile.seen_tensors import SeenTensors, gatherer

_steps = [0]  # of all optimizers since the first weights were packed


@dataclass(frozen=True)
class PackedSlice:
    """Where one parameter lies in a packed buffer.

    Args:
        pack: number of the pack it belongs to.
        place: index of the parameter among the graph's inputs; None for an attribute of the graph.
        original: the parameter when it was packed; None in a guard, which keeps none alive that
            it gets with the inputs.
        part: view of the packed buffer, of the parameter's shape.
    """

    pack: int
    place: int | None
    original: Tensor | None
    part: Tensor


class PackedWeights:
    """Notices at each call that parameters have changed, and copies them again.

    What is noticed says :class:`SeenTensors`. Behind a step of any optimizer all are copied: those
    with ``fused=True``, and others with kernels of their own, leave versions as they are. The
    buffers keep their addresses: CUDA graphs go on.
    """

    def __init__(self, slices: Iterable[PackedSlice]) -> None:
        # attributes of the graph last: the inputs come as one tuple from itemgetter
        ordered = sorted(slices, key=lambda s: s.place is None)
        originals = [s.original for s in ordered if s.original is not None]
        assert len(originals) == len(ordered), "a guard starts from the parameters packed"
        inputs = [s.place for s in ordered if s.place is not None]
        self.slices = tuple(replace(s, original=None) for s in ordered)
        self._held = tuple(originals[len(inputs) :])
        self._gather = gatherer(inputs)
        _watch_optimizers()
        self._remember(originals)

    @property
    def packs(self) -> int:
        """Number of packs."""
        return len({s.pack for s in self.slices})

    def refreshed_by(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph that looks for changed parameters before each call."""

        def run(*given: Any) -> Any:
            self.refresh(given)
            return compiled(*given)

        return run

    def refresh(self, inputs: Sequence[Any]) -> int:
        """Copy the parameters that have changed since the last call.

        Args:
            inputs: the graph's inputs of this call, in the order of its placeholders.
        Returns:
            Number of parameters copied; 0 in all but the first call after a change.
        """
        tensors = self._gather(inputs)
        if self._held:
            tensors += self._held
        if _steps[0] == self._steps and self._seen.same(tensors):
            return 0
        return self._copy(tensors)

    def _copy(self, tensors: Sequence[Tensor]) -> int:
        count, stepped = 0, _steps[0] != self._steps
        with torch.inference_mode(False), torch.no_grad():
            for number, (s, tensor) in enumerate(zip(self.slices, tensors, strict=True)):
                if not stepped and not self._seen.changed(number, tensor):
                    continue
                assert (tensor.shape, tensor.dtype, tensor.device) == (
                    s.part.shape,
                    s.part.dtype,
                    s.part.device,
                ), "Dynamo compiles anew when a parameter gets another shape, dtype or device"
                s.part.copy_(tensor.detach())
                count += 1
        self._remember(tensors)
        return count

    def _remember(self, tensors: Sequence[Tensor]) -> None:
        self._steps, self._seen = _steps[0], SeenTensors(tensors)


@cache
def _watch_optimizers() -> None:
    """Count the steps of all optimizers from now on."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # a compiled step counts up versions, but one with fused=True, which runs outside its graphs
    if not torch.compiler.is_compiling():
        _steps[0] += 1
    elif any(group.get("fused") for group in optimizer.param_groups):
        _count_outside()


@torch.compiler.disable
def _count_outside() -> None:
    _steps[0] += 1
