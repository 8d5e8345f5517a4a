"""Which half of the L2 cache is near to which multiprocessor.

The L2 cache of an A100, H100 or H200 is two partitions. A line has its home in one of them; a
multiprocessor of the other half reads it through the link between the two, and leaves a copy on its
own side. Kernels that read the same keys from both halves load them over that link once more, and
keep them twice. Nothing says which multiprocessor belongs where, so it is measured: an atomic
operation is done where the line is at home, which takes about 290 cycles from the same half and 500
from the other (H200). The sides decide who computes what, never a result.

Source: ours; that there are two partitions is in NVIDIA's A100 whitepaper, on the L2 cache.
"""

import logging
import threading
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .own_thread import in_own_thread

log = logging.getLogger(__name__)

_LINES = 24  # whose home is one half or the other by chance
_APART = 5152  # 32-bit numbers from one to the next
_TRIES = 40  # the shortest counts
_LAUNCHES = 3
_FARTHER = 1.25  # times the shortest way, at least, where a line is far
_CLEAR = 0.8  # of the lines have to agree about a multiprocessor
_FEWEST_LINES = 8
_FEWEST = 0.25  # of the multiprocessors on a side
_MOST_UNCLEAR = 0.125  # of the multiprocessors
_MEASUREMENTS = 3  # until it is left at that there is no telling
_ROOM = 1024  # in the table: a multiprocessor's number may be over how many there are

_known: dict[int, Tensor] = {}  # by device
_refused: dict[int, int] = {}  # measurements without a result, by device
_tables: list[Tensor] = []  # all there ever were: kernels of any stream may still read one
_measuring = threading.Lock()


@triton.jit
def _latency_kernel(found, lines, LINES: tl.constexpr, APART: tl.constexpr, TRIES: tl.constexpr):
    """The multiprocessor's number and the shortest time of an atomic on each line, in cycles."""
    program = tl.program_id(0)
    number = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid; // $1", "=r,r", [program], tl.int32, is_pure=False, pack=1
    )
    tl.store(found + program * (LINES + 1), number)
    for line in range(LINES):
        shortest = 1 << 30
        for _ in range(TRIES):
            took = tl.inline_asm_elementwise(
                "{ .reg .u32 t0, t1, r; .reg .pred p;"
                " mov.u32 t0, %clock;"
                " atom.global.add.u32 r, [$1], 0;"
                " setp.ne.u32 p, r, 1;"  # the second time is read behind the answer, which is 0
                " mov.u32 t1, 0;"
                " @p mov.u32 t1, %clock;"
                " sub.u32 $0, t1, t0; }",
                "=r,l",
                [lines + line * APART],
                tl.int32,
                is_pure=False,
                pack=1,
            )
            shortest = tl.minimum(shortest, took)
        tl.store(found + program * (LINES + 1) + 1 + line, shortest)


def l2_sides(device: torch.device) -> Tensor:
    """0 or 1 for each multiprocessor of a CUDA device by its number, int32 [1024]: those with the
    same value are near to the same half of the L2 cache.

    Where there is no telling, and in a CUDA graph whose capture is the first call, two neighbours
    after the other: halves that know nothing of the cache are computed side by side, too.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    held = _known.get(index)
    if held is not None:
        return held
    if torch.cuda.is_current_stream_capturing():
        number = torch.arange(_ROOM, dtype=torch.int32, device=device)
        return number.bitwise_right_shift_(1).bitwise_and_(1)
    with _measuring:
        if index not in _known:
            return in_own_thread(partial(_table, torch.device(device.type, index)))
        return _known[index]


def _table(device: torch.device) -> Tensor:
    """The table, which is kept where it has a result or was asked for often enough."""
    with torch.cuda.device(device):
        sides = _measured(device)
        values = [sides.get(n, sides.get(n ^ 1, n // 2 % 2)) for n in range(_ROOM)]
        table = torch.tensor(values, dtype=torch.int32, device=device)
        torch.cuda.current_stream().synchronize()
    _tables.append(table)
    _refused[device.index] = _refused.get(device.index, 0) + (not sides)
    if sides or _refused[device.index] == _MEASUREMENTS:
        _known[device.index] = table
    return table


def _measured(device: torch.device) -> dict[int, int]:
    try:
        sides = sides_of(_latencies(device))
    except Exception as error:  # no memory, no inline assembly, a compiler that is not there
        log.debug("the halves of the L2 cache were not measured: %s", error)
        return {}
    log.debug("multiprocessors by the half of the L2 cache: %s", sides)
    return sides


def _latencies(device: torch.device) -> dict[int, list[int]]:
    """Shortest times by multiprocessor; empty where few of them were free."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    lines = torch.zeros(_LINES * _APART, dtype=torch.int32, device=device)
    found = torch.full((2 * count, _LINES + 1), -1, dtype=torch.int32, device=device)
    shortest: dict[int, list[int]] = {}
    for _ in range(_LAUNCHES):
        _latency_kernel[(2 * count,)](found, lines, _LINES, _APART, _TRIES, num_warps=1)
        for number, *times in found.tolist():
            if 0 <= number < _ROOM:  # else nothing ran: a process that only compiles
                before = shortest.get(number, times)
                shortest[number] = [min(pair) for pair in zip(before, times, strict=True)]
    return shortest if len(shortest) > count // 2 else {}


def sides_of(latencies: dict[int, list[int]]) -> dict[int, int]:
    """The side of each multiprocessor but for a few that other work disturbed; empty where they do
    not fall in two groups.

    Args:
        latencies: of the same lines, in cycles, by multiprocessor.
    """
    lines = [sorted(line) for line in zip(*latencies.values(), strict=True)]
    outer = len(latencies) // 8  # not the extremes, which noise makes
    ends = [(line[outer], line[-1 - outer]) for line in lines]
    halves = {i: (near + far) / 2 for i, (near, far) in enumerate(ends) if far >= _FARTHER * near}
    if len(halves) < _FEWEST_LINES:
        return {}
    away = {n: [times[i] > half for i, half in halves.items()] for n, times in latencies.items()}

    def alike(own: list[bool], pattern: list[bool]) -> float:
        return sum(a == b for a, b in zip(own, pattern, strict=True)) / len(halves)

    # one that is clearly like or unlike the others, then what all of its side have in common
    pattern = max(
        away.values(), key=lambda one: sum(abs(alike(o, one) - 0.5) for o in away.values())
    )
    for _ in range(2):
        votes = [
            own if alike(own, pattern) > 0.5 else [not x for x in own] for own in away.values()
        ]
        pattern = [2 * sum(line) > len(votes) for line in zip(*votes, strict=True)]
    likeness = {number: alike(own, pattern) for number, own in away.items()}
    sides = {n: int(x > 0.5) for n, x in likeness.items() if not 1 - _CLEAR < x < _CLEAR}
    if len(sides) < (1 - _MOST_UNCLEAR) * len(away):
        return {}
    share = sum(sides.values()) / len(sides)
    first = sides[min(sides)]  # whose side is called 0
    return {n: s ^ first for n, s in sides.items()} if _FEWEST <= share <= 1 - _FEWEST else {}
