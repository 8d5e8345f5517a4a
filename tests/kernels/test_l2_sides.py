"""Halves of the L2 cache: told apart by latencies, measured once, and without a GPU not at all."""

import random
import threading
from types import SimpleNamespace

import pytest
import torch
from stof_compile.kernels import l2_sides as module
from stof_compile.kernels.l2_sides import l2_sides, sides_of

LINES = 24


def latencies(sides, seed=0, near=290, far=500, noise=25):
    """Of lines with a home on either side, by multiprocessor."""
    draw = random.Random(seed)
    homes = [draw.randint(0, 1) for _ in range(LINES)]
    return {
        number: [(near if home == side else far) + draw.randint(0, noise) for home in homes]
        for number, side in enumerate(sides)
    }


def of_pairs(count, seed=1):
    """Sides of so many multiprocessors, two by two, half of them on each side."""
    pairs = [0, 1] * (count // 4)
    random.Random(seed).shuffle(pairs)
    return [side for side in pairs for _ in range(2)]


def alike(found, sides):
    """Whether multiprocessors are grouped so, whatever the groups are called."""
    return list(found.values()) in (sides, [1 - side for side in sides])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [108, 132])
def test_two_sides(seed, count):
    sides = of_pairs(count, seed)
    found = sides_of(latencies(sides, seed))
    assert alike(found, sides) and found[0] == 0 and list(found) == list(range(count))


def test_sides_need_not_be_of_one_size():
    assert alike(sides_of(latencies([0] * 80 + [1] * 52)), [0] * 80 + [1] * 52)


def test_a_line_that_others_wrote_meanwhile_is_no_matter():
    sides = of_pairs(132)
    seen = latencies(sides)
    for number in seen:
        seen[number][3] = 700 + number
    assert alike(sides_of(seen), sides)


def noise():
    draw = random.Random(0)
    return {number: [draw.randint(250, 600) for _ in range(LINES)] for number in range(132)}


@pytest.mark.parametrize(
    "seen",
    [
        {},
        {7: [300] * LINES},
        latencies([0] * 132),  # one cache for all
        latencies(of_pairs(132), near=290, far=330),  # hardly any difference
        latencies([0] * 120 + [1] * 12),  # a few that were disturbed
        noise(),
    ],
    ids=["nothing", "one", "one side", "alike", "a few", "noise"],
)
def test_no_telling(seen):
    assert sides_of(seen) == {}


# -- a device, without a GPU ----------------------------------------------------------------------


SIDES = [0, 0, 1, 1, 1, 1, 0, 0]


@pytest.fixture
def state(monkeypatch):
    """A device of eight multiprocessors."""
    state = SimpleNamespace(captured=False, measured=[], device=torch.device("cpu", 0), fails=None)

    def measure(device):
        state.measured.append(threading.get_ident())
        if state.fails is not None:
            raise state.fails
        seen = latencies(SIDES)
        del seen[3]  # another kernel kept it busy
        return seen

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_latencies", measure)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captured)
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return state


def test_measured_once_and_in_another_thread(state):
    """A multiprocessor that was not seen has the side of its neighbour."""
    found = l2_sides(state.device)
    assert found.tolist() == SIDES + [0] * 1016 and found.dtype == torch.int32
    assert l2_sides(state.device) is found
    assert len(state.measured) == 1 and state.measured[0] != threading.get_ident()


def test_not_while_a_stream_is_captured(state):
    state.captured = True
    assert l2_sides(state.device).tolist() == [0] * 1024 and not state.measured
    state.captured = False
    assert l2_sides(state.device).tolist()[2] == 1
    state.captured = True
    assert l2_sides(state.device).tolist()[2] == 1


def test_a_device_that_cannot_be_measured_has_one_side(state):
    state.fails = RuntimeError("no assembler")
    assert l2_sides(state.device).tolist() == [0] * 1024
    assert l2_sides(state.device).tolist() == [0] * 1024 and len(state.measured) == 1


def test_without_memory_a_later_call_tries_again(state):
    state.fails = torch.OutOfMemoryError("none left")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="none left"):
            l2_sides(state.device)
    state.fails = None
    assert l2_sides(state.device).tolist()[2] == 1


# -- on one ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu(monkeypatch):
    """Twice the same, but for which half comes first: multiprocessor 0 is always on side 0."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        pytest.skip("needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for _ in range(2):
        monkeypatch.setattr(module, "_known", {})
        found.append(l2_sides(device).tolist())
    assert found[0] == found[1] and set(found[0]) <= {0, 1}
    if "H200" in torch.cuda.get_device_name(device):
        count = torch.cuda.get_device_properties(device).multi_processor_count
        assert 0.25 < sum(found[0]) / count < 0.75
