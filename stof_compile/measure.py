"""The only timer of STOF, and the correctness gate beside it.

A GPU candidate is timed by replaying a CUDA graph of several calls over rotating input sets: no
launch cost, no input that stays in the cache by luck. A CPU candidate is timed call by call. Both
give the median and the 20th and 80th percentile of one call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stof_compile.device import cuda_index
from stof_compile.errors import StofUnsupportedError
from stof_compile.replay import (
    MAX_RUNS,
    MIN_RUNS,
    time_in_bursts,
    time_on_cuda,
    time_under_load,
)

log = logging.getLogger(__name__)

Clock = Callable[[], int]
"""Nanoseconds of a steady clock; tests pass their own."""

SHORT_SAMPLE_NS = 50_000
"""Shorter samples would show the clock and the Python loop."""


@dataclass(frozen=True)
class Timing:
    """Time of one call.

    Args:
        median_us, p20_us, p80_us: microseconds.
        runs: number of samples behind the percentiles.
        method: "cuda-graph", "cuda-graph in bursts", "cuda-graph under load", "events (<why no
            graph>)" or "clock".
    """

    median_us: float
    p20_us: float
    p80_us: float
    runs: int
    method: str

    def to_dict(self) -> dict[str, Any]:
        """The timing as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class ErrorReport:
    """Scale-free distance of a result from its reference.

    Args:
        max_rel: largest |out - ref| over the largest |ref|.
        rms_rel: root mean square of out - ref over that of ref.
        ok: both within :data:`TOLERANCE`, NaN and infinities in the same places.
    """

    max_rel: float
    rms_rel: float
    ok: bool


TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    # (max_rel, rms_rel): twice the worst error of PyTorch's own attention (math, flash, and softmax
    # with probabilities rounded to the dtype) against fp64: lengths 33-2048, head dims 16-256,
    # unit-normal inputs, no mask / causal / random / narrow band
    torch.float64: (1e-12, 1e-13),
    torch.float32: (5e-6, 2e-6),
    torch.float16: (1e-3, 6e-4),
    torch.bfloat16: (8e-3, 5e-3),
    # the same for softmax with weights rounded to e4m3 in multiples of 2 ** -8 of their largest,
    # which PyTorch has not, against fp64 on the same rounded q, k and v
    torch.float8_e4m3fn: (4.8e-2, 5.1e-2),
}


