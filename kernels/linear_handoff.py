"""Device code with which programs of one launch hand results to each other through memory.

A writer stores its data, then the word READY in a flag; a reader waits for its flags, reads the
data and clears the flags. Every flag has one writer and one reader.

The flags lie in memory that nothing has initialised (``torch.empty``), which saves the launch that
would zero a counter, and makes the memory private to a launch: concurrent streams and CUDA graphs
need no care, and the operator mutates nothing that anyone can see. What a flag holds before is
arbitrary, and it must not be READY. It is not: READY is 64 random bits, every launch clears the
flags it has set, so that no stale flag survives in recycled memory, and other data equal it with a
chance of 2 ** -64.

A reader must have a larger program number than its writers. Programs start in the order of their
numbers (single-pass scans and stream-K rely on it as well), so whatever a reader waits for is
running or done, and no wait can last.
"""

import triton
import triton.language as tl

READY = tl.constexpr(0x3C9A56E10F2DB487)
MAX_PARTS = 33  # programs that may share a tile
_PART_FLAGS = tl.constexpr(32)  # a flag for each of them but the last


@triton.jit
def hand_over(flags, COUNT: tl.constexpr, PADDED: tl.constexpr, stride):
    """Set ``COUNT`` flags, ``stride`` words apart, after all that this program stored before."""
    tl.debug_barrier()  # the stores of every thread come before the flag of one
    lane = tl.arange(0, PADDED)
    ready = tl.zeros((PADDED,), tl.int64) + READY
    tl.atomic_xchg(flags + lane * stride, ready, mask=lane < COUNT, sem="release", scope="gpu")


@triton.jit
def wait_for(flags, count, PADDED: tl.constexpr):
    """Wait until the first ``count`` (at most PADDED) words at ``flags`` are set; clear them."""
    lane = tl.arange(0, PADDED)
    wanted = lane < count
    nothing = tl.zeros((PADDED,), tl.int64)
    missing = 1
    while missing > 0:
        seen = tl.atomic_add(flags + lane, nothing, mask=wanted, sem="acquire", scope="gpu")
        missing = tl.sum((wanted & (seen != READY)).to(tl.int32), 0)
    tl.debug_barrier()  # what one thread has seen holds for all
    tl.store(flags + lane, nothing, mask=wanted)


@triton.jit
def give_part(sums, parts, flags, slot, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Hand a tile of partial sums to the program that adds them up."""
    inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(parts + slot.to(tl.int64) * (BLOCK_M * BLOCK_N) + inside, sums)
    hand_over(flags + slot, 1, 1, 1)


@triton.jit
def wait_for_parts(flags, first_slot, COUNT: tl.constexpr):
    """Wait for the partial sums of COUNT slots."""
    wait_for(flags + first_slot, COUNT, _PART_FLAGS)


@triton.jit
def add_parts(
    sums, parts, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PITCH: tl.constexpr,
):  # fmt: skip
    """Own sums plus those of COUNT slots, always in the same order, whoever came first.

    Sums may be BLOCK_N columns of a tile of PITCH; ``parts`` points to the first of them.
    """
    theirs = parts + tl.arange(0, BLOCK_M)[:, None] * PITCH + tl.arange(0, BLOCK_N)[None, :]
    others = tl.load(theirs, cache_modifier=".cg")
    for other in tl.static_range(1, COUNT):
        others += tl.load(theirs + other * (BLOCK_M * PITCH), cache_modifier=".cg")
    return sums + others
