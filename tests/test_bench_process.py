"""Processes of cells: forks of a server with torch in it that are what a new process would be."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from multiprocessing import forkserver
from pathlib import Path

import pytest
from side_by_side import only_once

BENCH = Path(__file__).resolve().parent.parent / "bench"
CELL = """
import atexit, json, os, signal, subprocess, sys, time

HERE, mode = os.path.dirname(sys.argv[0]), sys.argv[1]
if mode == "fails":
    sys.exit(3)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "talks":
    import cell_process
    here = cell_process.given_connection()
    here.send([here.recv(), cell_process.given_connection(), "STOF_NEW" in os.environ])
    sys.exit(0)
if mode.startswith("hangs"):
    child = subprocess.Popen(["sleep", "60"])
    with open(os.path.join(HERE, mode), "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(60)
seen = {"forked": "torch" in sys.modules, "name": __name__, "argv": sys.argv[1:]}
import torch
import torch._inductor.config as config
names = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "OMP_NUM_THREADS", "STOF_NEW")
seen |= {name: os.environ.get(name) for name in names}
seen["cuda"] = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
seen["cores"] = sorted(os.sched_getaffinity(0))
seen["threads"] = torch.get_num_threads(), config.compile_threads
seen["group"] = os.getpgid(0) == os.getpid()
def write():
    with open(os.path.join(HERE, mode), "w") as file:
        json.dump(seen, file)
atexit.register(write)
"""
ABOUT_CUDA = """
import os
import sys
import torch
asked = []
def note(name):
    def called(*args, **kwargs):
        if name != "is_available" or os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
            asked.append(name)  # Inductor of torch 2.11 asks is_available, which NVML can answer
        return False
    return called
for name in ("init", "_lazy_init", "is_available", "device_count", "current_device",
             "get_device_capability", "get_device_properties", "get_device_name"):
    setattr(torch.cuda, name, note(name))
torch.version.cuda = "13.0"  # as where there is a GPU
sys.path.insert(0, sys.argv[1])
import preload
assert "e2e" in sys.modules and "torch._inductor.codegen.triton" in sys.modules
print(asked, sorted(name for name in preload.os.environ if name == preload.NVML))
"""


# -- what happens, in a process of its own: the server stays as long as that -----------------------


def act(folder):
    """Everything that needs a server; returns what was seen."""
    sys.path.insert(0, str(BENCH))
    import cell_process
    import driver
    import run

    cell = folder / "cell.py"
    cell.write_text(CELL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell put us behind
    cell_process.start_server()
    seen = {"python_path": os.environ.get("PYTHONPATH")}

    def command(args, unit, gpu=None):
        return [sys.executable, str(cell), unit]

    driver.worker_command = command
    args = Namespace(
        command="e2e", gpus=1, budget=100.0, cell_timeout=60.0, out=folder / "rows.csv"
    )
    for unit, limit_s in (("fails", 60.0), ("killed", 60.0), ("hangs", 3.0), ("plain", 60.0)):
        seen[f"code {unit}"] = driver.run_unit(args, driver.Unit(unit, 1), limit_s)

    core = min(os.sched_getaffinity(0))
    added = {"CUDA_VISIBLE_DEVICES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "5"}
    taken = {**os.environ, **added, cell_process.CORES: str(core)}
    others = {**os.environ, "OMP_NUM_THREADS": "3", "STOF_NEW": "1"}
    for unit, environment in (("taken", taken), ("others", others)):
        process = cell_process.start(command(args, unit), environment)
        seen[f"code {unit}"] = cell_process.finish(process, 60.0)
    seen["core"] = core

    for environment in (dict(os.environ), others):
        here, there = multiprocessing.Pipe()
        environment["PYTHONPATH"] = str(BENCH)
        process = cell_process.start(command(args, "talks"), environment, talks=there)
        there.close()
        here.send("asked")
        seen.setdefault("said", []).append([here.recv(), cell_process.finish(process, 60.0)])

    for gpus in (1, 2):
        args.gpus = gpus
        names = [f"hangs{gpus}{letter}" for letter in "abc"]
        interrupt = threading.Thread(target=interrupt_when, args=(folder, names[:gpus]))
        interrupt.start()
        try:
            driver.run_units(args, [driver.Unit(name, 1) for name in names], time.monotonic())
        except KeyboardInterrupt:
            seen[f"interrupted {gpus}"] = [n for n in names if (folder / n).exists()]
        interrupt.join()

    args.gpus = 1

    def told_to_end(name, *waited_for, others=()):
        """Exit code of a run that SIGTERM ends."""
        driver.drive = lambda given: driver.run_units(
            args, [driver.Unit(name, 1)], time.monotonic()
        )
        told = folder, waited_for, signal.SIGTERM, *others
        interrupt = threading.Thread(target=interrupt_when, args=told)
        interrupt.start()
        try:
            return run.main(["e2e"])
        except SystemExit as end:
            return end.code
        finally:
            interrupt.join()

    servers = [forkserver._forkserver._forkserver_pid]  # where the group is told, as by timeout
    seen["told to end"] = told_to_end("hangs3", "hangs3", others=servers)
    cell_process.start_server()  # told while it imports, and asked for a cell already
    servers.append(forkserver._forkserver._forkserver_pid)
    seen["told early"] = told_to_end("hangs4")
    seen["servers left"] = [pid for pid in servers if goes_on(pid)]
    seen["alive"] = [path.name for path in folder.glob("hangs*") if still_runs(path)]
    return seen


def interrupt_when(folder, names, number=signal.SIGINT, *others):
    """Be the one who presses Ctrl-C when all of these cells have started."""
    end = time.monotonic() + 60
    while time.monotonic() < end and not all((folder / name).exists() for name in names):
        time.sleep(0.05)
    for pid in others:
        os.kill(pid, number)
    time.sleep(0.2)
    os.kill(os.getpid(), number)


def goes_on(pid):
    end = time.monotonic() + 5
    while time.monotonic() < end and Path(f"/proc/{pid}/stat").exists() and state(pid) != "Z":
        time.sleep(0.05)
    return Path(f"/proc/{pid}/stat").exists() and state(pid) != "Z"


def still_runs(path):
    end = time.monotonic() + 5  # a killed process may need a moment
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}/stat").exists() and state(pid) != "Z"
                   for pid in path.read_text().split()):  # fmt: skip
            return False
        time.sleep(0.05)
    return True


def state(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


# -- tests -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Folder, what :func:`act` saw, its stderr; test processes that work side by side share it."""
    pytest.importorskip("transformers")
    folder, said = only_once(tmp_path_factory, "bench-process", acted_in)
    return folder, *said


