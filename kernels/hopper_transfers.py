"""What all Hopper kernels move tiles and mask words with, by the names that this Triton has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# newer Triton renamed the copies, the barrier and the view
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier_of_threads = getattr(gl, "barrier", None) or gl.thread_barrier
_memory = gl.shared_memory_descriptor
reinterpreted = getattr(_memory, "reinterpret", None) or _memory._reinterpret

WORDS: gl.constexpr = gl.constexpr(128)  # mask words of a tile, one per consumer thread


@gluon.jit
def next_place(slot, RING: gl.constexpr):
    """The next place of a ring."""
    slot += 1
    return gl.where(slot == RING, 0, slot)


@gluon.jit
def next_pair(pair, phase, PAIRS: gl.constexpr):
    """The next pair of a ring, and the phase of its barriers."""
    if PAIRS == 1:
        phase = phase ^ 1
    elif PAIRS == 2:
        phase = phase ^ pair
        pair = pair ^ 1
    else:
        phase = gl.where(pair == PAIRS - 1, phase ^ 1, phase)
        pair = gl.where(pair == PAIRS - 1, 0, pair + 1)
    return pair, phase
