"""``stof bench``: hands on to bench/run.py, ends it, says where there is none."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stof_compile.cli import bench, main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a bench/run.py that says what it was given; not installed."""
    (tmp_path / "bench").mkdir()
    script = tmp_path / "bench" / "run.py"
    script.write_text("import sys\nprint('bench', *sys.argv[1:])\nsys.exit(3)\n")
    (tmp_path / "pyproject.toml").write_text('name = "stof-compile"\n')
    monkeypatch.setattr("stof_compile.cli.bench.__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bench_hands_on(capfd, project):
    assert main(["bench", "e2e", "--model", "gpt2", "--resume"]) == 3
    assert capfd.readouterr().out == "bench e2e --model gpt2 --resume\n"
    assert main(["bench", "e2e", "--json", "--resume"]) == 3
    captured = capfd.readouterr()
    body = json.loads(captured.out)
    assert body["command"] == ["e2e", "--resume"] and body["exit_code"] == 3
    assert body["output"] == ["bench e2e --resume"] and "bench e2e --resume" in captured.err
    assert main(["bench", "--help"]) == 0
    assert "bench/run.py" in capfd.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("given", [[], ["--json"]], ids=["text", "json"])
def test_bench_ends_with_what_it_started(project, number, status, given):
    (project / "bench" / "run.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(open('ended', 'w').close()))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    code = (
        "import signal, sys, stof_compile.cli as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"cli.bench.__file__ = {str(project / 'a' / 'b' / 'c' / 'd.py')!r}\n"
        f"sys.exit(cli.main(['bench', 'x', *{given}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as run:
        inner = int((run.stderr if given else run.stdout).readline())
        run.send_signal(number)
        run.communicate(timeout=60)
    assert run.returncode == status
    assert (project / "ended").exists() and not os.path.exists(f"/proc/{inner}")


def test_bench_is_found_beside_an_editable_install():
    assert bench.find_bench() == ROOT / "bench" / "run.py"


def test_bench_that_is_not_here(capsys, project):
    (project / "bench" / "run.py").unlink()
    assert main(["bench", "cpu"]) == 1
    assert "clone the repository" in capsys.readouterr().err
    assert main(["bench", "cpu", "--json"]) == 1
    assert "clone the repository" in json.loads(capsys.readouterr().out)["error"]
