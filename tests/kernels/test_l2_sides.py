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


@pytest.mark.parametrize("disturbed", [[0], [17], [3, 4, 80], list(range(0, 132, 9))])
@pytest.mark.parametrize("lines", [LINES, LINES // 2])
def test_a_few_that_other_work_disturbed(disturbed, lines):
    """They are left out where it is not clear."""
    sides = of_pairs(132)
    seen = latencies(sides)
    for number in disturbed:
        seen[number][:lines] = [900] * lines
    found = sides_of(seen)
    assert found.keys() >= set(range(132)) - set(disturbed)
    wanted = [side for number, side in enumerate(sides) if number not in disturbed]
    rest = {number: side for number, side in found.items() if number not in disturbed}
    assert alike(rest, wanted)


@pytest.mark.parametrize("seed", range(5))
def test_readings_that_look_far_now_and_then(seed):
    draw = random.Random(seed)
    sides = of_pairs(132, seed)
    seen = {
        number: [time + 300 * (draw.random() < 0.05) for time in times]
        for number, times in latencies(sides, seed).items()
    }
    found = sides_of(seen)
    assert len(found) > 120 and alike(found, [sides[number] for number in found])


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
BY_TURNS = [number // 2 % 2 for number in range(1024)]


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
    monkeypatch.setattr(module, "_refused", {})
    monkeypatch.setattr(module, "_tables", [])
    monkeypatch.setattr(module, "_latencies", measure)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captured)
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return state


def test_measured_once_and_in_another_thread(state):
    """A multiprocessor that was not seen has the side of its neighbour."""
    found = l2_sides(state.device)
    assert found.tolist() == SIDES + BY_TURNS[8:] and found.dtype == torch.int32
    assert l2_sides(state.device) is found
    assert len(state.measured) == 1 and state.measured[0] != threading.get_ident()


def test_not_while_a_stream_is_captured(state):
    state.captured = True
    assert l2_sides(state.device).tolist() == BY_TURNS and not state.measured
    state.captured = False
    assert l2_sides(state.device).tolist()[:8] == SIDES
    state.captured = True
    assert l2_sides(state.device).tolist()[:8] == SIDES


@pytest.mark.parametrize(
    "failure", [RuntimeError("no assembler"), torch.OutOfMemoryError("none left")]
)
def test_a_device_without_a_result_is_measured_three_times(state, failure):
    """Its tables stay, for kernels that may still read them."""
    state.fails = failure
    for _ in range(5):
        assert l2_sides(state.device).tolist() == BY_TURNS
    assert len(state.measured) == len(module._tables) == 3


def test_a_later_measurement_may_have_one(state):
    state.fails = torch.OutOfMemoryError("none left")
    assert l2_sides(state.device).tolist() == BY_TURNS
    state.fails = None
    assert l2_sides(state.device).tolist()[:8] == SIDES


def test_a_device_that_failed_before_says_so(state, monkeypatch):
    def fails(*arguments, **named):
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", fails)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            l2_sides(state.device)
    assert l2_sides(state.device).tolist()[:8] == SIDES


def test_a_device_without_a_number_is_the_current_one(state, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert l2_sides(torch.device("cpu")) is l2_sides(state.device)


# -- on one ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu(monkeypatch):
    """Twice the same, also which side is 0: that of the lowest number."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        pytest.skip("needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    measure, measured, tables = module._measured, [], []
    monkeypatch.setattr(
        module, "_measured", lambda of: measured.append(measure(of)) or measured[-1]
    )
    for _ in range(2):
        monkeypatch.setattr(module, "_known", {})
        monkeypatch.setattr(module, "_refused", {})
        tables.append(l2_sides(device).tolist())
    assert tables[0] == tables[1] and set(tables[0]) <= {0, 1}
    assert all(tables[0][number] == side for number, side in measured[0].items())
    if "H200" in torch.cuda.get_device_name(device):
        sides = measured[0]
        count = torch.cuda.get_device_properties(device).multi_processor_count
        assert len(sides) >= (1 - module._MOST_UNCLEAR) * count
        assert 0.25 < sum(sides.values()) / len(sides) < 0.75
        assert sides[min(sides)] == 0
