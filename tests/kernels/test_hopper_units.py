"""Units of work of the Hopper attention kernels: their order, and workers with many of them, whose
slots and stages are used again."""

import random
import threading
from types import SimpleNamespace

import pytest
import torch
from close import assert_close
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks
from stof_compile.attention.call import mask_arrays
from stof_compile.masks.block_mask import build_block_mask

HALF, HOPPER = torch.float16, (9, 0)


@pytest.fixture
def units(monkeypatch):
    """``hopper_units`` as plain functions of numbers; its ``gl`` has no programs and no queue."""
    pytest.importorskip("triton.experimental.gluon")
    from stof_compile.kernels import hopper_units

    plain = SimpleNamespace(maximum=max, minimum=min, where=lambda test, a, b: a if test else b)
    monkeypatch.setattr(hopper_units, "gl", plain)
    for name in ("_units_of", "_asked", "next_number", "first_number", "unit_place"):
        monkeypatch.setattr(hopper_units, name, getattr(hopper_units, name).fn)
    return hopper_units


@pytest.fixture
def places(units):
    """``places(batch, heads, rows, heavy_rows, pieces, last_heads)``: (batch times heads, place in
    the order of a head's units) of every unit, as the kernels' own function has it."""

    def call(batch, heads, rows, heavy_rows=0, pieces=1, last_heads=1):
        planes, heavy = batch * heads, heavy_rows * pieces
        found = []
        for number in range(planes * (rows - heavy_rows + heavy)):
            b, h, place = units.unit_place(
                number, planes, heads, heavy, rows - heavy_rows, last_heads
            )
            assert 0 <= b < batch and 0 <= h < heads
            found.append((b * heads + h, place))
        return found

    return call


# -- order ----------------------------------------------------------------------------------------