def check_close(
    out: torch.Tensor, ref64: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> ErrorReport:
    """Compare a result with its reference.

    Args:
        out: any shape and device.
        ref64: the same shape, fp64 (fp32 serves where fp64 is too large).
        dtype: dtype the computation ran in; its row of :data:`TOLERANCE` decides.
        scale: factor on the tolerance, for results of many operations.
    Raises:
        ValueError: shapes differ, or the dtype has no tolerance.
    """
    if out.shape != ref64.shape:
        raise ValueError(f"result {tuple(out.shape)} and reference {tuple(ref64.shape)} differ")
    if dtype not in TOLERANCE:
        raise ValueError(f"no tolerance for {dtype}; known: {', '.join(map(str, TOLERANCE))}")
    if out.numel() == 0:
        return ErrorReport(0.0, 0.0, True)
    out = out.detach().to(device=ref64.device, dtype=ref64.dtype)
    ref64 = ref64.detach()
    finite = ref64.isfinite()
    same_where_not = torch.where(
        finite, out.isfinite(), (out == ref64) | (out.isnan() & ref64.isnan())
    )
    zero = torch.zeros((), dtype=ref64.dtype, device=ref64.device)
    ref64 = torch.where(finite, ref64, zero)
    error = torch.where(finite & out.isfinite(), out - ref64, zero)
    numbers = torch.stack(
        [
            same_where_not.all().to(ref64.dtype),
            error.abs().amax(),
            ref64.abs().amax(),
            error.square().mean().sqrt(),
            ref64.square().mean().sqrt(),
        ]
    )
    same, error_max, ref_max, error_rms, ref_rms = numbers.tolist()  # one synchronisation
    if not same:
        return ErrorReport(float("inf"), float("inf"), False)
    max_rel = error_max / ref_max if ref_max else error_max
    rms_rel = error_rms / ref_rms if ref_rms else error_rms
    allowed_max, allowed_rms = (scale * allowed for allowed in TOLERANCE[dtype])
    return ErrorReport(max_rel, rms_rel, max_rel <= allowed_max and rms_rel <= allowed_rms)


def time_callable(
    fn: Callable[..., Any],
    input_sets: Sequence[tuple[Any, ...]],
    device: torch.device | str,
    *,
    budget_s: float = 0.2,
    capture: bool = True,
    clock: Clock = time.perf_counter_ns,
) -> Timing:
    """Time one call of ``fn``, without gradients.

    The caller owns the inputs: a function that mutates them must be given copies. The state of the
    random generators is the same afterwards. Works inside a ``torch.compile`` backend, where fake
    and functional modes may be active: they are left for the duration.
    Args:
        fn: called as ``fn(*inputs)``; its result is dropped.
        input_sets: tuples of arguments, used in turn, so that not all of them sit in the cache.
        device: where ``fn`` runs.
        budget_s: seconds to spend after warm-up; at least three samples are taken whatever they
            cost.
        capture: on CUDA, replay a graph of calls; False times single calls, launches included.
        clock: for CPU samples.
    Raises:
        ValueError: no input set.
        StofUnsupportedError: the current CUDA stream is being captured, where nothing can be timed.
    """
    samples, method = _samples(fn, input_sets, device, budget_s, capture, clock)
    return _timing(samples, method)


def time_in_turns(
    fns: Sequence[Callable[..., Any]],
    input_sets: Sequence[tuple[Any, ...]],
    device: torch.device | str,
    *,
    budget_s: float = 0.2,
    rounds: int = 3,
    capture: bool = True,
    clock: Clock = time.perf_counter_ns,
) -> list[Timing]:
    """Time functions against each other: in turns, so that a drifting machine treats all alike.

    Functions so slow that the budget does not hold get three samples each, in three rounds, and
    are warmed up once.

    Args:
        budget_s: seconds for each function, over all rounds; the others as for
            :func:`time_callable`, which also says what is raised.
    """
    samples: list[list[float]] = [[] for _ in fns]
    methods = ["" for _ in fns]
    least = -(-MIN_RUNS // rounds)
    slow = False
    for number in range(rounds):
        if slow and number >= MIN_RUNS:
            break
        for index, fn in enumerate(fns):
            more, methods[index] = _samples(
                fn, input_sets, device, budget_s / rounds, capture, clock, least, warm=not slow
            )
            samples[index] += more
        needed_s = sum(min(taken) for taken in samples) * 1e-6 * rounds * least
        slow = needed_s > budget_s * len(fns)
    return [_timing(s, method) for s, method in zip(samples, methods, strict=True)]


def time_as_in_use(
    fns: Sequence[Callable[..., Any]],
    input_sets: Sequence[tuple[Any, ...]],
    device: torch.device | str,
    *,
    turn_s: float = 0.04,
    rounds: int = 4,
) -> list[Timing]:
    """Time functions against each other, on a GPU under a load that lasts (see
    :func:`stof_compile.replay.time_under_load`), where graphs of them can be captured; elsewhere as
    :func:`time_in_turns` does.

    Args:
        turn_s: seconds of a turn. rounds: turns of each function; the others as for
            :func:`time_callable`, which also says what is raised.
    """
    device = torch.device(device)
    if device.type == "cuda" and input_sets:
        with _on_cuda(device):
            samples = time_under_load(fns, input_sets, turn_s, rounds)
        if samples is not None:
            return [_timing(taken, "cuda-graph under load") for taken in samples]
    return time_in_turns(fns, input_sets, device, budget_s=turn_s * rounds, rounds=rounds)


def time_after_pauses(
    fn: Callable[..., Any], input_sets: Sequence[tuple[Any, ...]], device: torch.device | str
) -> Timing | None:
    """Time one call of ``fn`` on a GPU in bursts that are to end before its power limit lowers the
    clock (see :func:`stof_compile.replay.time_in_bursts`).

    Args:
        fn, input_sets, device: as for :func:`time_callable`, which also says what is raised.
    Returns:
        None on a CPU, where no graph of it can be captured, and where it takes too long.
    """
    if not input_sets:
        raise ValueError("timing needs at least one set of inputs")
    device = torch.device(device)
    if device.type != "cuda":
        return None
    with _on_cuda(device):
        samples = time_in_bursts(fn, input_sets)
    return None if samples is None else _timing(samples, "cuda-graph in bursts")


def sample_us(
    fn: Callable[..., Any],
    input_sets: Sequence[tuple[Any, ...]],
    device: torch.device | str,
    *,
    budget_s: float = 0.2,
    clock: Clock = time.perf_counter_ns,
) -> list[float]:
    """Single samples in microseconds, for statistics of one's own; as :func:`time_callable`."""
    return _samples(fn, input_sets, device, budget_s, True, clock)[0]


def _samples(
    fn: Callable[..., Any],
    input_sets: Sequence[tuple[Any, ...]],
    device: torch.device | str,
    budget_s: float,
    capture: bool,
    clock: Clock,
    least: int = MIN_RUNS,
    warm: bool = True,
) -> tuple[list[float], str]:
    """Microseconds per call, and how they were taken.

    Args:
        least: samples, whatever they cost. warm: call the function first on a CPU; on a GPU a
            graph is captured, which takes a call anyway.
    """
    if not input_sets:
        raise ValueError("timing needs at least one set of inputs")
    device = torch.device(device)
    if device.type != "cuda":
        with real_tensors(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            return _time_on_cpu(fn, input_sets, budget_s, clock, least, warm), "clock"
    with _on_cuda(device):
        return time_on_cuda(fn, input_sets, budget_s, capture, least)


@contextmanager
def _on_cuda(device: torch.device) -> Iterator[None]:
    """Run real tensors on a device, without gradients; random generators are as they were after.

    Raises:
        StofUnsupportedError: the current CUDA stream is being captured.
    """
    with real_tensors(), torch.no_grad():
        if torch.cuda.is_current_stream_capturing():
            raise StofUnsupportedError(
                "cannot time kernels while the current CUDA stream is being captured; call the "
                "compiled model once before capturing a graph"
            )
        index = cuda_index(device)
        with torch.cuda.device(index), torch.random.fork_rng(devices=[]), _own_generator(index):
            yield


@contextmanager
def _own_generator(index: int) -> Iterator[None]:
    """Give the GPU's default generator another state, and its own one back afterwards.

    Restoring the numbers of the state is not enough: torch leaves the state that a failed capture
    began with in its capturing mode, and every later random number of the process would raise.
    """
    torch.cuda.init()
    generator = torch.cuda.default_generators[index]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Leave fake, functional and tracing modes, so that tensors made inside are real."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(unset_fake_temporarily())
        # a candidate that compiles must not join the outer trace
        stack.enter_context(tracing(None))
        yield


def _time_on_cpu(
    fn: Callable[..., Any],
    input_sets: Sequence[tuple[Any, ...]],
    budget_s: float,
    clock: Clock,
    least: int,
    warm: bool,
) -> list[float]:
    budget_ns = budget_s * 1e9
    spent = 0
    last = SHORT_SAMPLE_NS
    for inputs in input_sets if warm else ():
        start = clock()
        fn(*inputs)
        last = clock() - start
        spent += last
        if spent > budget_ns:
            break
    calls = max(1, min(1000, SHORT_SAMPLE_NS // max(last, 1)))
    samples: list[float] = []
    spent = 0
    turn = 0
    while len(samples) < least or (spent < budget_ns and len(samples) < MAX_RUNS):
        start = clock()
        for _ in range(calls):
            fn(*input_sets[turn % len(input_sets)])
            turn += 1
        elapsed = clock() - start
        spent += elapsed
        samples.append(elapsed / calls / 1e3)
    return samples


def _timing(samples_us: Sequence[float], method: str) -> Timing:
    ordered = sorted(samples_us)
    median, p20, p80 = (_percentile(ordered, share) for share in (0.5, 0.2, 0.8))
    return Timing(median, p20, p80, len(ordered), method)


def _percentile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