def acted_in(folder):
    given = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_COMPILE_THREADS"}
    # torch 2.11 with CUDA looks for GPUs at import if this is on, and without NVML spoils forks
    given["TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER"] = "0"
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        capture_output=True,
        text=True,
        env={**given, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def told(folder, unit):
    return json.loads((folder / unit).read_text())


def test_a_cell_begins_with_torch_imported_and_no_cuda(seen):
    folder, acted, _ = seen
    assert acted["code plain"] == 0
    plain = told(folder, "plain")  # written at exit
    assert (plain["forked"], plain["cuda"], plain["group"]) == (True, False, True)
    assert (plain["name"], plain["argv"]) == ("__main__", ["plain", "--seconds", "60"])
    assert plain["PYTHONPATH"] == acted["python_path"]  # the server's has bench/ in it


def test_a_cell_takes_on_its_environment_and_its_cores(seen):
    folder, acted, _ = seen
    taken = told(folder, "taken")
    assert acted["code taken"] == 0 and taken["forked"]
    assert (taken["CUDA_VISIBLE_DEVICES"], taken["cores"]) == ("1", [acted["core"]])
    assert taken["threads"] == [1, 5]


def test_what_torch_read_at_import_makes_an_ordinary_process(seen):
    folder, acted, stderr = seen
    others = told(folder, "others")
    assert acted["code others"] == 0 and not others["forked"] and others["group"]
    assert (others["OMP_NUM_THREADS"], others["STOF_NEW"]) == ("3", "1")
    assert "as an ordinary process: OMP_NUM_THREADS, STOF_NEW changed since" in stderr


def test_a_cell_may_talk_to_who_started_it(seen):
    _, acted, _ = seen  # a fork, and an ordinary process
    assert acted["said"] == [[["asked", None, False], 0], [["asked", None, True], 0]]


def test_a_cell_that_fails_or_takes_too_long_is_logged(seen):
    folder, acted, _ = seen
    assert [acted[f"code {unit}"] for unit in ("fails", "killed", "hangs")] == [1, 1, 1]
    log = (folder / "rows.log.csv").read_text()
    assert "fails,-,-,error,the cell's process ended with 3" in log
    assert "killed,-,-,error,the cell's process ended with -9" in log
    assert "hangs,-,-,error,stopped after 3 s; rows that it has written stay" in log


def test_ctrl_c_ends_the_cells_and_begins_no_other(seen):
    _, acted, _ = seen
    assert acted["interrupted 1"] == ["hangs1a"]
    assert acted["interrupted 2"] == ["hangs2a", "hangs2b"]


def test_sigterm_ends_the_run(seen):
    _, acted, _ = seen
    assert acted["told to end"] == acted["told early"] == 143 and acted["servers left"] == []


def test_nothing_that_a_cell_started_outlives_it(seen):
    folder, acted, _ = seen
    assert len(list(folder.glob("hangs*"))) == 5 and acted["alive"] == []


def test_importing_ahead_asks_cuda_nothing():
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", ABOUT_CUDA, str(BENCH)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[] []"


@pytest.mark.parametrize(("bad_fork", "started"), [(True, False), (False, True), (False, False)])
def test_a_fork_of_a_process_that_started_cuda_is_not_used(
    bench_path, monkeypatch, bad_fork, started
):
    import cell_process
    import torch

    monkeypatch.setitem(sys.modules, "preload", Namespace(STARTED={}, CUDA_STARTED=started))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: bad_fork)
    assert ("started CUDA" in cell_process.unfit({})) == (bad_fork or started)


@pytest.mark.parametrize(("answer", "started"), [(None, False), (3, False), (0, True), (100, True)])
def test_the_driver_is_asked_whether_cuda_was_started(bench_path, monkeypatch, answer, started):
    import cell_process

    def load(name, mode):
        assert name == "libcuda.so.1" and mode & os.RTLD_NOLOAD
        if answer is None:
            raise OSError("not loaded")
        return Namespace(cuDeviceGetCount=lambda count: answer)

    monkeypatch.setattr(cell_process.ctypes, "CDLL", load)
    assert cell_process.cuda_started() == started


def test_what_a_process_has_started_is_found(bench_path):
    import cell_process

    command = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
    with subprocess.Popen(command) as outer:
        try:
            until = time.monotonic() + 30
            while len(cell_process._descendants(outer.pid)) < 1 and time.monotonic() < until:
                time.sleep(0.05)
            (inner,) = cell_process._descendants(outer.pid)
            assert {outer.pid, inner} <= set(cell_process._descendants(os.getpid()))
        finally:
            os.kill(inner, signal.SIGKILL)


if __name__ == "__main__":
    print(json.dumps(act(Path(sys.argv[1]))))
