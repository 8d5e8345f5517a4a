"""How one callable is timed and kept apart from its neighbours.

Gates use CUDA-graph replay over rotating inputs (``stof_compile.measure``); the launch-included
time of the same callable stands in a second column.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stof_compile.measure import Timing, time_after_pauses, time_callable

L2_BYTES = 64e6  # an H200 has 60 MB; inputs that rotate through more than this come from memory
MAX_SETS = 96


@contextmanager
def own_caches(root: Path, peer: str, store: Path | None = None) -> Iterator[None]:
    """Give a peer its own Inductor and Triton cache, so that none runs on another's artefacts.

    Args:
        root: folder of all caches; peer: a name in it.
        store: where STOF keeps measured choices, in place of the user's cache folder.
    """
    names = {
        "TORCHINDUCTOR_CACHE_DIR": str(root / peer / "inductor"),
        "TRITON_CACHE_DIR": str(root / peer / "triton"),
        "XDG_CACHE_HOME": str(root / "stof-store" if store is None else store),
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_count(one_set_bytes: int, device: torch.device) -> int:
    """How many input sets rotate: enough to pass the L2 on a GPU; on a CPU three."""
    if device.type != "cuda":
        return 3
    return max(3, min(MAX_SETS, math.ceil(1.5 * L2_BYTES / max(one_set_bytes, 1))))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_call(fn: Callable[..., Any], args: Sequence[Any], device: torch.device) -> float:
    """Seconds of the first call: compiling, tuning and one run."""
    synchronize(device)
    start = time.perf_counter()
    fn(*args)
    synchronize(device)
    return time.perf_counter() - start


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in the memory the next outputs get, so that an unwritten element shows."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # or they might get what an earlier call held: the right result
    held = [torch.full(tuple(shape), float("nan"), dtype=dtype, device=device) for _ in range(3)]
    synchronize(device)
    del held


def peak_bytes(fn: Callable[..., Any], args: Sequence[Any], device: torch.device) -> int | None:
    """Device memory one call takes beyond what is already held; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn(*args)
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def replay_time(
    fn: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]],
    device: torch.device,
    budget_s: float = 0.2,
) -> Timing:
    """Time without launch cost: CUDA-graph replay on a GPU, plain calls on a CPU."""
    return time_callable(_with_torch_functions(fn), sets, device, budget_s=budget_s)


def burst_time(
    fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]], device: torch.device
) -> Timing | None:
    """The same in replays of 20 to 30 ms between pauses; None on a CPU and for what takes longer.

    ``replay_time`` lasts so long that what draws much power runs at a lower clock for most of it.
    """
    return time_after_pauses(_with_torch_functions(fn), sets, device)


def _with_torch_functions(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The timer disables torch functions; a callable compiled with them enabled would compile again
    under its guards.
    """

    def enabled(*args: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return fn(*args)

    return enabled


def launch_time(
    fn: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]],
    device: torch.device,
    budget_s: float = 0.15,
) -> Timing:
    """Time of single calls with an empty queue, so guards, Python and launches count."""
    for args in sets[:2]:
        fn(*args)
    synchronize(device)
    times_us: list[float] = []
    end = time.monotonic() + budget_s
    while len(times_us) < 5 or (time.monotonic() < end and len(times_us) < 500):
        times_us.append(call_us(fn, sets[len(times_us) % len(sets)], device))
    return Timing(*(at(times_us, p) for p in (0.5, 0.2, 0.8)), len(times_us), "launch")


def call_us(fn: Callable[..., Any], args: Sequence[Any], device: torch.device) -> float:
    """Microseconds of one call; on a GPU, whose queue has to be empty, until its work has ended."""
    if device.type == "cuda":
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        start_event.record()
        fn(*args)
        end_event.record()
        end_event.synchronize()
        return 1e3 * float(start_event.elapsed_time(end_event))
    start = time.perf_counter_ns()
    fn(*args)
    return (time.perf_counter_ns() - start) / 1e3


def at(samples: Sequence[float], share: float) -> float:
    """The sample that a share of them lies below."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def back_to_back_us(
    fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]], device: torch.device, calls: int = 20
) -> float:
    """Microseconds of a call in a row of calls: the larger of host and device time."""
    synchronize(device)
    start = time.perf_counter()
    for turn in range(calls):
        fn(*sets[turn % len(sets)])
    synchronize(device)
    return 1e6 * (time.perf_counter() - start) / calls