def of_side(planes, rows, heavy_rows, pieces, last_heads):
    """Units of some heads: the heaviest rows of all first, each in its pieces, then head by head,
    but for the last ones, which go row by row."""
    heavy = heavy_rows * pieces
    last = min((last_heads + 1) // 2, len(planes))
    light = range(heavy, heavy + rows - heavy_rows)
    first = [(bh, place) for place in range(heavy) for bh in planes]
    whole = [(bh, place) for bh in planes[: len(planes) - last] for place in light]
    mixed = [(bh, place) for place in light for bh in planes[len(planes) - last :]]
    return first + whole + mixed


@pytest.mark.parametrize("pieces", [1, 3, 4])
@pytest.mark.parametrize("last_heads", [1, 2, 6, 50])
@pytest.mark.parametrize("heavy_rows", [0, 1, 3, 7])
@pytest.mark.parametrize(("batch", "heads"), [(2, 3), (1, 1), (1, 7)])
def test_every_row_is_a_unit_once(batch, heads, heavy_rows, last_heads, pieces, places):
    found = places(batch, heads, 7, heavy_rows, pieces, last_heads)
    half = batch * heads // 2
    sides = range(half), range(half, batch * heads)
    more = 7, heavy_rows, pieces, last_heads
    assert found == of_side(sides[0], *more) + of_side(sides[1], *more)


def test_one_row_and_one_head(places):
    assert places(1, 1, 1) == [(0, 0)]
    assert places(1, 2, 1, 1, 1, 2) == [(0, 0), (1, 0)]


# -- the queue ------------------------------------------------------------------------------------


class Programs:
    """Programs that draw units until there are none, one step of the queue at a time and the next
    one by chance: threads whose atomics and stores wait for their turn."""

    def __init__(self, units, planes, of_head, sides, ahead, seed):
        self.units, self.count, self.sides = units, len(sides), sides
        self.planes, self.of_head, self.ahead = planes, of_head, ahead
        self.draw = random.Random(seed)
        self.taken = []

    def run(self, queue):
        """Draw all units of a launch; the queue is two numbers."""
        self.queue, self.running = queue, None
        self.waiting = {number: threading.Event() for number in range(self.count)}
        self.back = threading.Semaphore(0)
        place = SimpleNamespace(program=threading.local())
        plain = self.units.gl
        plain.program_id = lambda axis: place.program.number
        plain.num_programs = lambda axis: self.count
        plain.load = lambda side: side
        plain.atomic_add = lambda at, more, sem: self._turn(place.program.number, at, None)
        plain.store = lambda at, value, mask: self._turn(place.program.number, at, mask)
        self.units.multiprocessor = lambda: place.program.number

        def program(number):
            place.program.number = number
            self.waiting[number].wait()
            self._draw()
            del self.waiting[number]
            self.back.release()

        threads = [threading.Thread(target=program, args=(n,)) for n in range(self.count)]
        for thread in threads:
            thread.start()
        while self.waiting:
            self.waiting[self.draw.choice(list(self.waiting))].set()
            self.back.acquire()
        for thread in threads:
            thread.join()

    def _turn(self, number, side, mask):
        """A step of the queue, when its turn comes: a number of it, or 0 where the mask says so."""
        self.waiting[number].clear()
        self.back.release()
        self.waiting[number].wait()
        found = self.queue[side]
        self.queue[side] = found + 1 if mask is None else 0 if mask else found
        return found

    def _draw(self):
        """As the kernels do: ``ahead`` numbers are asked for before a unit is computed."""
        how = self.planes, self.of_head
        number, side, empty = self.units.first_number(Side(), Table(self.sides), *how)
        numbers = [number]
        while True:
            while len(numbers) <= self.ahead:
                number, side, empty = self.units.next_number(Side(), side, empty, *how)
                numbers.append(number)
            number = numbers.pop(0)
            if number >= self.planes * self.of_head:
                return
            self.taken.append(number)
            if not numbers:
                number, side, empty = self.units.next_number(Side(), side, empty, *how)
                numbers.append(number)


class Side:
    """The address of the queue: an offset from it is a side."""

    def __add__(self, side):
        return side


class Table:
    """The address of the table of sides."""

    def __init__(self, sides):
        self.sides = sides

    def __add__(self, number):
        return self.sides[number]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("planes", [1, 2, 3, 6])
def test_every_number_is_drawn_once_and_0_is_left(planes, ahead, units):
    """Of launches one behind the other, with fewer and more programs than units, however these are
    spread over the cache and in whatever order they ask."""
    draw = random.Random(10 * planes + ahead)
    queue = [0, 0]
    for seed in range(60):
        of_head, count = draw.randint(1, 6), draw.randint(1, 14)
        sides = [draw.randint(0, 1) if seed % 3 else seed % 2 for _ in range(count)]
        programs = Programs(units, planes, of_head, sides, ahead, seed)
        programs.run(queue)
        assert sorted(programs.taken) == list(range(planes * of_head))
        assert queue == [0, 0]


# -- results --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    ("head_dim", "programs", "stages", "keys"),
    [
        (64, 4, 2, 64), (96, 3, 2, 64), (96, 2, 3, 64), (104, 3, 1, 64), (128, 2, 2, 64),
        (128, 3, 1, 64), (64, 1, 2, 128), (104, 1, 2, 128), (128, 1, 2, 128),
    ],
)  # fmt: skip
def test_gpu_workers_take_many_units(head_dim, programs, stages, keys, pieces):
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    device = torch.device("cuda")
    batch, heads, length, checked = 8, 32, 1100, [0, 7]
    keep = torch.rand(1, 1, length, length, device=device) < 0.1
    keep[..., 320:390, :] = False  # a tile row without keys
    keep[..., 512:576, 128:] = False  # one of two tiles
    keep[..., 640:704, 320:384] = True
    mask = build_block_mask(
        masks.from_tensor(keep.cpu()), length, length, (64, keys), device=device
    )
    config = BlockConfig(
        block_k=keys, num_stages=stages, hopper=programs, heavy_rows=2, pieces=pieces
    )
    arrays = mask_arrays(mask, config).values()
    q, k, v = torch.randn(3, batch, heads, length, head_dim, device=device, dtype=HALF)
    expected, expected_lse = attention_reference(
        *(x[checked].double() for x in (q, k, v)), keep, None, None, head_dim**-0.5, 0.0, True
    )
    for _ in range(3):
        shape = batch, length, heads, head_dim
        poison = torch.full(shape, float("nan"), device=device, dtype=HALF)
        del poison
        out, lse = torch.ops.stof.attention_block(
            q, k, v, *arrays, None, None, head_dim**-0.5, 0.0, 0, [], list(config), True
        )
        assert_close(out[checked], expected, HALF)
        assert out.isfinite().all()
        finite = expected_lse.isfinite()
        assert torch.equal(lse[checked].isfinite(), finite)
        close = {"rtol": 0, "atol": 5e-3}
        torch.testing.assert_close(lse[checked][finite].double(), expected_lse[finite], **close)
