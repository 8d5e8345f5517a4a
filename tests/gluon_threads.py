"""Runs a warp-specialised Gluon kernel on the CPU: its functions as plain Python, each partition of
each program a thread, one thread at a time and the next one by chance.

What travels by itself does so late or early, also by chance: TMA copies, and matrix products
between the request and the wait. A partition is one thread: races among its warps are not seen, nor
are layouts or registers.
"""

import threading
from types import SimpleNamespace

import numpy as np
import torch
from gluon_values import Pointer, Shared, language, put_tile, tile_of, value
from triton.experimental.gluon import language as real


class Barrier:
    """An mbarrier: a phase ends with the last of ``count`` arrivals and of the bytes expected."""

    def __init__(self):
        self.count = self.left = self.bytes = self.phase = 0

    def arrive(self, count=1, more_bytes=0):
        self.bytes += more_bytes
        self.left -= count
        assert self.left >= 0, "more arrivals than the barrier counts"
        self._look()

    def arrived(self, size):
        self.bytes -= size
        assert self.bytes >= 0, "more bytes than were expected"
        self._look()

    def _look(self):
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.count


class Barriers(list):
    def index(self, number):
        assert 0 <= number < len(self), f"barrier {number} of {len(self)}"
        return self[int(number)]


class Stopped(Exception):
    """Ends a thread that is no longer needed."""


class Partition:
    """A thread of one program; it runs when it is told to."""

    def __init__(self, number, program, function, arguments, weight):
        self.number, self.program, self.weight = number, program, weight
        self.name = f"{function.__name__} {number} of program {program}"
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire(), self.back.acquire()
        self.ready, self.waits_for, self.error = None, "the start", None
        self.over = self.stopped = False
        self.products, self.stores = [], []  # asked for, in order
        self.thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self.thread.start()

    def _run(self, function, arguments):
        self.go.acquire()
        try:
            if not self.stopped:
                function(*arguments)
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self.back.release()

    def resume(self):
        self.go.release()
        self.back.acquire()
        if self.error is not None:
            raise self.error

    def pause(self, ready, waits_for):
        self.ready, self.waits_for = ready, waits_for
        self.back.release()
        self.go.acquire()
        if self.stopped:
            raise Stopped


