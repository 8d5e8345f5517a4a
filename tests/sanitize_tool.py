"""Runs cases of ``sanitize.py`` under compute-sanitizer: command lines, verdicts and their CSV."""

import csv
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Lock

SCRIPT = Path(__file__).resolve().parent / "sanitize.py"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 99
"""Exit code that the tool is asked to end with where it found something."""
FLAGS = ("--launch-timeout", "0", "--target-processes", "application-only", "--print-limit", "20")
FLAGS_OF = {
    # torch and Triton ask the driver for what it may not have; a launch that fails is an exception
    "memcheck": ("--report-api-errors", "no"),
}
SETTLED = ("clean", "unsupported", "skipped")


@dataclass(frozen=True)
class Plan:
    """What to run, and how.

    Args:
        tools: some of :data:`TOOLS`. csv: verdicts are appended to it. resume: what it has a
            verdict of is left out.
        jobs: processes at a time. limit_s: of one of them. budget_s: nothing starts later, 0 for
            no end; both in seconds.
        logs: folder for the tool's output, or None.
        flags: instead of the usual ones, or None. kernel_regex: kernels to instrument, "" for all.
        repeat: how often a process runs its case. warm: compile all kernels first.
    """

    tools: tuple[str, ...]
    csv: Path
    resume: bool = False
    jobs: int = 4
    limit_s: float = 120.0
    budget_s: float = 0.0
    logs: Path | None = None
    flags: tuple[str, ...] | None = None
    kernel_regex: str = ""
    repeat: int = 1
    warm: bool = True


@dataclass(frozen=True)
class Verdict:
    """A row of the CSV; ``errors`` is "" where the tool gave no number."""

    case: str
    tool: str
    errors: str
    seconds: str
    verdict: str
    detail: str

    @property
    def settled(self) -> bool:
        """Whether nothing is wrong, as far as the tool can see."""
        return self.verdict in SETTLED


def find_tool(environment: Mapping[str, str]) -> str:
    """The program's path, from PATH or a CUDA toolkit."""
    homes = (environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), "/usr/local/cuda")
    places = [environment.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        raise SystemExit("compute-sanitizer is neither on PATH nor in CUDA_HOME/bin")
    return found


def command_of(plan: Plan, program: str, tool: str, case: str) -> list[str]:
    """The command line of a case under a tool."""
    usual = (*FLAGS, *FLAGS_OF.get(tool, ()))
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += usual if plan.flags is None else plan.flags
    if plan.kernel_regex:
        command += ["--kernel-regex", plan.kernel_regex]
    command += [sys.executable, str(SCRIPT), "--only", case, "--repeat", str(plan.repeat)]
    # filling new memory would make all of it look written to
    return [*command, "--no-poison"] if tool == "initcheck" else command


# A line of the tool that speaks of itself, not of a kernel's error.
_UNABLE = re.compile(
    r"^=========(?!.*CUDA API call).*(unsupported|not supported|does not support|not implemented"
    r"|internal sanitizer|failed to (?:initialize|instrument|patch)|unable to)",
    re.IGNORECASE,
)
_ERRORS = re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?", re.MULTILINE)
_HAZARDS = re.compile(
    r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)",
    re.MULTILINE,
)
_REPORT = re.compile(r"^========= +(\S.*)$", re.MULTILINE)


def verdict_of(output: str, code: int, case: str) -> tuple[str, str, str]:
    """(errors, verdict, detail) of what the tool and the script under it printed.

    Clean needs both: a summary without errors, and the case's own line that its result was right.
    """
    lines = output.splitlines()
    skipped = next((line for line in lines if line.startswith(f"skip  {case}:")), None)
    if skipped is not None:
        return "", "skipped", skipped.partition(": ")[2]
    unable = [line.strip("= ") for line in lines if _UNABLE.match(line)]
    hazards, found = _HAZARDS.findall(output), _ERRORS.findall(output)
    errors = sum(int(e) for e, _ in hazards) or sum(int(number) for number in found)
    warnings = sum(int(w) for _, w in hazards)
    if unable and errors <= len(unable):
        return str(errors), "unsupported", unable[0]
    number = str(errors) if found or hazards else ""
    if errors or warnings:
        said = f"{errors} errors" if errors else f"{warnings} warnings"
        return number, said, first_report(output)
    if not any(line.startswith(f"ok    {case} ") for line in lines):
        wrong = next((line for line in lines if line.startswith(f"FAIL  {case} ")), "")
        last = lines[-1] if lines else "no output"
        return number, "failed", f"exit code {code}: {(wrong and 'wrong result') or last}"
    if not number:
        return "", "failed", f"exit code {code}, no summary of the tool"
    return number, "clean", ""


