"""Queues of work: numbers in device memory that the workers of a persistent kernel count up, one
for either side of the L2 cache (``l2_sides.py``).

A kernel leaves 0 behind (``hopper_units.py``), so that none has to be written before it: a
launch less on the GPU and on the host. Two kernels at a time must not count the same number. Those
of one stream run one after the other and share one, as every kernel between them waits for the one
before it (``overlap.py``); each call that is captured into a CUDA graph has its own, for graphs are
replayed on any stream, but each one after the other by itself. Numbers are not given back.
"""

import threading
from functools import partial

import torch
from torch import Tensor

from .own_thread import in_own_thread

_NUMBERS = 2**15  # of a device: streams, and calls in captured graphs
_APART = 8  # each begins 32 bytes, as Triton takes its address for a multiple of 16


class _Numbers:
    """The numbers of a device, each handed out once."""

    def __init__(self, device: int) -> None:
        in_own_thread(partial(self._make, device))
        self._next = 0

    def _make(self, device: int) -> None:
        with torch.cuda.device(device):
            self._all = torch.zeros(_NUMBERS, _APART, dtype=torch.int32, device="cuda")
            torch.cuda.current_stream().synchronize()

    def take(self) -> Tensor | None:
        """Numbers that nobody has, [2]; None if there are none left."""
        if self._next == _NUMBERS:
            return None
        self._next += 1
        return self._all[self._next - 1, :2]


_numbers: dict[int, _Numbers] = {}  # by device
_of_streams: dict[tuple[int, int], Tensor] = {}  # by device and torch's number of the stream
_taking = threading.Lock()


def new_queue(device: torch.device) -> Tensor:
    """The queue for a kernel on the current stream of a device, int32 [2], which is 0.

    Raises:
        torch.OutOfMemoryError: the first call on a device finds no memory; a later one may.
    """
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        with _taking:
            held = _numbers.get(index)
            queue = None if held is None else held.take()
        # without numbers, which cannot be made now: one that the graph sets to 0
        return _written(device) if queue is None else queue
    stream = index, torch._C._cuda_getCurrentStream(index)[0]
    queue = _of_streams.get(stream)
    return _first_of(stream, device) if queue is None else queue


def _first_of(stream: tuple[int, int], device: torch.device) -> Tensor:
    index, number = stream
    # torch's own have odd numbers, the default one 0. Another's is its address, which a new stream
    # may get while kernels of the old one still run.
    if number % 2 == 0 and number != 0:
        return _written(device)
    with _taking:
        if stream in _of_streams:
            return _of_streams[stream]
        if index not in _numbers:
            _numbers[index] = _Numbers(index)
        queue = _numbers[index].take()
        if queue is None:
            return _written(device)
        _of_streams[stream] = queue
        return queue


def _written(device: torch.device) -> Tensor:
    """One of its own, set to 0 by a launch."""
    return torch.zeros(2, dtype=torch.int32, device=device)