class Machine:
    """Partitions and copies under way, and the language the kernel's functions find.

    Args:
        seed: of the order of events, and of how fast partitions and copies are.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.partitions, self.copies, self.current, self.program = [], [], None, 0
        self.copy_weight = self._speed()
        self.late_stores = bool(seed % 2)  # results are read when nothing else can go on
        self.results = set()  # of the copies
        self.loaded, self.sources = [], []  # tiles, and the descriptors they came by
        self.scores = []  # partitions that asked for a product of tiles

    def _speed(self):
        return float(self.rng.choice([1, 1, 10, 100]))

    # -- time -------------------------------------------------------------------------------------

    def run(self):
        """Until all partitions have ended; an assertion fails where none can go on."""
        try:
            while True:
                alive = [p for p in self.partitions if not p.over]
                able = [p for p in alive if p.ready is None or p.ready()]
                if not able and not self.copies:
                    waits = ", ".join(f"{p.name} for {p.waits_for}" for p in alive)
                    assert not alive, f"deadlock: {waits}"
                    return
                due = [c for c in self.copies if c not in self.results or not self.late_stores]
                due = due or ([] if able else self.copies)
                weights = [p.weight for p in able] + [self.copy_weight] * bool(due)
                which = self.rng.choice(len(weights), p=np.divide(weights, sum(weights)))
                if which == len(able):
                    copy = due[self.rng.integers(len(due))]
                    self.copies.remove(copy)
                    copy()
                    continue
                self.current = able[which]
                self.current.resume()
                left = self.current.over and self.current.stores
                assert not left, "shared memory is gone before its results were read"
        finally:
            for p in self.partitions:
                p.stopped = True
                if not p.over:
                    p.resume()

    def pause(self, ready=None, waits_for="its turn"):
        if ready is not None or self.rng.random() < 0.3:
            self.current.pause(ready, waits_for)

    # -- barriers ---------------------------------------------------------------------------------

    def init(self, barrier, count):
        barrier.count = barrier.left = count

    def wait(self, barrier, phase):
        # a wait passes when the phase of this parity is over
        self.pause(lambda: barrier.phase % 2 != phase, f"phase {phase} of {barrier.name}")

    def arrive(self, barrier, count, pred=True):
        if pred:
            barrier.arrive(count)
            self.pause()

    def expect(self, barrier, size, pred=True):
        if pred:
            barrier.arrive(1, size)
            self.pause()

    # -- copies -----------------------------------------------------------------------------------

    def load_tile(self, descriptor, at, barrier, slot, pred=True):
        if not pred:
            return
        slot.forget()
        self.loaded.append(tuple(map(int, at)))
        self.sources.append(descriptor.name)

        def copy():
            slot.array[...] = tile_of(descriptor, at, slot.shape)
            barrier.arrived(slot.array.size * slot.bits // 8)

        self.copies.append(copy)
        self.pause()

    def store_tile(self, descriptor, at, slot):
        done = []

        def copy():
            put_tile(descriptor, at, slot.array)
            done.append(True)

        self.copies.append(copy)
        self.results.add(copy)
        self.current.stores.append(done)
        self.pause()

    def store_wait(self, left):
        assert left == 0
        stores = self.current.stores
        self.pause(lambda: all(stores), "its results to be read")
        stores.clear()

    # -- products ---------------------------------------------------------------------------------

    def product(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        shape = a.shape[0], b.shape[1]
        result = value(np.full(shape, np.nan))

        def multiply():
            left = a.array if isinstance(a, Shared) else a
            result[...] = np.asarray(left) @ b.array + (np.asarray(acc) if use_acc else 0)

        self.current.products.append(multiply)
        if isinstance(a, Shared):
            self.scores.append(self.current)
        if self.rng.random() < 0.3:
            self._multiply(0)
        self.pause()
        return result

    def product_wait(self, left, deps):
        self.pause()
        self._multiply(left)
        return deps[0] if len(deps) == 1 else deps

    def _multiply(self, left):
        asked = self.current.products
        while len(asked) > left:
            asked.pop(0)()

    # -- programs ---------------------------------------------------------------------------------

    def allocate(self, dtype, shape, layout):
        if layout == "barriers":
            return Barriers(Barrier() for _ in range(shape[0]))
        kind = np.float64 if dtype.is_floating() else np.int64
        made = Shared(np.empty(shape, kind), dtype.primitive_bitwidth)
        made.forget()
        return made

    def specialize(self, functions, warps, registers):
        assert len(functions) == len(warps) + 1 == len(registers) + 1
        for number, (function, arguments) in enumerate(functions):
            made = Partition(number, self.program, function, arguments, self._speed())
            self.partitions.append(made)
            for name, held in zip(function.__code__.co_varnames, arguments, strict=False):
                for place, barrier in enumerate(held if isinstance(held, Barriers) else ()):
                    barrier.name = f"{name} {place}"


def run_kernel(monkeypatch, kernel, modules, instead, programs, arguments, constants, seed):
    """Run a Gluon kernel; the machine, which knows what happened.

    Args:
        modules: where its functions are. instead: by name, what stands for functions that are not
            run as they are: with inline assembly, or about layouts.
        arguments: ``Descriptor``s, tensors and numbers, in the order of the kernel.
        constants: the kernel's.
    """
    machine = Machine(seed)
    machine.programs = programs
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=machine.init, wait=machine.wait,
        arrive=machine.arrive, expect=machine.expect,
    )  # fmt: skip
    shown = {
        "gl": language(machine), "mbarrier": barriers, "tma_load": machine.load_tile,
        "reinterpreted": Shared.reinterpreted,
        "multiprocessor": lambda: value(machine.current.program),
        "tma_store": machine.store_tile, "tma": SimpleNamespace(store_wait=machine.store_wait),
        "warpgroup_mma": machine.product, "warpgroup_mma_wait": machine.product_wait,
        **dict.fromkeys(
            ("barrier_of_threads", "fence_async_shared", "gdc_wait", "gdc_launch_dependents"),
            lambda: None,
        ),
        **instead,
    }  # fmt: skip

    def plain(name, held):
        if name in shown:
            return shown[name]
        return held.value if isinstance(held, real.constexpr) else getattr(held, "fn", held)

    with monkeypatch.context() as patch:
        for module in modules:
            for name, held in list(vars(module).items()):
                patch.setattr(module, name, plain(name, held))
        named = dict(zip(kernel.arg_names, arguments, strict=False))  # the constants come last
        values = [_given(*argument) for argument in named.items()]
        for machine.program in range(programs):
            kernel.fn(*values, **constants)
        machine.run()
    assert not named["queue"].any(), "the next launch begins at 0"
    return machine


DTYPES = {torch.int32: real.int32, torch.float32: real.float32, torch.float16: real.float16}


def _given(name, argument):
    if isinstance(argument, torch.Tensor):
        memory = argument.detach().as_subclass(torch.Tensor)
        assert memory.is_contiguous()
        return Pointer(memory.view(-1))
    if isinstance(argument, tuple):  # a descriptor
        dtype = DTYPES[argument.base.dtype]
        return SimpleNamespace(**argument._asdict(), dtype=dtype, name=name)
    if isinstance(argument, int):
        argument = value(argument)
        argument.setflags(write=False)  # a kernel's own is another one after ``+=``
    return argument
