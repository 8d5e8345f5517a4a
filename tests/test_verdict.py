"""The last word on a graph: its forms compiled within the budget and timed, the fastest kept."""

import pytest
import torch
from torch.fx import symbolic_trace

from stof_compile import verdict
from stof_compile.budget import Budget
from stof_compile.measure import Timing
from stof_compile.options import StofOptions
from stof_compile.store import Store
from stof_compile.verdict import CompiledAhead, fastest_form

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = ("fused", "as torch.compile runs it", "attention only")


@pytest.fixture
def bench(monkeypatch):
    """A compiler that takes seconds of a fake clock, and a timer with a table of microseconds."""

    class Bench:
        def __init__(self):
            self.now, self.compile_s, self.events = 0.0, 5.0, []
            self.times_us = dict(zip(NAMES, (10.0, 20.0, 15.0), strict=True))
            self.launched_us = dict(zip(NAMES, (90.0, 70.0, 73.0), strict=True))

        def forms(self):
            def make(name):
                return symbolic_trace(lambda x: x + NAMES.index(name))

            return {name: lambda name=name: make(name) for name in NAMES}

        def budget(self, seconds):
            return Budget(seconds, clock=lambda: self.now)

    bench = Bench()

    def compile_form(gm, inputs, opts):
        bench.now += bench.compile_s
        name = NAMES[int(gm(torch.zeros(())))]
        bench.events.append(name)
        if isinstance(bench.times_us[name], BaseException):
            raise bench.times_us[name]

        def run(x):
            return name

        return run

    def time_forms(fns, sets, device, capture=True, **how):
        table = bench.times_us if capture else bench.launched_us
        return [Timing(us, us, us, 3, "clock") for us in (table[f(0)] for f in fns)]

    monkeypatch.setattr(verdict, "compile_with_inductor", compile_form)
    monkeypatch.setattr(verdict, "time_in_turns", time_forms)
    monkeypatch.setattr(verdict, "time_as_in_use", time_forms)  # of replays, on a GPU
    return bench


def decide(bench, seconds=60.0, store=None, device=CPU, ahead=None, workers=None, **options):
    opts = StofOptions(**options)
    budget = bench.budget(seconds)
    inputs, forms = (torch.zeros(()),), bench.forms()
    return fastest_form(forms, inputs, device, opts, store, "a graph", budget, ahead, workers)


def test_the_fastest_form_wins_and_is_not_compiled_again(bench):
    bench.times_us["attention only"] = 5.0
    found = decide(bench)
    assert bench.events == list(NAMES)
    assert found.verdict.winner == "attention only"
    assert found.compiled(0) == "attention only"


def test_a_form_that_takes_longer_to_call_than_another_does_not_win(bench, tmp_path):
    store = Store(tmp_path, "here")
    found = decide(bench, device=GPU, store=store)
    assert found.verdict.winner == "attention only"  # 73 us and 70 us are a tie
    assert found.verdict.launched_us == bench.launched_us
    assert found.verdict.remark.endswith(
        "fused would win if replayed, as with mode='reduce-overhead'"
    )
    assert decide(bench, device=GPU, store=store).verdict.launched_us == bench.launched_us
    bench.launched_us["fused"] = 60.0
    found = decide(bench, device=GPU)
    assert found.verdict.winner == "fused" and "replayed" not in found.verdict.remark
    bench.launched_us |= {"fused": 68.0, "attention only": 60.0}  # torch.compile's 70 are no help
    assert decide(bench, device=GPU).verdict.winner == "attention only"


def test_calls_that_cannot_be_timed_leave_the_times_of_replays(bench, monkeypatch):
    time_forms = verdict.time_in_turns

    def only_replays(fns, sets, device, capture, **how):
        if not capture:
            raise RuntimeError("no memory")
        return time_forms(fns, sets, device, capture, **how)

    monkeypatch.setattr(verdict, "time_in_turns", only_replays)
    bench.times_us["attention only"] = 5.0
    found = decide(bench, device=GPU).verdict
    assert found.winner == "attention only" and not found.launched_us


def test_replays_last_on_a_gpu_and_only_there(bench, monkeypatch):
    asked = []
    time_forms = verdict.time_as_in_use

    def lasting(fns, sets, device, turn_s, rounds):
        asked.append((device, turn_s, rounds))
        return time_forms(fns, sets, device)

    monkeypatch.setattr(verdict, "time_as_in_use", lasting)
    assert decide(bench).verdict.winner == "fused" and asked == []
    assert decide(bench, device=GPU, mode="reduce-overhead").verdict.winner == "fused"
    assert asked == [(GPU, verdict.LASTING_S, verdict.LASTING_TURNS)]


def test_launches_count_only_where_there_are_some(bench):
    graphs = decide(bench, device=GPU, mode="reduce-overhead").verdict
    here = decide(bench).verdict
    without_torch = decide(bench, device=GPU, seconds=0.0).verdict
    for found in (graphs, here, without_torch):
        assert found.winner == "fused" and not found.launched_us and not found.remark


def test_who_captures_graphs_himself_hears_nothing_of_launches(bench, tmp_path):
    store = Store(tmp_path, "key")
    mine = {"mode": "reduce-overhead", "inductor": {"triton.cudagraphs": False}}
    found = decide(bench, device=GPU, store=store, **mine)
    assert found.verdict.winner == "fused" and not found.verdict.launched_us
    assert found.compiled(0) == "fused"  # as it was timed
    # a verdict about calls that are launched is another one
    assert decide(bench, device=GPU, store=store).verdict.launched_us == bench.launched_us


