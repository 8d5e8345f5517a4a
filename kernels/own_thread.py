"""What is allocated once for a process, in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Made = TypeVar("_Made")


def in_own_thread(make: Callable[[], _Made]) -> _Made:
    """Call it and wait: the calling thread may allocate from the memory of a CUDA graph, as when
    torch runs a graph for the last time before it captures it.

    Raises:
        Whatever ``make`` does.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()
