"""Queues of work: the number in device memory that the workers of a persistent kernel count up.

A kernel leaves 0 behind (``hopper_units.next_number``), so that none has to be written before it: a
launch less on the GPU and on the host. Two kernels at a time must not count the same number. Those
of one stream run one after the other and share one; each call that is captured into a CUDA graph
has its own, for graphs are replayed on any stream, but each one after the other by itself.
"""

import threading

import torch
from torch import Tensor

_NUMBERS = 2**15  # of a device: streams, and calls in captured graphs
_APART = 8  # each begins 32 bytes, as Triton takes its address for a multiple of 16
_STREAM_PER_THREAD = 2  # what CUDA calls it: one handle, and a stream for each thread


class _Numbers:
    """The numbers of a device, each handed out once."""

    def __init__(self, device: int) -> None:
        # in a thread of its own: this one may allocate from the memory of a CUDA graph, as when
        # torch runs a graph for the last time before it captures it
        made = threading.Thread(target=self._make, args=(device,))
        made.start()
        made.join()
        self._next = 0

    def _make(self, device: int) -> None:
        with torch.cuda.device(device):
            self._all = torch.zeros(_NUMBERS, _APART, dtype=torch.int32, device="cuda")
            torch.cuda.current_stream().synchronize()

    def take(self) -> Tensor | None:
        """A number that nobody has, [1]; None if there is none left."""
        if self._next == _NUMBERS:
            return None
        self._next += 1
        return self._all[self._next - 1, :1]


_numbers: dict[int, _Numbers] = {}  # by device
_of_streams: dict[tuple[int, int, int], Tensor] = {}  # by device, stream and thread, or 0
_taking = threading.Lock()


def new_queue(device: torch.device) -> Tensor:
    """The queue for a kernel on the current stream of a device, int32 [1], which is 0."""
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        with _taking:
            held = _numbers.get(index)
            queue = None if held is None else held.take()
        # without numbers, which cannot be made now: one that the graph sets to 0
        return torch.zeros(1, dtype=torch.int32, device=device) if queue is None else queue
    handle = torch._C._cuda_getCurrentRawStream(index)
    stream = index, handle, threading.get_ident() if handle == _STREAM_PER_THREAD else 0
    queue = _of_streams.get(stream)
    return _first_of(stream) if queue is None else queue


def _first_of(stream: tuple[int, int, int]) -> Tensor:
    with _taking:
        if stream in _of_streams:
            return _of_streams[stream]
        device = stream[0]
        if device not in _numbers:
            _numbers[device] = _Numbers(device)
        queue = _numbers[device].take()
        if queue is None:
            return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
        _of_streams[stream] = queue
        return queue