def test_with_cuda_graphs_the_winner_is_compiled_as_asked(bench):
    assert decide(bench, mode="reduce-overhead").compiled is None
    assert decide(bench, inductor={"triton.cudagraphs": True}).compiled is None
    assert decide(bench, mode="default").compiled is not None


def test_the_first_form_takes_nothing_from_the_budget(bench):
    found = decide(bench, seconds=6.0)
    assert bench.events == ["fused", "as torch.compile runs it", "attention only"]
    bench.events.clear()
    found = decide(bench, seconds=5.0)
    assert bench.events == ["fused", "as torch.compile runs it"]
    assert found.verdict.winner == "fused"


def test_without_time_the_first_form_is_kept_as_compiled(bench, tmp_path):
    found = decide(bench, seconds=0.0, store=Store(tmp_path, "here"))
    assert bench.events == ["fused"]
    assert found.verdict.winner == "fused" and found.compiled(0) == "fused"
    assert "the time budget was spent" in str(found.verdict)


@pytest.mark.parametrize("seconds", [0.0, 5.0, 60.0])
def test_a_stored_verdict_is_taken_again(bench, tmp_path, seconds):
    store = Store(tmp_path, "here")
    first = decide(bench, seconds=seconds, store=store, tune_budget_s=seconds)
    bench.events.clear()
    held = decide(bench, store=store, seconds=seconds, tune_budget_s=seconds)
    assert held.verdict.source == "store" and held.verdict.winner == first.verdict.winner
    assert held.compiled is None and bench.events == []


def test_an_unfinished_verdict_is_taken_anew_when_there_is_more_time(bench, tmp_path):
    store = Store(tmp_path, "here")
    decide(bench, seconds=5.0, store=store, tune_budget_s=5)
    bench.events.clear()
    again = decide(bench, store=store, tune_budget_s=60)
    assert again.verdict.source == "measured" and len(bench.events) == 3
    assert decide(bench, store=store, tune_budget_s=600).verdict.source == "store"


def test_a_form_that_fails_is_out(bench):
    bench.times_us["fused"] = RuntimeError("no kernel")
    found = decide(bench)
    assert found.verdict.winner == "attention only"
    with pytest.raises(RuntimeError):
        decide(bench, strict=True)


def test_forms_that_cannot_be_timed_leave_the_first(bench, monkeypatch):
    def out_of_memory(*given, **how):
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(verdict, "time_in_turns", out_of_memory)
    found = decide(bench)
    assert found.verdict is None and found.compiled(0) == "fused"


def test_interrupting_keeps_what_is_compiled(bench):
    bench.times_us["as torch.compile runs it"] = KeyboardInterrupt()
    found = decide(bench)
    assert found.verdict is None and found.compiled(0) == "fused"


def test_a_form_compiled_ahead_is_timed_as_it_is(bench):
    ahead = CompiledAhead(NAMES[1], lambda x: NAMES[1], 5.0)
    found = decide(bench, seconds=6.0, ahead=ahead)
    assert bench.events == ["fused", "attention only"] and len(found.verdict.times_us) == 3
    bench.events.clear()
    found = decide(bench, seconds=4.0, ahead=ahead)  # less than a form takes
    assert bench.events == ["fused"] and set(found.verdict.times_us) == set(NAMES[:2])
    assert found.verdict.unfinished_s > 0
    bench.events.clear()
    found = decide(bench, ahead=CompiledAhead(NAMES[1], None, 5.0))
    assert bench.events == ["fused", "attention only"]
    assert set(found.verdict.times_us) == {"fused", "attention only"}


class Elsewhere:
    """Processes that compile the forms named, and how each wait for one ends."""

    def __init__(self, bench, *ends):
        self.bench, self.ends = bench, dict(zip(NAMES[1:], ends, strict=False))

    def has(self, name):
        return name in self.ends

    def wait(self, name, budget):
        self.bench.events.append(f"waited for {name}" + (", in time" if budget else ""))
        return self.ends[name]

    def done(self, name):
        return self.ends[name]

    def seconds(self, name):
        return 1.0


def test_what_other_processes_compiled_is_taken(bench):
    found = decide(bench, workers=Elsewhere(bench, True, True))
    assert bench.events == [
        "fused", f"waited for {NAMES[1]}", NAMES[1], "waited for attention only, in time", NAMES[2],
    ]  # fmt: skip
    assert set(found.verdict.times_us) == set(NAMES) and not found.verdict.unfinished_s


def test_the_graph_of_torch_compile_takes_part_whatever_becomes_of_the_process(bench):
    workers = Elsewhere(bench, False, False)
    found = decide(bench, seconds=0.0, workers=workers, tune_budget_s=7)
    assert set(found.verdict.times_us) == set(NAMES[:2]) and found.verdict.unfinished_s == 7
    bench.events.clear()
    decide(bench, workers=Elsewhere(bench), seconds=5.0)  # none was sent: the budget holds
    assert bench.events == ["fused", NAMES[1]]


def test_a_form_that_failed_there_is_compiled_here_while_there_is_time(bench):
    found = decide(bench, workers=Elsewhere(bench, True, False))
    assert set(found.verdict.times_us) == set(NAMES) and not found.verdict.unfinished_s


@pytest.mark.parametrize("done", [True, False])
def test_after_an_interrupt_nothing_is_waited_for(bench, done):
    budget = bench.budget(60.0)
    budget.stop()
    opts, forms, workers = StofOptions(), bench.forms(), Elsewhere(bench, done, False)
    found = fastest_form(
        forms, (torch.zeros(()),), CPU, opts, None, "a graph", budget, None, workers
    )
    assert bench.events == ["fused", NAMES[1]][: 1 + done]
    assert (found.verdict.winner, bool(found.verdict.unfinished_s)) == ("fused", True)
