"""Workers that compile: the protocol, with jobs that need no GPU."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import _inductor as inductor
from worker_echo import HERE, RECIPE, SPEC, echo_pool, job, pool_of

from stof_compile.fusion.recipe import Recipe, Ref, Step
from stof_compile.measure import real_tensors
from stof_compile.search import compile_pool
from stof_compile.search.candidate import LIBRARY
from stof_compile.search.compile_pool import CompilePool, Job
from stof_compile.search.library import inductor_settings, library_call, needs_compiling
from stof_compile.store import default_root
from stof_compile.triton_environment import TritonEnvironment


@pytest.fixture
def pool():
    made = echo_pool(2)
    yield made
    made.close()


def test_jobs_are_answered(pool):
    answers = [pool.submit(job(name)).result(30) for name in ("fits", "other", "fits")]
    assert answers == ["", "no template other", ""]


def test_a_hurried_job_goes_before_all_others_and_is_done_once(caplog):
    pool, order = echo_pool(), []
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


@pytest.mark.parametrize(
    "code", ["raise SystemExit(1)", "def main():\n    raise SystemExit(1)"], ids=["import", "start"]
)
def test_workers_that_do_not_start_are_not_alive(code, tmp_path):
    (tmp_path / "no_worker.py").write_text(code)
    pool = pool_of("no_worker", 2, tmp_path)
    deadline = time.monotonic() + 10
    while pool.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pool.alive
    pool.close()


def test_where_not_all_can_be_started_none_stays(monkeypatch):
    one = tempfile.TemporaryFile()  # noqa: SIM115 (the pool closes it)
    files, before = iter([one]), sorted(os.listdir("/proc/self/fd"))

    def open_one():
        for file in files:
            return file
        raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", open_one)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(OSError, match="no space left"):
        echo_pool(2)
    assert one.closed and len(os.listdir("/proc/self/fd")) == len(before) - 1


def test_where_no_thread_can_be_started_no_process_stays(monkeypatch):
    servers, start = [], subprocess.Popen

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: servers.append(start(*a, **k)) or servers[-1]
    )
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        echo_pool(2)
    (server,) = servers
    assert server.poll() is not None


def test_one_core_is_for_the_process_that_times(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert compile_pool.start_pool() is None


def test_a_program_may_have_closed_its_standard_input():
    kept = os.dup(0)
    os.close(0)
    try:
        pool = echo_pool()
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    try:
        assert pool.submit(job("fits")).result(30) == ""
    finally:
        pool.close()


def test_workers_are_found_where_no_folder_of_a_script_is(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    pool = echo_pool()
    try:
        assert pool.submit(job("fits")).result(30) == ""
    finally:
        pool.close()


def test_workers_keep_the_bytecode_that_torch_lacks(monkeypatch):
    monkeypatch.setattr("stof_compile.bytecode.lacking_bytecode", lambda folder: "it lacks")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    pool = echo_pool()
    try:
        assert pool.submit(job("fits")).result(30) == ""
    finally:
        pool.close()
    kept = default_root() / "bytecode" / f"torch-{torch.__version__}"
    assert list(kept.rglob("echo_worker.*.pyc"))
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1", "this process is as it was"


def workers_of(server):
    """Processes that a fork server has forked, which are not waited for."""
    return Path(f"/proc/{server}/task/{server}/children").read_text().split()


def have_ended(pids):
    """Whether processes end soon; those that nobody waits for have ended."""

    def runs(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + 20
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(runs, pids))


def test_a_pool_that_is_closed_leaves_no_process_behind():
    pool = echo_pool(3)
    pool.submit(job("fits")).result(30)
    for _ in range(4):
        pool.submit(job("slow"))
    server = pool._server.pid
    pids = [*workers_of(server), server]
    assert len(pids) == 4
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_closing_does_not_wait_for_a_job_where_the_thread_that_asks_blocks_signals():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        pool = echo_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    future = pool.submit(job("stuck"))
    while not future.running():
        time.sleep(0.01)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 30


ENDED_MEANWHILE = """
import os, signal, time

fork, wait, forked = os.fork, os.wait, []

def forks():
    pid = fork()
    if pid:
        forked.append(pid)
        print(pid, file=open({told!r}, "a"))
        {in_fork}
    return pid

def waits():
    ended = wait()
    {in_wait}
    return ended

def main():
    time.sleep(60 if forked else {first})

os.fork, os.wait = forks, waits
"""
END = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    "moment",
    [{"in_fork": END, "in_wait": "", "first": 60}, {"in_fork": "", "in_wait": END, "first": 0}],
    ids=["forks", "waits"],
)
def test_all_workers_end_whenever_the_server_is_told_to(moment, tmp_path):
    told = tmp_path / "pids"
    (tmp_path / "sleeps.py").write_text(ENDED_MEANWHILE.format(told=str(told), **moment))
    pool = pool_of("sleeps", 3, tmp_path)
    pool._server.wait(30)
    pids = told.read_text().split()
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    pool.close()


def test_workers_end_with_the_program_that_asks():
    """Be it killed."""
    program = (
        "import os, time\n"
        "from worker_echo import echo_pool, job\n"
        "pool = echo_pool(2)\n"
        "pool.submit(job('fits')).result(60)\n"
        "print(pool._server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    asks = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with asks.stdout as lines:
        server = int(lines.readline())
    pids = [*workers_of(server), server]
    assert len(pids) == 3
    asks.kill()
    asks.wait()
    assert have_ended(pids)


def test_ctrl_c_ends_workers_and_their_server():
    pool = echo_pool(2)
    pool.submit(job("fits")).result(30)
    server = pool._server.pid
    pids = workers_of(server)
    for pid in (server, *pids):  # as a terminal does
        os.kill(int(pid), signal.SIGINT)
    assert have_ended([*pids, server])
    deadline = time.monotonic() + 10
    while pool.alive and time.monotonic() < deadline:
        pool.submit(job("fits"))
        time.sleep(0.01)
    assert not pool.alive
    pool.close()


def end_of(pool, caplog):
    """What is told of a worker that did one job and died of the next."""
    try:
        assert pool.submit(job("fits")).result(60) == ""
        with caplog.at_level("INFO", "stof_compile"):
            assert "ended" in pool.submit(job("dies")).result(30)
    finally:
        pool.close()
    return caplog.text


def test_a_fork_that_cannot_use_its_gpu_begins_anew(caplog):
    """Here there is none, so that none can."""
    assert "a fork cannot use CUDA" in end_of(pool_of("echo_worker", cuda=True), caplog)


def test_what_an_import_prints_is_no_word_of_the_server(tmp_path, caplog):
    (tmp_path / "talks.py").write_text("print('a b\\n0 7')\nfrom echo_worker import main")
    pool = pool_of("talks", 1, f"{tmp_path}{os.pathsep}{HERE}")
    assert "exit code 1" in end_of(pool, caplog)


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
