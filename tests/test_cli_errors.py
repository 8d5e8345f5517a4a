"""What the command line says where something fails: exit codes, one message, an object of JSON."""

import json
import os
import signal
import subprocess
import sys

import pytest

from stof_compile.cli import main
from stof_compile.device import device_facts
from stof_compile.errors import StofOptionError
from stof_compile.store import Store, entries, environment_key


def json_of(capsys, *call):
    """(exit code, the one object on stdout)"""
    status = main([*map(str, call), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """A cache with an entry of this machine."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    root = tmp_path / "cache"
    Store(root, environment_key(device_facts("cpu"))).put("tuned", "graph", {"trials": 12})
    return root


@pytest.fixture
def dump(tmp_path):
    from stof_compile.dump import Record, write_dump

    text = "class G:\n    def forward(self, x):\n        return (x,)"
    write_dump(Record(graphs={"captured": text}), tmp_path / "dump")
    return tmp_path / "dump"


NOWHERE = "/proc/nothing/x"  # where not even root makes a file


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a place where nothing can be written")
@pytest.mark.parametrize(
    "place, status, kind",
    [(NOWHERE, 1, "StofPlaceError"), ("file/x", 2, "StofOptionError")],
    ids=["nowhere", "file"],
)
def test_a_place_that_cannot_be_written_to_is_1_and_something_else_is_2(
    capsys, tmp_path, monkeypatch, filled, dump, place, status, kind
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    for call in (
        ["cache", "export", place, "--dir", filled],
        ["inspect", dump, "--html", place],
        ["tune", "--model", "bert-tiny", "--out", place],
        ["tune", "--model", "bert-tiny", "--dump-dir", place],
        ["demo", "--dump-dir", place],
    ):
        found, body = json_of(capsys, *call)
        assert (found, body["kind"]) == (status, kind), call
        assert place in body["error"] and "name " in body["error"]


def test_an_error_of_the_system_has_a_next_step(capsys, monkeypatch):
    def fail(*given):
        raise FileNotFoundError(2, "No such file or directory", "/proc/stof-compile")

    monkeypatch.setattr("stof_compile.demo.run_demo", fail)
    assert main(["demo"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("stof: /proc/stof-compile: No such file or directory: ")
    assert "XDG_CACHE_HOME" in said and "Errno" not in said


def test_dynamo_adds_nothing_to_our_errors(capsys, monkeypatch):
    def fail(*given):
        raise StofOptionError(
            "option 'x' is wrong\n\nfrom user code:\n   File ...\n\nSet TORCHDYNAMO_VERBOSE=1 for"
        )

    monkeypatch.setattr("stof_compile.demo.run_demo", fail)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "stof: option 'x' is wrong\n"
    status, body = json_of(capsys, "demo")
    assert status == 2 and body["error"] == "option 'x' is wrong"


@pytest.mark.parametrize(
    "given, words",
    [
        (["--budget", "-1"], "--budget must be"),
        (["--budget", "nan"], "--budget must be"),
        (["--seed", "-1"], "--seed must be"),
        (["--seed", "99999999999999999999999"], "--seed must be"),
        (["--dump-dir", "/etc/passwd"], "--dump-dir /etc/passwd is a file"),
    ],
    ids=" ".join,
)
def test_tune_speaks_of_its_own_options(capsys, given, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--model", "bert-tiny", *given]) == 2
    said = capsys.readouterr().err
    assert words in said and "option '" not in said and "TORCHDYNAMO" not in said


def test_help_by_a_letter(capsys):
    for call in (["-h"], ["tune", "-h"], ["cache", "export", "-h"], ["bench", "-h"]):
        assert main(call) == 0
        assert "Usage" in capsys.readouterr().out


# -- json -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [["nosuch"], []], ids=["nosuch", "nothing"])
def test_bench_that_fails_says_so(capfd, call):
    assert main(["bench", *call, "--json"]) == 2
    body = json.loads(capfd.readouterr().out)
    assert body["kind"] == "BenchFailed" and body["exit_code"] == 2
    assert "exit code 2" in body["error"] and "stderr" in body["error"]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_an_interrupt_is_told(capsys, monkeypatch, as_json):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("stof_compile.demo.run_demo", stop)
    assert main(["demo", *(["--json"] if as_json else [])]) == 130
    captured = capsys.readouterr()
    assert captured.err.startswith("stof: interrupted") and "call it again" in captured.err
    if as_json:
        assert json.loads(captured.out)["kind"] == "KeyboardInterrupt"
    else:
        assert captured.out == ""


WAIT = """
import sys, time
import stof_compile.demo

def run(*given):
    print("ready", file=sys.stderr, flush=True)
    time.sleep(100)

stof_compile.demo.run_demo = run
from stof_compile.cli import main
sys.exit(main(["demo", "--json"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
def test_ctrl_c():
    with subprocess.Popen(
        [sys.executable, "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr.readline() == "ready\n"
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert json.loads(out)["kind"] == "KeyboardInterrupt"
    assert "interrupted" in err and "Traceback" not in err


# -- cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["ls"], ["show"], ["clear"], ["prune", "--damaged"], ["export", "x"]], ids=" ".join
)
def test_a_cache_is_a_folder(capsys, tmp_path, words):
    file = tmp_path / "file"
    file.write_text("no folder")
    for place, why in ((file, "is a file"), (file / "deep", "is a file")):
        status, body = json_of(capsys, "cache", *words, "--dir", place)
        assert status == 2 and f"--dir {place}" in body["error"] and why in body["error"]
    assert file.read_text() == "no folder"


def test_a_cache_that_is_not_there_is_told(capsys, tmp_path):
    place = tmp_path / "none"
    for words in (["ls"], ["clear"], ["prune", "--damaged"]):
        assert main(["cache", *words, "--dir", str(place)]) == 0
        assert f"{place}, which does not exist" in capsys.readouterr().out
    status, body = json_of(capsys, "cache", "ls", "--dir", place)
    assert status == 0 and body["exists"] is False
    assert main(["cache", "show", "--dir", str(place)]) == 2
    assert f"{place} (there is no such folder) holds nothing" in capsys.readouterr().err


def test_damaged_files_are_counted_and_can_be_deleted(capsys, tmp_path, filled):
    (entry,) = entries(filled)
    damaged = entry.path.with_name("0" * 32 + ".json")
    damaged.write_text("{ cut")
    assert main(["cache", "ls", "--dir", str(filled)]) == 0
    assert f"damaged files in {filled}: 1" in (said := capsys.readouterr().out)
    assert "`stof cache prune --damaged`" in said
    assert json_of(capsys, "cache", "ls", "--dir", filled)[1]["damaged"] == [str(damaged)]
    file = tmp_path / "x.json"
    assert main(["cache", "export", str(file), "--dir", str(filled)]) == 0
    assert "damaged files left out: 1" in capsys.readouterr().out
    status, body = json_of(capsys, "cache", "export", file, "--dir", filled)
    assert status == 0 and body["damaged"] == [str(damaged)] and body["entries"] == 1
    call = ["cache", "prune", "--damaged", "--dir", filled]
    _, body = json_of(capsys, *call, "--dry-run")
    assert (body["entries"], body["damaged"]) == (0, 1) and damaged.exists()
    assert main(list(map(str, call))) == 0
    assert "0 entries (0.0 kB) and 1 damaged files deleted" in capsys.readouterr().out
    assert not damaged.exists() and entry.path.exists()
    assert json_of(capsys, "cache", "ls", "--dir", filled)[1]["damaged"] == []
    damaged.write_text("[1]")
    _, body = json_of(capsys, *call, "--older-than", 9)
    assert (body["entries"], body["damaged"]) == (0, 1) and entry.path.exists()
