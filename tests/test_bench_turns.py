"""Ways of a whole model called in turns: the order, failures, and the seconds of a cell."""

import multiprocessing
import threading
from argparse import Namespace
from functools import partial

import numpy
import pytest
import torch

pytest.importorskip("transformers")


def test_calls_in_turns(bench_path, monkeypatch):
    import turns

    made = []
    monkeypatch.setattr(turns.time, "monotonic", lambda: float(len(made)))
    takers = [lambda turn, name=name: made.append(f"{name}{turn}") or len(made) for name in "abc"]
    taken = turns.in_rounds(takers, budget_s=0.0)
    first = ["a0", "b0", "c0"]  # not counted
    both = ["a0", "b0", "c0", "c0", "b0", "a0", "a1", "b1", "c1", "c1", "b1", "a1"]
    assert made[:15] == first + both and len(made) == 3 + 5 * 6  # five rounds, whatever the time
    assert taken[0][:2] == [[4.0, 9.0], [10.0, 15.0]] and taken[2][0] == [6.0, 7.0]
    monkeypatch.setattr(turns, "ROUNDS", (2, 7))
    assert len(turns.in_rounds(takers, budget_s=1e9)[0]) == 7
    assert turns.in_rounds([], budget_s=1.0) == []


def test_a_way_that_fails_in_its_turn_leaves_the_others(bench_path, tmp_path, monkeypatch):
    import e2e
    import turns
    from ways import Way

    monkeypatch.setattr(turns, "ROUNDS", (2, 2))
    held, ended = [], []

    def begun(name):
        here, there = multiprocessing.Pipe()

        def calls():
            for number in range(100):
                try:
                    there.recv()
                except EOFError:
                    return
                if name == "flex-default" and number == 2:
                    there.send({"failed": "ValueError: no"})
                elif name == "stof-default" and number == 3:
                    there.close()
                    return
                else:
                    there.send(float(number))

        threading.Thread(target=calls).start()
        way, end = Way(name, name[:4]), partial(ended.append, name)
        said = {"output": None, "detail": "", "columns": {"graph_us": ""}}
        held.append(turns.Turn(way, here, end, 0.0, **said))

    for name in ("compile-default", "flex-default", "stof-default", "stof-fusion"):
        begun(name)
    args = Namespace(
        out=tmp_path / "rows.csv", worker="bert-tiny/1x100", device="cpu", seconds=None,
        tune_budget=1.0, turn_seconds=None, dtype=None,
    )  # fmt: skip
    found = e2e._timed(args, held, "bert-tiny", e2e._Clock(args))
    assert [turn.way.name for turn in held] == ["compile-default", "stof-fusion"]
    assert [times["graph_us"] for times in found] == ["", ""]
    assert [times["runs"] for times in found] == [4, 4] and "x compile-default" in found[1][
        "detail"
    ]
    log = (tmp_path / "rows.log.csv").read_text()
    assert "flex-default,bert-tiny,error,ValueError: no" in log
    assert "stof-default,bert-tiny,error,its process ended: " in log
    assert ended == ["flex-default", "stof-default"]
    for turn in held:
        turn.close()


@pytest.mark.parametrize("together", [True, False])
def test_ways_compile_one_after_the_other_or_together(bench_path, tmp_path, together):
    import turns
    from ways import Way

    told, processes = [], []

    def begun(name):
        here, there = multiprocessing.Pipe()

        def answers():
            told.append((name, there.recv()))
            if together:
                everyone.wait(30)  # broken where only one is told before it has answered
            there.send({"failed": "ValueError: no"} if name == "fails" else {"compile_s": 2.0})
            if name == "fails":
                return
            told.append((name, there.recv()))
            there.send({"output": numpy.ones(3), "detail": name, "columns": {}})

        threads.append(threading.Thread(target=answers))
        threads[-1].start()
        processes.append(turns.Process(Way(name, "sdpa"), here, lambda: None))

    threads, everyone = [], threading.Barrier(3)
    for name in ("a", "fails", "b"):
        begun(name)
    args = Namespace(out=tmp_path / "rows.csv", worker="bert-tiny/1x100")
    left = turns.compile_together(args, processes) if together else processes
    found = [turns.compiled(args, process) for process in left]
    assert [turn and (turn.detail, turn.compile_s) for turn in found if turn] == [
        ("a", 2.0), ("b", 2.0)
    ]  # fmt: skip
    for thread in threads:
        thread.join(30)
    first = [what for _, what in told[:3]]
    assert first == (["compile"] * 3 if together else ["compile", "report", "compile"])
    assert "fails,bert-tiny,error,ValueError: no" in (tmp_path / "rows.log.csv").read_text()


