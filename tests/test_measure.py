"""The timer and the correctness gate, with a clock of our own."""

import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from stof_compile.measure import (
    MIN_RUNS,
    TOLERANCE,
    check_close,
    real_tensors,
    time_after_pauses,
    time_as_in_use,
    time_callable,
    time_in_turns,
)
from stof_compile.replay import BURSTS, MAX_TURNS, _turns


class Clock:
    """Nanoseconds that pass only when ``sleep_us`` is called."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def sleep_us(self, us):
        self.now += int(us * 1000)


def test_median_and_percentiles_from_the_injected_clock():
    clock = Clock()
    durations = iter([500.0] + [100.0, 200.0, 300.0, 400.0, 500.0] * 1000)
    timing = time_callable(
        lambda: clock.sleep_us(next(durations)), [()], "cpu", budget_s=0.0015, clock=clock
    )
    assert timing.runs == 5
    assert timing.median_us == 300.0
    assert timing.p20_us == pytest.approx(180.0)
    assert timing.p80_us == pytest.approx(420.0)
    assert timing.method == "clock"


def test_short_calls_are_timed_in_groups():
    clock = Clock()
    calls = []

    def short():
        calls.append(1)
        clock.sleep_us(1)

    timing = time_callable(short, [()], "cpu", budget_s=0.0005, clock=clock)
    assert timing.median_us == pytest.approx(1.0)
    assert timing.runs == 10
    assert len(calls) == 1 + 10 * 50


def test_slow_calls_get_the_least_number_of_runs():
    clock = Clock()
    seen = []

    def slow(x):
        seen.append(x)
        clock.sleep_us(1e6)

    timing = time_callable(slow, [(0,), (1,)], "cpu", budget_s=0.1, clock=clock)
    assert timing.runs == MIN_RUNS
    assert len(seen) == MIN_RUNS + 1  # one warm-up: the second set would cost another second


def test_inputs_rotate():
    clock = Clock()
    seen = []

    def call(x):
        seen.append(x)
        clock.sleep_us(100)

    time_callable(call, [(0,), (1,), (2,)], "cpu", budget_s=0.0006, clock=clock)
    assert seen == [0, 1, 2] * 3


def test_functions_take_turns():
    clock = Clock()
    seen = []

    def make(name, us):
        def call():
            seen.append(name)
            clock.sleep_us(us)

        return call

    fast, slow = time_in_turns(
        [make("fast", 100), make("slow", 300)],
        [()],
        "cpu",
        budget_s=0.0006,
        rounds=2,
        clock=clock,
    )
    assert (fast.median_us, slow.median_us) == (100.0, 300.0)
    assert (fast.runs, slow.runs) == (6, 4)  # two a round at least: three of each together
    first, second = ["fast"] * 4 + ["slow"] * 3, ["fast"] * 3 + ["slow"] * 2
    assert seen == first + second  # 1.2 ms allowed, 1.6 needed: the second round warms nothing up


def test_turns_of_slow_functions_are_few():
    clock = Clock()
    seen = []

    def make(name):
        def call():
            seen.append(name)
            clock.sleep_us(1e6)

        return call

    calls = [make("one"), make("two"), make("three")]
    timings = time_in_turns(calls, [()], "cpu", budget_s=0.3, rounds=5, clock=clock)
    assert [timing.runs for timing in timings] == [3, 3, 3]
    assert len(seen) == 3 * (1 + 3)  # each is warmed up once


def test_no_inputs_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        time_callable(lambda: None, [], "cpu")


def test_random_state_and_gradients_are_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    weight = torch.ones(4, requires_grad=True)
    made = []

    def call():
        made.append(weight * torch.rand(4))

    time_callable(call, [()], "cpu", budget_s=0.001)
    assert torch.equal(torch.get_rng_state(), before)
    assert not made[0].requires_grad


def test_fake_modes_are_left():
    real = torch.ones(8)
    made = []
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        time_callable(lambda: made.append(real + torch.ones(8)), [()], "cpu", budget_s=0.001)
        assert isinstance(torch.ones(2), FakeTensor)
    assert not isinstance(made[0], FakeTensor)


def test_inside_a_backend_a_candidate_may_be_compiled():
    timings = []

    def backend(gm, example_inputs):
        candidate = torch.compile(lambda x: x.sin() + 1, backend="eager")
        with real_tensors():
            inputs = torch.ones(8)
        timings.append(time_callable(candidate, [(inputs,)], "cpu", budget_s=0.001))
        return gm

    fast = torch.compile(lambda x: x * 2, backend=backend)
    assert torch.equal(fast(torch.ones(3)), torch.full((3,), 2.0))
    assert timings[0].runs >= MIN_RUNS


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_check_close_scales_with_the_reference(dtype):
    ref = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # results of e4m3 operands have another dtype
    held = torch.float16 if dtype == torch.float8_e4m3fn else dtype
    for scale in (1e-3, 1.0, 1e3):
        out = (ref * scale).to(held)
        assert check_close(out, ref * scale, dtype).ok
        wrong = out.clone()
        wrong[0, 0] += 3 * TOLERANCE[dtype][0] * (ref * scale).abs().max()
        report = check_close(wrong, ref * scale, dtype)
        assert not report.ok
        assert report.max_rel > TOLERANCE[dtype][0]
        assert check_close(wrong, ref * scale, dtype, scale=10.0).ok


def test_a_small_error_everywhere_is_seen():
    ref = torch.ones(100, dtype=torch.float64)
    assert not check_close(ref * (1 + 3e-6), ref, torch.float32).ok
    one = ref.clone()
    one[0] += 3e-6
    assert check_close(one, ref, torch.float32).ok


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_must_coincide(value):
    ref = torch.ones(8, dtype=torch.float64)
    odd = ref.clone()
    odd[3] = value
    assert not check_close(odd, ref, torch.float32).ok
    assert not check_close(ref, odd, torch.float32).ok
    assert check_close(odd, odd, torch.float32).ok
    assert check_close(odd, odd, torch.float32).max_rel == 0.0


def test_signs_of_infinities_matter():
    ref = torch.tensor([1.0, float("inf")], dtype=torch.float64)
    out = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    assert not check_close(out, ref, torch.float32).ok


def test_zero_reference_and_empty_tensors():
    zero = torch.zeros(4, dtype=torch.float64)
    assert check_close(zero, zero, torch.float16).ok
    assert not check_close(zero + 1, zero, torch.float16).ok
    assert check_close(zero[:0], zero[:0], torch.float16).ok


def test_refuses_unequal_shapes_and_unknown_dtypes():
    with pytest.raises(ValueError, match="differ"):
        check_close(torch.ones(3), torch.ones(1, 3), torch.float32)
    with pytest.raises(ValueError, match="no tolerance"):
        check_close(torch.ones(3), torch.ones(3), torch.int32)


@pytest.mark.gpu
def test_cuda_graph_replay():
    inputs = [(torch.randn(512, 512, device="cuda", dtype=torch.float16),) for _ in range(3)]
    before = torch.cuda.get_rng_state()
    timing = time_callable(lambda x: x @ x, inputs, "cuda", budget_s=0.05)
    assert timing.method == "cuda-graph"
    assert 0.5 < timing.median_us < 1000
    assert timing.p20_us <= timing.median_us <= timing.p80_us
    single = time_callable(lambda x: x @ x, inputs, "cuda", budget_s=0.05, capture=False)
    assert single.method.startswith("events")
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_on_a_cpu_what_is_in_use_is_timed_in_turns():
    one, two = time_as_in_use(
        [lambda x: x + 1, lambda x: x], [(torch.ones(3),)], "cpu", turn_s=1e-3
    )
    assert one.method == two.method == "clock" and one.runs >= MIN_RUNS
    with pytest.raises(ValueError, match="set of inputs"):
        time_as_in_use([lambda: None], [], "cuda")


def test_only_a_gpu_has_bursts():
    assert time_after_pauses(lambda x: x, [(torch.ones(3),)], "cpu") is None
    with pytest.raises(ValueError, match="set of inputs"):
        time_after_pauses(lambda: None, [], "cuda")


@pytest.mark.gpu
def test_cuda_functions_after_pauses():
    inputs = [(torch.randn(1024, 1024, device="cuda", dtype=torch.float16),) for _ in range(3)]
    before = torch.cuda.get_rng_state()
    timing = time_after_pauses(lambda x: torch.dropout(x @ x, 0.5, True), inputs, "cuda")
    assert timing.method == "cuda-graph in bursts" and timing.runs >= BURSTS
    assert 0.5 < timing.p20_us <= timing.median_us <= timing.p80_us < 1000
    assert time_after_pauses(lambda x: x.sum().item(), inputs, "cuda") is None
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.randn(3, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_cuda_functions_under_a_lasting_load():
    inputs = [(torch.randn(1024, 1024, device="cuda", dtype=torch.float16),) for _ in range(3)]
    before = torch.cuda.get_rng_state()
    fns = [lambda x: x @ x, lambda x: (x @ x) @ x, lambda x: torch.dropout(x @ x, 0.5, True)]
    one, two, three = time_as_in_use(fns, inputs, "cuda", turn_s=0.01)
    assert one.method == two.method == three.method == "cuda-graph under load"
    assert 1.5 * one.median_us < two.median_us < 3 * one.median_us and one.runs >= 6
    assert torch.equal(torch.cuda.get_rng_state(), before)
    alone, _ = time_as_in_use([lambda x: x @ x, lambda x: x.sum().item()], inputs, "cuda")
    assert alone.method == "cuda-graph"  # the other cannot be captured
    assert torch.randn(3, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_cuda_work_that_cannot_be_captured_is_timed_by_events():
    x = torch.randn(64, device="cuda")
    before = torch.cuda.get_rng_state()
    timing = time_callable(lambda: x.sum().item(), [()], "cuda", budget_s=0.02)
    assert timing.method.startswith("events (")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.randn(3, device="cuda").isfinite().all()  # the generator does not think it records
    assert torch.ones(2, device="cuda").sum().item() == 2


@pytest.mark.gpu
def test_a_short_kernel_behind_slow_python_is_timed_without_it():
    """A call that takes the host a millisecond is replayed as often as one that takes it none."""
    x = torch.randn(64, 64, device="cuda")

    def slow(x):
        time.sleep(1e-3)
        return x + 1

    fast_us = time_callable(lambda x: x + 1, [(x,)], "cuda", budget_s=0.05).median_us
    slow_us = time_callable(slow, [(x,)], "cuda", budget_s=0.05).median_us
    assert slow_us < 1.3 * fast_us + 0.3


@pytest.mark.parametrize(
    ("turns", "took_us", "wanted"),
    [(1, 250.0, 2), (2, 20.0, 50), (50, 310.0, 81), (1, 5000.0, 1), (10, 1.0, MAX_TURNS)],
)
def test_turns_fill_a_graph(turns, took_us, wanted):
    assert _turns(turns, took_us) == wanted
