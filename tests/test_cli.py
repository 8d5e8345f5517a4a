"""The command line: what it says, its exit codes, its JSON, and what it does not import."""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stof_compile import zoo
from stof_compile.cli import main, runs
from stof_compile.cli.output import output
from stof_compile.cli.parts import supported_torch, tools
from stof_compile.demo import DemoResult, DemoSettings, Row
from stof_compile.device import device_facts
from stof_compile.errors import StofUnsupportedError
from stof_compile.explanation import Explanation
from stof_compile.measure import ErrorReport, Timing
from stof_compile.options import MODES
from stof_compile.plan import PlanFile
from stof_compile.tune_subject import DTYPES, MASKS, TuneSettings

ROOT = Path(__file__).resolve().parent.parent


def json_of(capsys, *call):
    """(exit code, the one object on stdout)"""
    status = main([*map(str, call), "--json"])
    return status, json.loads(capsys.readouterr().out)


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**os.environ, **environment},
    )


# -- the frame ------------------------------------------------------------------------------------


def test_help_and_version_need_no_torch():
    calls = [["--help"], ["--version"], ["tune", "--help"], ["cache", "import", "--help"]]
    done = python(
        "import sys\n"
        "from stof_compile.cli import main\n"
        f"print([main(call) for call in {calls}])\n"
        "assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0]"
    for command in ("doctor", "demo", "tune", "explain", "inspect", "bench", "cache"):
        assert re.search(rf"^\W*{command} ", done.stdout, re.MULTILINE), command


@pytest.mark.parametrize(
    "typed, offered",
    [
        ("stof ca", ["cache"]),
        ("stof cache i", ["import"]),
        ("stof tune --mask b", ["bigbird"]),
        ("stof tune --model bert-", ["bert-base", "bert-large", "bert-tiny"]),
    ],
)
def test_shell_completion(typed, offered):
    done = python(
        "from stof_compile.cli import main; main()",
        _STOF_COMPLETE="complete_bash",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split()) - 1),
    )
    assert done.stdout.split() == offered


