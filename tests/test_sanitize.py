"""The runner for compute-sanitizer: it knows every kernel, and reads what the tool prints."""

import ast
import itertools
import os
import re
import stat
import sys
from pathlib import Path

import pytest
import sanitize
from sanitize_tool import (
    FOUND,
    Plan,
    Verdict,
    command_of,
    find_tool,
    read_csv,
    run_under,
    verdict_of,
)

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"


@pytest.fixture(scope="module")
def cases():
    pytest.importorskip("triton")
    return sanitize.all_cases()


# -- every kernel has a case ----------------------------------------------------------------------


def imports_of(module):
    """Modules of ``kernels/`` that one imports, also inside of its functions."""
    tree = ast.parse((KERNELS / f"{module}.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def decorated(module):
    """Whether a module holds device code: functions of Triton, Gluon or TileLang."""
    text = (KERNELS / f"{module}.py").read_text(encoding="utf-8")
    return bool(re.search(r"^ *@(triton\.jit|gluon\.jit|T\.prim_func)", text, re.MULTILINE))


def reached(modules):
    known, new = set(), set(modules)
    while new:
        known |= new
        new = set().union(*map(imports_of, new)) - known
    return known


def test_every_launcher_and_all_device_code_has_a_case(cases):
    modules = [file.stem for file in KERNELS.glob("*.py") if file.stem != "__init__"]
    starts = re.compile(r"^KERNELS = |^ +(return |repeat = )?launch\(", re.MULTILINE)
    launchers = {m for m in modules if starts.search((KERNELS / f"{m}.py").read_text())}
    launchers -= {"attention_cpu"}
    covered = {case.launcher for case in cases}
    assert {"attention_hopper", "hopper_linear", "tilelang_chain", "norm"} <= launchers
    assert launchers <= covered, f"no case in tests/sanitize_*.py: {launchers - covered}"
    assert covered <= set(modules)
    device_code = {module for module in modules if decorated(module)}
    assert len(device_code) > 15
    left = device_code - reached(covered)
    assert not left, f"no launcher with a case in tests/sanitize_*.py imports {left}"


def test_names_are_unique_and_can_be_asked_for(cases):
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)
    assert {case.needs for case in cases} == {"", "gpu", "hopper", "tilelang", "e4m3"}
    assert sanitize.chosen(cases, "") == list(cases)
    found = [case.name for case in sanitize.chosen(cases, "norm-,block-band")]
    assert "block-band" in found and "norm-layer" in found and "linear-norm-plane" not in found
    with pytest.raises(SystemExit, match="no such case: nrom"):
        sanitize.chosen(cases, "nrom")


def test_copies_keep_strides(cases):
    import torch
    from sanitize_case import _there

    for tensor in (torch.arange(24.0).view(4, 6)[1:, :5].t(), torch.zeros(0, 3), torch.ones(())):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sanitize_case.INTERPRETED", False)
            patch.setattr(torch.Tensor, "cuda", lambda self: self.clone())
            copy = _there(tensor)
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()


# -- what the tool prints -------------------------------------------------------------------------

OK = "========= COMPUTE-SANITIZER\nok    norm-layer 0.52 s\n"
CLEAN = f"{OK}========= ERROR SUMMARY: 0 errors\n"
REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at norm_rows_kernel+0x1d0 in norm_kernel.py:44
=========     by thread (3,0,0) in block (1,0,0)
ok    norm-layer 0.52 s
========= ERROR SUMMARY: 3 errors
"""
RACES = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)\n"
UNABLE = "========= Unsupported instruction in kernel hopper_linear_kernel\n"


@pytest.mark.parametrize(
    ("output", "code", "errors", "verdict", "detail"),
    [
        (CLEAN, 0, "0", "clean", ""),
        (REPORT, FOUND, "3", "3 errors", "Invalid __global__ read of size 2 bytes | at norm_rows"),
        (REPORT.replace("3 errors", "1 error"), FOUND, "1", "1 errors", "Invalid"),
        (OK + RACES.format(0, 0, 0), 0, "0", "clean", ""),
        (OK + RACES.format(2, 2, 0), FOUND, "2", "2 errors", ""),
        (OK + RACES.format(2, 0, 2), 0, "0", "2 warnings", ""),
        (UNABLE + CLEAN, 0, "0", "unsupported", "Unsupported instruction"),
        ("========= Error: Device not supported\n", 1, "0", "unsupported", "Error: Device not"),
        (UNABLE + REPORT, FOUND, "3", "3 errors", ""),
        ("skip  norm-layer: needs a Hopper GPU\n", 0, "", "skipped", "needs a Hopper GPU"),
        (CLEAN.replace("ok    ", "FAIL  "), 1, "0", "failed", "exit code 1: wrong result"),
        (CLEAN.replace("norm-layer", "norm-rms"), 0, "0", "failed", "exit code 0"),
        (OK, 0, "", "failed", "no summary"),
        ("Segmentation fault\n", 139, "", "failed", "exit code 139: Segmentation fault"),
        ("", 1, "", "failed", "exit code 1: no output"),
    ],
)
def test_verdicts(output, code, errors, verdict, detail):
    found = verdict_of(output, code, "norm-layer")
    assert found[:2] == (errors, verdict) and detail in found[2]


# -- processes ------------------------------------------------------------------------------------

FAKE = """#!{python}
import os, sys, time
arguments = sys.argv[1:]
case = arguments[arguments.index("--only") + 1]
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
with open(os.environ["SEEN"], "a") as file:
    file.write(" ".join(arguments) + "\\n")
if case == "slow":
    time.sleep(600)
print("========= COMPUTE-SANITIZER")
if case == "bad":
    print("========= Invalid __shared__ write of size 4 bytes")
print(f"ok    {{case}} 0.10 s")
print(f"========= ERROR SUMMARY: {{2 * (case == 'bad')}} errors")
sys.exit(99 if case == "bad" else 0)
"""


@pytest.fixture
def fake(tmp_path):
    """An environment in which compute-sanitizer is a script that believes everything."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "CUDA_HOME": str(tmp_path), "PATH": "", "SEEN": str(tmp_path / "seen")}


def plan(tmp_path, **changes):
    given = {"tools": ("memcheck",), "csv": tmp_path / "found.csv", "warm": False, "jobs": 2}
    return Plan(**{**given, **changes})


def test_a_process_for_each_case_and_a_row_for_each(fake, tmp_path, capsys):
    both = plan(tmp_path, tools=("memcheck", "initcheck"), logs=tmp_path / "logs")
    ticks = itertools.count()
    assert run_under(both, ["good", "bad"], fake, lambda: float(next(ticks))) == 2
    rows = read_csv(both.csv)
    verdicts = {(row.case, row.tool): (row.errors, row.verdict) for row in rows}
    assert verdicts == {
        ("good", "memcheck"): ("0", "clean"), ("good", "initcheck"): ("0", "clean"),
        ("bad", "memcheck"): ("2", "2 errors"), ("bad", "initcheck"): ("2", "2 errors"),
    }  # fmt: skip
    assert "Invalid __shared__ write" in (tmp_path / "logs" / "memcheck-bad.txt").read_text()
    printed = capsys.readouterr().out
    assert "memcheck   1 clean, 1 with errors" in printed
    commands = (tmp_path / "seen").read_text().splitlines()
    assert len(commands) == 4
    for command in commands:
        assert f"--error-exitcode {FOUND} --launch-timeout 0" in command
        assert command.endswith("--no-poison") == ("--tool initcheck" in command)


def test_kernels_are_compiled_before_the_tool_runs(fake, tmp_path, monkeypatch, capsys):
    started = []

    def process(command, environment, limit_s):
        assert "TRITON_INTERPRET" not in environment
        started.append(command)
        if "--tool" not in command:
            return "Traceback\nFAIL  b 0.1 s\n", 1
        return f"ok    {command[command.index('--only') + 1]} 0.1 s\n{CLEAN}", 0

    monkeypatch.setattr("sanitize_tool.run_process", process)
    fake = {**fake, "TRITON_INTERPRET": "1"}
    assert run_under(plan(tmp_path, warm=True), ["a", "b", "c"], fake, lambda: 0.0) == 0
    compiling, under = started[:2], started[2:]
    assert sorted(command[-1] for command in compiling) == ["a,c", "b"]
    assert all("--tool" in command for command in under) and len(under) == 3
    assert "without a tool: FAIL  b" in capsys.readouterr().out


def test_it_goes_on_where_it_was_ended(fake, tmp_path, capsys):
    first = plan(tmp_path, budget_s=1.5, jobs=1)
    ticks = itertools.count()
    assert run_under(first, ["good", "other"], fake, lambda: float(next(ticks))) == 0
    assert "1 of 2 runs are left" in capsys.readouterr().out
    again = plan(tmp_path, resume=True)
    assert run_under(again, ["good", "other"], fake, lambda: 0.0) == 0
    assert [row.case for row in read_csv(first.csv)] == ["good", "other"]
    assert "memcheck   2 clean" in capsys.readouterr().out


def test_a_case_that_takes_too_long_is_ended_and_tried_again(fake, tmp_path):
    short = plan(tmp_path, limit_s=0.3, resume=True)
    for runs in (1, 2):
        assert run_under(short, ["slow"], fake, lambda: 0.0) == 1
        rows = read_csv(short.csv)
        assert [row.verdict for row in rows] == ["timeout"] * runs
    assert isinstance(rows[0], Verdict) and not rows[0].settled


def test_options_of_the_tool_can_be_changed(fake, tmp_path):
    program = find_tool(fake)
    usual = command_of(plan(tmp_path), program, "memcheck", "good")
    assert "--report-api-errors" in usual and "--kernel-regex" not in usual
    assert "--report-api-errors" not in command_of(plan(tmp_path), program, "racecheck", "good")
    changed = plan(tmp_path, flags=("--padding", "64"), kernel_regex="kns=norm", repeat=3)
    command = command_of(changed, program, "memcheck", "good")
    assert command[:7] == [program, "--tool", "memcheck", "--error-exitcode", "99", "--padding",
                           "64"]  # fmt: skip
    assert command[7:9] == ["--kernel-regex", "kns=norm"] and command[-2:] == ["--repeat", "3"]
    with pytest.raises(SystemExit, match="no such tool: leakcheck"):
        run_under(plan(tmp_path, tools=("leakcheck",)), ["good"], fake, lambda: 0.0)
    with pytest.raises(SystemExit, match="neither on PATH"):
        find_tool({"PATH": str(tmp_path)})


def test_the_command_line(cases, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds folders of its own
    assert sanitize.main(["--list", "--only", "hopper-linear-"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in listed] == ["hopper_linear"] * len(listed) and listed
    given = sanitize.options(["--under", "memcheck", "--jobs", "8", "--flags", "--padding 32"])
    assert (given.under, given.jobs, given.flags) == ("memcheck", 8, "--padding 32")


def test_failures_are_counted_and_the_others_run(monkeypatch, capsys, cases):
    from sanitize_case import Case

    ran = []

    def wrong():
        raise AssertionError("a wrong result")

    monkeypatch.setattr("sanitize_case.reason_to_skip", lambda case: case.needs)
    made = [Case("a", "norm", wrong), Case("b", "norm", lambda: ran.append(1)),
            Case("c", "norm", wrong, "a moon")]  # fmt: skip
    assert sanitize.run_here(made, repeat=2, poison=False) == 1
    assert len(ran) == 2
    words = [line[:5] for line in capsys.readouterr().out.splitlines()]
    assert words == ["FAIL ", "ok   ", "skip "]