def first_report(output: str) -> str:
    """The first error that the tool describes, in one line, with its place."""
    told = [line.strip() for line in _REPORT.findall(output)]
    told = [line for line in told if line not in ("COMPUTE-SANITIZER",) and "SUMMARY" not in line]
    return " | ".join(told[:2])


def run_under(
    plan: Plan, cases: Sequence[str], environment: Mapping[str, str], clock: Callable[[], float]
) -> int:
    """Run cases under tools, append verdicts to the CSV and print them; returns the unsettled.

    Args:
        cases: names. environment: of the processes, and where the tool is looked for.
        clock: seconds, monotonic.
    """
    unknown = [tool for tool in plan.tools if tool not in TOOLS]
    if unknown:
        raise SystemExit(f"no such tool: {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    program, begin = find_tool(environment), clock()
    # with an allocation for each tensor, what is past its end belongs to nobody
    environment = {k: v for k, v in environment.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    before = read_csv(plan.csv) if plan.resume else []
    known = {(row.case, row.tool): row for row in before if row.verdict != "timeout"}
    todo = [pair for pair in itertools.product(cases, plan.tools) if pair not in known]
    lock = Lock()

    def late() -> bool:
        return bool(plan.budget_s) and clock() - begin > plan.budget_s

    def one(case: str, tool: str) -> Verdict | None:
        if late():
            return None
        start = clock()
        output, code = run_process(command_of(plan, program, tool, case), environment, plan.limit_s)
        if plan.logs is not None:
            plan.logs.mkdir(parents=True, exist_ok=True)
            (plan.logs / f"{tool}-{case}.txt").write_text(output)
        if code is None:
            errors, verdict, detail = "", "timeout", f"after {plan.limit_s:g} s"
        else:
            errors, verdict, detail = verdict_of(output, code, case)
        row = Verdict(case, tool, errors, f"{clock() - start:.1f}", verdict, detail)
        with lock:
            append_csv(plan.csv, row)
            print(f"{tool:10} {case:32} {row.seconds:>7} s  {verdict}", flush=True)
        return row

    with ThreadPoolExecutor(max(1, plan.jobs)) as pool:
        if plan.warm:
            _compile_all(plan, sorted({case for case, _ in todo}), environment, pool, late)
        done = list(pool.map(one, *zip(*todo, strict=True))) if todo else []
    rows = [row for row in known.values() if row.case in cases and row.tool in plan.tools]
    rows += [row for row in done if row is not None]
    print_table(rows, len(cases) * len(plan.tools))
    return sum(not row.settled for row in rows)


def _compile_all(plan, names, environment, pool, late):
    """Run the cases without the tool, a part of them in each process: Triton keeps what it built.

    What goes wrong is printed; the cases are run under the tool all the same.
    """
    parts = [names[start :: plan.jobs] for start in range(plan.jobs)]

    def compile_part(part: list[str]) -> None:
        if not part or late():
            return
        command = [sys.executable, str(SCRIPT), "--only", ",".join(part)]
        output, _ = run_process(command, environment, plan.limit_s * len(part))
        for line in output.splitlines():
            if not line.startswith(("ok    ", "skip  ")):
                print(f"without a tool: {line}", flush=True)

    list(pool.map(compile_part, parts))


def run_process(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> tuple[str, int | None]:
    """(output, exit code) of a process, None for one that was ended at its time limit."""
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=limit_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the script: a session of their own
        return process.communicate()[0], None


# -- verdicts -------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[Verdict]:
    """Rows written before; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [Verdict(**row) for row in csv.DictReader(file)]


def append_csv(path: Path, row: Verdict) -> None:
    """Add a row, and the names of the columns to a new file."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Verdict)])
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


def print_table(rows: Sequence[Verdict], wanted: int) -> None:
    """What is not clean, then how many of each verdict a tool gave."""
    for row in rows:
        if row.verdict != "clean":
            print(f"{row.tool:10} {row.case:32} {row.verdict}: {row.detail[:160]}")
    for tool in TOOLS:
        kinds = Counter(
            "with errors" if row.verdict.endswith(("errors", "warnings")) else row.verdict
            for row in rows
            if row.tool == tool
        )
        if kinds:
            print(f"{tool:10} " + ", ".join(f"{number} {kind}" for kind, number in kinds.items()))
    if len(rows) < wanted:
        print(f"{wanted - len(rows)} of {wanted} runs are left: --resume goes on with them")