@pytest.mark.parametrize(
    "call, words",
    [
        (["nothing"], "nothing"),
        ([], "missing command"),
        (["--nope"], "--nope"),
        (["explain", "--nope"], "--nope"),
        (["tune", "--mask"], "requires an argument"),
        (["tune"], "--model"),
        (["tune", "--model", "bert-base", "--mask", "diagonal"], "longformer"),
        (["tune", "--model", "bert-base", "--seq", "many"], "--seq"),
        (["cache", "prune", "--older-than", "-1"], "--older-than"),
        (["explain"], "DUMP"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_calls(capsys, call, words):
    assert main(call) == 2
    captured = capsys.readouterr()
    assert words in captured.err and not captured.out
    assert captured.err.startswith("stof: ") and captured.err.count("\n") == 1
    command = " ".join(["stof", *itertools.takewhile(str.isalpha, call)]).removesuffix(" nothing")
    next_step = f"; `{command} --help` says how it is called"
    assert captured.err.endswith(f"{next_step}\n")
    status, body = json_of(capsys, *call)
    assert status == 2 and body["error"].endswith(next_step) and set(body) == {"error", "kind"}


def test_errors_are_one_message(capsys, tmp_path, monkeypatch):
    status, body = json_of(capsys, "explain", tmp_path)
    assert status == 2 and body["kind"] == "StofPlanError" and str(tmp_path) in body["error"]

    def fail(*given):
        raise StofUnsupportedError("no such thing here")

    monkeypatch.setattr("stof_compile.demo.run_demo", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "stof: no such thing here\n"

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stof_compile.demo.run_demo", full)
    assert main(["demo"]) == 1
    assert "No space left" in capsys.readouterr().err

    def mistake(*given):
        raise ValueError("a mistake of ours keeps its traceback")

    monkeypatch.setattr("stof_compile.demo.run_demo", mistake)
    with pytest.raises(ValueError, match="of ours"):
        main(["demo"])


def test_json_is_alone_on_stdout(capfd):
    with output(True) as out:
        print("a library prints")
        os.write(1, b"a compiler prints\n")
        out.console.print("progress")
        out.say("for people")
        out.result = {"n": 1}
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"n": 1}
    for words in ("a library", "a compiler", "progress"):
        assert words in captured.err
    assert "for people" not in captured.err
    with output(False) as out:
        out.say("for people")
    assert capfd.readouterr().out == "for people\n"


def test_json_has_no_nan(capsys):
    with output(True) as out:
        out.result = {"a": [float("nan"), 1.5], "b": {"c": float("inf"), "d": (float("-inf"), 2)}}
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"a": [None, 1.5], "b": {"c": None, "d": [None, 2]}}
    assert "NaN" not in printed and "Infinity" not in printed


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break in another way there")
@pytest.mark.parametrize(
    "call, status",
    [
        (["cache", "ls"], 141),
        (["cache", "ls", "--json"], 141),
        (["--help"], 141),
        (["--version"], 141),
        (["explain", "nothing-here", "--json"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nobody_reads_to_the_end(tmp_path, call, status):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "stof_compile.cli", *call],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    os.close(writer)
    assert done.returncode == status
    assert re.fullmatch(r"(stof: [^\n]+\n)?", done.stderr)


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

sys.meta_path.insert(0, Refuse())
from stof_compile.cli import main
print(main(["doctor"]), main(["cache", "ls"]))
"""


def test_without_torch():
    done = python(WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 1"
    assert "torch cannot be imported" in done.stdout and "pip install 'torch" in done.stdout
    assert "`stof doctor`" in done.stderr


# -- doctor ---------------------------------------------------------------------------------------


@pytest.fixture
def not_measured(monkeypatch):
    monkeypatch.setattr("stof_compile.cli.doctor.measured_ceilings", lambda *device: (10.0, 1.0))


def test_doctor_names_what_is_here(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for words in ("cpu: ", "GB/s", "C++ compiler", "ptxas", "transformers", "inductor", "stof"):
        assert words in printed


def test_doctor_for_programs(capsys, not_measured):
    status, body = json_of(capsys, "doctor")
    assert status == 0 and body["works"]
    assert body["versions"]["torch"] == torch.__version__
    assert body["devices"][0]["copy_gb_s"] == 10.0
    tool = next(tool for tool in body["tools"] if tool["name"] == "C++ compiler")
    assert Path(tool["found"].split()[0]).name
    assert [cache["name"] for cache in body["caches"]] == ["stof", "inductor", "triton", "tilelang"]


def test_doctor_says_what_stops_stof_and_how_to_get_it(capsys, not_measured, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "problem: C++ compiler is missing" in printed and "apt install g++" in printed
    assert "STOF cannot work here" in printed
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    status, body = json_of(capsys, "doctor")
    assert status == 1 and not body["works"]
    assert any("2.9.1 is too old" in problem["what"] for problem in body["problems"])
    assert any("pip install 'torch" in problem["fix"] for problem in body["problems"])


def test_doctor_remarks_on_what_only_costs_time(capsys, not_measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "remark: " in printed and "cannot be written to" in printed and "cache_dir" in printed
    assert "2.99.0 is newer" in printed
    assert "with less than it could" in printed


GPU = replace(
    device_facts("cpu"), kind="cuda", name="GPU", runtime="cuda 13.0", arch="sm_75",
    capability=(7, 5), memory_bytes=2**34,
)  # fmt: skip


def test_a_gpu_needs_more():
    needed = {tool.name: tool.fatal for tool in tools([device_facts("cpu"), GPU]) if tool.needed}
    assert needed["C compiler"] and needed["triton"] and needed["ptxas"]
    assert not needed["tilelang"] and not needed["nvcc"] and not needed["C++ compiler"]


def test_doctor_with_a_gpu(capsys, not_measured, monkeypatch):
    own = device_facts
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(
        "stof_compile.device.device_facts", lambda name: own(name) if name == "cpu" else GPU
    )
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere/ptxas")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "cuda:0: GPU, cuda 13.0, sm_75" in printed and "16 GiB" in printed
    assert "problem: ptxas is missing" in printed and "TRITON_PTXAS_PATH" in printed
    assert "remark: GPU is sm_75, kernels need sm_80" in printed


def test_doctor_finds_a_gpu_that_torch_does_not_see(capsys, not_measured, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("stof_compile.cli.parts.NVIDIA_DRIVER", tmp_path)
    for built_for, words in ((None, "built without CUDA"), ("13.0", "CUDA_VISIBLE_DEVICES")):
        monkeypatch.setattr("torch.version.cuda", built_for)
        assert main(["doctor"]) == 0
        assert words in capsys.readouterr().out


def test_doctor_remarks_on_torch_without_bytecode(capsys, not_measured, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # where Python looks from now on
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert main(["doctor"]) == 0
    assert "bytecode" not in capsys.readouterr().out, "the next import writes it"
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "remark: torch's bytecode is missing" in printed and "none/" in printed
    status, body = json_of(capsys, "doctor")
    assert status == 0 and body["works"]
    (problem,) = (found for found in body["problems"] if "bytecode" in found["what"])
    assert "unset PYTHONDONTWRITEBYTECODE, or run once: python -m compileall" in problem["fix"]
    assert not problem["fatal"]


def test_supported_torch_is_that_of_the_project():
    text, least, below = supported_torch()
    (line,) = re.findall(
        r'^    "torch(>=.*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert sorted(line.split(",")) == sorted(text.removeprefix("torch").strip().split(","))
    assert line == f">={least[0]}.{least[1]},<{below[0]}.{below[1]}"


# -- demo, tune -----------------------------------------------------------------------------------


def test_choices_and_defaults_are_those_of_the_settings():
    assert tuple(mask.value for mask in runs.Mask) == MASKS
    assert tuple(dtype.value for dtype in runs.Dtype) == DTYPES
    assert (None, *(mode.value for mode in runs.Mode)) == MODES
    assert tuple(zoo.ZOO) == runs.MODELS
    demo = {name: p.default for name, p in inspect.signature(runs.demo).parameters.items()}
    tune = {name: p.default for name, p in inspect.signature(runs.tune).parameters.items()}
    assert (demo["tokens"], demo["dump_dir"]) == (DemoSettings.tokens, DemoSettings.dump_dir)
    settings = TuneSettings("")
    assert (tune["mask"].value, tune["budget"]) == (settings.mask, settings.budget_s)
    for name in ("batch", "seq", "dtype", "device", "mode", "out", "dump_dir", "seed"):
        assert tune[name] == getattr(settings, name), name


def test_demo_refuses_bad_input(capsys, tmp_path):
    assert main(["demo", "--device", "cpu", "--tokens", "3"]) == 2
    assert "at least 16 tokens" in capsys.readouterr().err
    assert main(["demo", "--device", "tpu"]) == 2
    assert "cpu or cuda" in capsys.readouterr().err
    assert main(["demo", "--device", "cpu", "--model", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_demo_for_programs(capsys, monkeypatch, tmp_path):
    asked = []

    def run(settings, console):
        asked.append(settings)
        console.print("loading")
        row = Row("STOF", 2.0, Timing(5.0, 4.0, 6.0, 7, "clock"), ErrorReport(1e-6, 1e-7, True))
        return DemoResult((row,), Explanation(()), settings.dump_dir)

    monkeypatch.setattr("stof_compile.demo.run_demo", run)
    status, body = json_of(capsys, "demo", "--tokens", 64, "--dump-dir", tmp_path)
    assert status == 0 and body["dump"] == str(tmp_path)
    assert body["rows"][0]["median_us"] == 5.0 and body["rows"][0]["max_error"] == 1e-6
    assert asked == [DemoSettings(tokens=64, dump_dir=tmp_path)]


def test_tune_saves_a_plan(capsys, tmp_path, fresh_dynamo, monkeypatch):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", lambda gm, *_: gm.forward)
    out = tmp_path / "plan.json"
    call = ["tune", "--model", "bert-tiny", "--batch", "2", "--seq", "32", "--mask", "bigbird"]
    call += ["--device", "cpu", "--budget", "0", "--out", str(out)]
    assert main(call) == 0
    assert "attention: 2x" in capsys.readouterr().out
    (plan,) = PlanFile.from_json(out.read_text()).plans
    assert plan.attention
    out.unlink()
    torch._dynamo.reset()
    status, body = json_of(capsys, *call)
    assert status == 0 and body["plan"] == str(out) and out.is_file()
    assert [len(graph["sites"]) for graph in body["graphs"]] == [2]


def test_tune_refuses_bad_input(capsys):
    assert main(["tune", "--model", "bert-bass"]) == 2
    assert "no such model; give a model of the zoo" in capsys.readouterr().err
