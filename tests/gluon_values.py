"""What a Gluon kernel's functions find when they run as plain Python on the CPU (gluon_threads.py):
numbers and tensors, shared and global memory, ``gl``.

Memory that is being written holds NaN, or a number that nothing means.
"""

from types import SimpleNamespace

import numpy as np
import torch
from triton.experimental.gluon import language as real

NOTHING = -987654321  # in integer memory that is being written
LAYOUTS = (
    "BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout",
    "SwizzledSharedLayout",
)  # fmt: skip


class Value(np.ndarray):
    """A tensor or number of the kernel; never changed in place."""

    type = SimpleNamespace(layout=None)

    def __iadd__(self, other):
        return self + other

    def __isub__(self, other):
        return self - other

    def to(self, dtype):
        return self.astype(np.float64 if dtype.is_floating() else np.int64)

    def permute(self, order):
        return self.transpose(order)

    def split(self):
        return self[..., 0], self[..., 1]


def value(array):
    return np.asarray(array).view(Value)


class Pointer:
    """An address in a tensor of global memory."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, steps):
        return Pointer(self.memory, self.offset + steps)

    def __sub__(self, steps):
        return self + -steps

    def places(self, mask):
        """(index, whether it is read or written), which lies in the tensor."""
        index, mask = np.broadcast_arrays(self.offset, mask)
        assert ((index >= 0) & (index < self.memory.numel()))[mask].all(), "outside of its tensor"
        return np.where(mask, index, 0), mask


class OnGpu(torch.Tensor):
    """On the CPU, but says otherwise: what a launcher is given."""

    is_cuda = True


def kept_scores(s, words):
    """Words [4, 8, 4] of the threads, as ``masks/fragments.py`` says; of fewer columns the bits of
    the first ones."""
    row, column = np.divmod(np.arange(s.size), s.shape[1])
    thread = words[row // 16, row % 8, column // 2 % 4]
    kept = thread >> row // 8 % 2 * 16 + column // 8 * 2 + column % 2 & 1
    return value(np.where(kept.reshape(s.shape), s, -np.inf))


class Shared:
    """Shared memory: an array, and bits of an element."""

    type = SimpleNamespace(layout=None)
    dtype = layout = None

    def __init__(self, array, bits):
        self.array, self.bits, self.shape = array, bits, array.shape

    def index(self, number):
        assert 0 <= number < len(self.array), f"slot {number} of {len(self.array)}"
        return Shared(self.array[int(number)], self.bits)

    def reshape(self, shape):
        return Shared(self.array.reshape(shape), self.bits)  # a view: slots are contiguous

    def reinterpreted(self, dtype, shape, layout):
        size = int(np.prod(shape))
        assert self.array.flags.c_contiguous and size <= self.array.size
        return Shared(self.array.reshape(-1)[:size].reshape(shape), self.bits)

    def permute(self, order):
        return Shared(self.array.transpose(order), self.bits)

    def slice(self, start, length, dim=0):
        assert dim == 0
        return Shared(self.array[start : start + length], self.bits)

    def load(self, layout):
        return value(self.array.copy())

    def store(self, stored):
        self.array[...] = stored

    def forget(self):
        self.array[...] = np.nan if self.array.dtype == np.float64 else NOTHING


def tile_of(descriptor, at, shape):
    """What TMA reads: zeros beyond the tensor."""
    tensor = whole(descriptor)
    tile = np.zeros(descriptor.block_shape)
    here = box(tensor, at, tile.shape)
    tile[tuple(slice(0, s.stop - s.start) for s in here)] = tensor[here].double().numpy()
    return tile.reshape(shape)


def put_tile(descriptor, at, array):
    """What TMA writes: nothing beyond the tensor."""
    tensor = whole(descriptor)
    tile = torch.from_numpy(array.reshape(descriptor.block_shape))
    here = box(tensor, at, tile.shape)
    assert tensor[here].isnan().all(), "written twice"
    tensor[here] = tile[tuple(slice(0, s.stop - s.start) for s in here)].to(tensor.dtype)


def whole(descriptor):
    base = descriptor.base.detach().as_subclass(torch.Tensor)
    return base.as_strided(list(descriptor.shape), list(descriptor.strides))


def box(tensor, at, shape):
    """Of a block the part that is in the tensor."""
    assert all(a >= 0 for a in at)
    parts = zip(at, shape, tensor.shape, strict=True)
    return tuple(slice(min(int(a), size), min(int(a) + n, size)) for a, n, size in parts)


def language(machine):
    """What a kernel knows as ``gl``."""

    def load(pointer, mask=True, other=0):
        index, mask = pointer.places(mask)
        memory = pointer.memory.numpy()
        kind = np.float64 if memory.dtype.kind == "f" else np.int64
        read = memory[index] if memory.size else np.zeros_like(index)
        return value(np.where(mask, read, other).astype(kind))

    def store(pointer, stored, mask=True):
        index, mask = pointer.places(mask)
        held = torch.from_numpy(np.broadcast_to(stored, mask.shape)[mask])
        if pointer.memory.is_floating_point():  # else the queue
            assert pointer.memory[index[mask]].isnan().all(), "written twice"
        pointer.memory[index[mask]] = held.to(pointer.memory.dtype)

    def atomic_add(pointer, amount, sem):
        before = int(pointer.memory[pointer.offset])
        pointer.memory[pointer.offset] += amount
        return value(before)

    def nothing(*arguments, **named):
        return None

    def static_assert(holds, text):
        assert holds, text

    return SimpleNamespace(
        static_assert=static_assert,
        **{name: getattr(real, name) for name in ("int32", "int64", "float32", "constexpr")},
        **dict.fromkeys(LAYOUTS, nothing),
        arange=lambda start, end, layout: value(np.arange(start, end)),
        zeros=lambda shape, dtype, layout: value(np.zeros(shape)),
        full=lambda shape, number, dtype, layout: value(np.full(shape, number)),
        where=lambda condition, a, b: value(np.where(condition, a, b)),
        sum=lambda x, axis: value(np.sum(x, axis)),
        max=lambda x, axis: value(np.max(x, axis)),
        minimum=lambda a, b: value(np.minimum(a, b)),
        maximum=lambda a, b: value(np.maximum(a, b)),
        log=np.log,
        exp2=np.exp2,
        fma=lambda a, b, c: a * b + c,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        static_range=range,
        load=load,
        store=store,
        atomic_add=atomic_add,
        program_id=lambda axis: value(machine.current.program),
        num_programs=lambda axis: machine.programs,
        allocate_shared_memory=machine.allocate,
        warp_specialize=machine.specialize,
    )
