"""Packed copies of parameters that stay equal to the originals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_version = attrgetter("_version")
_address: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr
_freed = cast("Callable[[int], bool]", torch.UntypedStorage._expired)
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

    Compared are address and version of each tensor, and whether its memory has been freed since
    (new memory may get the old address). That sees ``mul_``, ``load_state_dict``, a replaced
    parameter and ``.data = ...``, but not ``.data.mul_()``, nor writes to inference tensors, which
    have no version. Behind a step of any optimizer all are copied: those with ``fused=True``, and
    others with kernels of their own, leave versions as they are. The buffers keep their addresses:
    CUDA graphs go on.
    """

    def __init__(self, slices: Iterable[PackedSlice]) -> None:
        # attributes of the graph last: the inputs come as one tuple from itemgetter
        ordered = sorted(slices, key=lambda s: s.place is None)
        originals = [s.original for s in ordered if s.original is not None]
        assert len(originals) == len(ordered), "a guard starts from the parameters packed"
        inputs = [s.place for s in ordered if s.place is not None]
        self.slices = tuple(replace(s, original=None) for s in ordered)
        self._held = tuple(originals[len(inputs) :])
        self._gather = _gatherer(inputs)
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
        try:
            if (
                _steps[0] == self._steps
                and tuple(map(_version, self._with_version(tensors))) == self._versions
                and tuple(map(_address, tensors)) == self._addresses
                and not any(map(_freed, self._storages))
            ):
                return 0
        except RuntimeError:  # an inference tensor in the place of one with a version
            pass
        return self._copy(tensors)

    def _copy(self, tensors: Sequence[Tensor]) -> int:
        count, stepped = 0, _steps[0] != self._steps
        with torch.inference_mode(False), torch.no_grad():
            for number, (s, tensor) in enumerate(zip(self.slices, tensors, strict=True)):
                changed = stepped or _freed(self._storages[number])
                if not changed and _state(tensor) == self._states[number]:
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
        self._steps = _steps[0]
        self._states = [_state(tensor) for tensor in tensors]
        self._addresses = tuple(address for address, _ in self._states)
        self._versions = tuple(version for _, version in self._states if version is not None)
        versioned = [i for i, (_, version) in enumerate(self._states) if version is not None]
        whole = len(versioned) == len(tensors)
        self._with_version = _everything if whole else _gatherer(versioned)
        # weak: the memory of a parameter that was replaced is not kept alive
        self._references = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._storages = [reference.cdata for reference in self._references]


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


def _state(tensor: Tensor) -> tuple[int, int | None]:
    """Address and version; inference tensors have no version."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _gatherer(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes some items of a sequence, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple(items[place] for place in places)


def _everything(items: Sequence[Any]) -> Sequence[Any]:
    return items
