"""Workers that compile: the protocol, with jobs that need no GPU."""

import pickle
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from torch import _inductor as inductor
from worker_echo import ECHO, RECIPE, SPEC, job

from stof_compile.fusion.recipe import Recipe, Ref, Step
from stof_compile.measure import real_tensors
from stof_compile.search.candidate import LIBRARY
from stof_compile.search.compile_pool import CompilePool, Job
from stof_compile.search.library import inductor_settings, library_call, needs_compiling
from stof_compile.triton_environment import TritonEnvironment


@pytest.fixture
def pool():
    made = CompilePool(2, [sys.executable, "-c", ECHO])
    yield made
    made.close()


def test_jobs_are_answered(pool):
    answers = [pool.submit(job(name)).result(30) for name in ("fits", "other", "fits")]
    assert answers == ["", "no template other", ""]


def test_a_hurried_job_goes_before_all_others_and_is_done_once(caplog):
    pool, order = CompilePool(1, [sys.executable, "-c", ECHO]), []
    try:
        futures = [pool.submit(job(name)) for name in ("slow", "fits", "fits", "fits")]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: order.append(number))
        pool.hurry(job("fits"), futures[2])
        pool.hurry(job("fits"), futures[3])
        assert [future.result(30) for future in futures] == [""] * 4
        assert order in ([0, 3, 2, 1], [3, 2, 0, 1])
        assert pool.submit(job("fits")).result(30) == "", "what was hurried is not begun again"
        pool.hurry(job("fits"), futures[3])  # nothing happens
    finally:
        pool.close()
    assert not caplog.records, "futures complain of what they are asked for twice"


def test_a_worker_that_dies_answers_its_job_and_leaves_the_others(pool, caplog):
    with caplog.at_level("INFO", "stof_compile"):
        assert "ended" in pool.submit(job("dies")).result(30)
    assert "exit code 1" in caplog.text and "it was too much" in caplog.text
    assert pool.submit(job("fits")).result(30) == "" and pool.alive
    assert "ended" in pool.submit(job("dies")).result(30)
    deadline = time.monotonic() + 10
    while pool.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pool.alive


def test_workers_that_do_not_start_are_not_alive():
    pool = CompilePool(2, [sys.executable, "-c", "raise SystemExit(1)"])
    deadline = time.monotonic() + 10
    while pool.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pool.alive
    pool.close()


def test_where_not_all_can_be_started_none_stays(monkeypatch):
    one = tempfile.TemporaryFile()  # noqa: SIM115 (the pool closes it)
    files, started = iter([one]), []
    start = subprocess.Popen

    def open_one():
        for file in files:
            return file
        raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", open_one)
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1]
    )
    with pytest.raises(OSError, match="no space left"):
        CompilePool(2, [sys.executable, "-c", ECHO])
    (process,) = started
    assert process.poll() is not None


def test_the_real_worker_says_why_it_cannot():
    pool = CompilePool(1)
    try:
        assert "ValueError" in pool.submit(job("no such template")).result(60)
    finally:
        pool.close()


def test_the_search_finds_what_a_worker_compiled_with_inductor(tmp_path, monkeypatch, fresh_dynamo):
    """In a back end, where the search runs, and under own settings: nothing is compiled again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    operands, compiled = [torch.randn(4, 4)], []
    with inductor.config.patch({"cpp.simdlen": 1}):
        settings, pool = inductor_settings(), CompilePool(1)
        try:
            environment = TritonEnvironment.of_this_process(torch.device("cpu"))
            work = Job(RECIPE, LIBRARY, (), "cpu", environment, settings)
            assert pool.submit(work).result(120) == ""
        finally:
            pool.close()

        def backend(gm, inputs):
            compiled.append(sorted(tmp_path.rglob("*.so")))
            with real_tensors(), torch.no_grad():
                call = library_call(RECIPE, operands)
            compiled.append(sorted(tmp_path.rglob("*.so")))
            torch.testing.assert_close(call(*operands), operands[0].exp())
            return gm.forward

        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    before, after = compiled
    assert before == after and before


def test_products_are_the_librarys_and_need_no_compiling():
    linear = Step("linear", (Ref("operand", 0), Ref("operand", 1)), (4, 4), torch.float32)
    assert not needs_compiling(Recipe((SPEC, SPEC), (linear,)))
    assert needs_compiling(RECIPE)


def test_settings_that_hold_code_stay_here():
    with inductor.config.patch({"cpp.simdlen": 1, "inductor_choices_class": lambda: None}):
        held = pickle.loads(inductor_settings())
    assert held["cpp.simdlen"] == 1 and "inductor_choices_class" not in held
    assert not any(map(callable, held.values()))
