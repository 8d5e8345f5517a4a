"""Guard for buffers of the model whose contents went into a compiled mask."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from stof_compile.seen_tensors import SeenTensors, gatherer


class FoldedBuffers:
    """Tells at each call whether the buffers a mask was read from still hold what they held.

    Args:
        inputs: names of the graph's inputs in order.
        folded: names of those whose contents were read. example_inputs: the inputs at that time.
    """

    def __init__(
        self, inputs: Iterable[str], folded: Collection[str], example_inputs: Sequence[Any]
    ) -> None:
        places = [place for place, name in enumerate(inputs) if name in folded]
        self._gather = gatherer(places)
        buffers = self._gather(example_inputs)
        self._copies = [buffer.detach().clone() for buffer in buffers]
        # one value: several threads may call
        self._last = SeenTensors(buffers), (True,) * len(buffers)

    def unchanged(self, inputs: Sequence[Any]) -> bool:
        """Whether all contents are the same; compared are those of buffers that are not as at the
        last call.
        """
        if not self._copies:
            return True
        buffers = self._gather(inputs)
        seen, equal = self._last
        if not seen.same(buffers):
            equal = tuple(
                torch.equal(buffer, copy) if seen.changed(number, buffer) else equal[number]
                for number, (buffer, copy) in enumerate(zip(buffers, self._copies, strict=True))
            )
            self._last = SeenTensors(buffers), equal
        return all(equal)
