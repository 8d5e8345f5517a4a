"""Guard for buffers of the model whose contents went into a compiled mask."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class FoldedBuffers:
    """Tells at each call whether the buffers a mask was read from still hold what they held.

    Args:
        inputs: names of the graph's inputs in order.
        folded: names of those whose contents were read. example_inputs: the inputs at that time.
    """

    def __init__(
        self, inputs: Iterable[str], folded: Collection[str], example_inputs: Sequence[Any]
    ) -> None:
        self._places = [place for place, name in enumerate(inputs) if name in folded]
        self._copies = [example_inputs[place].detach().clone() for place in self._places]
        self._states = [_state(example_inputs[place]) for place in self._places]

    def unchanged(self, inputs: Sequence[Any]) -> bool:
        """Compare address and version, and the contents only where one of them differs."""
        for number, place in enumerate(self._places):
            state = _state(inputs[place])
            if state == self._states[number]:
                continue
            if not torch.equal(inputs[place], self._copies[number]):
                return False
            self._states[number] = state
        return True


def _state(tensor: Tensor) -> tuple[int, int]:
    """Address and version; inference tensors have no version."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
