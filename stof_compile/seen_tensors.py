"""Whether tensors are still those that were seen, told by address, version and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_version = attrgetter("_version")
_address: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr
_freed = cast("Callable[[int], bool]", torch.UntypedStorage._expired)


class SeenTensors:
    """What tensors were when they were seen; keeps none of them alive.

    Compared are address and version of each tensor, and whether its memory has been freed since
    (new memory may get the old address). That sees ``mul_``, ``load_state_dict``, a replaced tensor
    and ``.data = ...``, but not ``.data.mul_()``, nor writes to inference tensors, which have no
    version.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._states = [_state(tensor) for tensor in tensors]
        self._addresses = tuple(address for address, _ in self._states)
        self._versions = tuple(version for _, version in self._states if version is not None)
        versioned = [i for i, (_, version) in enumerate(self._states) if version is not None]
        whole = len(versioned) == len(tensors)
        self._with_version = _everything if whole else gatherer(versioned)
        # of the storage, not of the tensor: torch.utils.swap_tensors takes none with a weak one
        self._references = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._storages = [reference.cdata for reference in self._references]

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all are as they were, in the order in which they were seen: microseconds."""
        try:
            return (
                tuple(map(_version, self._with_version(tensors))) == self._versions
                and tuple(map(_address, tensors)) == self._addresses
                and not any(map(_freed, self._storages))
            )
        except RuntimeError:  # an inference tensor in the place of one with a version
            return False

    def changed(self, number: int, tensor: Tensor) -> bool:
        """Whether one is not as it was; ``number``: its place in the order."""
        return _freed(self._storages[number]) or _state(tensor) != self._states[number]


def gatherer(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes some items of a sequence, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple(items[place] for place in places)


def _state(tensor: Tensor) -> tuple[int, int | None]:
    """Address and version; inference tensors have no version."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _everything(items: Sequence[Any]) -> Sequence[Any]:
    return items