def test_ways_that_a_cell_has_no_time_for_are_left_to_a_later_run(bench_path, monkeypatch):
    import e2e
    import turns
    from ways import Way

    now = [100.0]
    monkeypatch.setattr(e2e.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(turns, "BUDGET_S", {"cuda": 4.0})

    def compiled(seconds):
        return lambda args, process: now.__setitem__(0, now[0] + seconds)

    plain, stof = Way("compile-default", "sdpa"), Way("stof-default", "stof")
    given = {"device": "cuda", "tune_budget": 60.0}
    clock = e2e._Clock(Namespace(**given, seconds=130.0, turn_seconds=None))
    assert clock.leaves_time(stof, 2) and clock.turns_s(2) == 8.0
    monkeypatch.setattr(turns, "compiled", compiled(20.0))
    clock.compiled(Namespace(way=plain))
    assert clock.leaves_time(stof, 2)  # 110 s left for 60, turns and some to spare
    monkeypatch.setattr(turns, "compiled", compiled(75.0))
    clock.compiled(Namespace(way=stof))
    assert not clock.leaves_time(stof, 3) and not clock.leaves_time(plain, 3)  # 35 s left
    assert clock.turns_s(2) == 8.0
    now[0] += 20.0
    assert clock.turns_s(2) == 5.0  # what is left but for 10 s
    free = e2e._Clock(Namespace(**given, seconds=None, turn_seconds=None))
    assert free.leaves_time(stof, 9) and free.turns_s(3) == 12.0
    short = e2e._Clock(Namespace(**given, seconds=None, turn_seconds=1.0))
    assert short.turns_s(3) == 3.0


def test_the_detail_of_a_row_tells_the_seconds_of_the_steps_of_a_search(bench_path):
    from details import scheme_texts

    from stof_compile.dump import Record

    note = "fusion measured 7 candidates in 9.0 s"
    record = Record(notes=[note], timings_s={"stof": 9.5, "attention": 1.25, "fusion": 8.0})
    assert scheme_texts([record]) == [note, "seconds: attention 1.2, fusion 8.0"]
    assert scheme_texts([Record(timings_s={"attention": 1.0})]) == []


def test_the_process_of_a_way_is_told_what_its_cell_was(bench_path, monkeypatch):
    import turns
    from ways import Way

    started = []
    monkeypatch.setattr(turns.cell_process, "start", lambda line, *_, **__: started.append(line))
    args = Namespace(
        command="e2e", worker="bert-tiny/1x100", device="cpu", model="bert-tiny", seed=3, out="r",
        tune_budget=1.0, caches="caches", dump_dir=None, dtype="bfloat16", smoke=False,
    )  # fmt: skip
    ours, theirs = multiprocessing.Pipe()
    with ours:
        turns.start(args, Way("stof-default", "stof"), theirs)
    (command,) = started
    told = dict(zip(command[3::2], command[4::2], strict=True))
    assert told["--dtype"] == "bfloat16" and told["--seed"] == "3"
    assert told["--worker"] == "bert-tiny/1x100/stof-default" and "--dump-dir" not in told


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_of_any_dtype_reach_the_cell(bench_path, dtype):
    import turns

    output = torch.randn(3, 5).to(dtype)
    assert torch.equal(torch.from_numpy(turns.sent(output)).double(), output.double())
