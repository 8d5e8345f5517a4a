"""Runs every CUDA kernel on small ragged problems, alone or under NVIDIA's compute-sanitizer.

    python tests/sanitize.py --list
    python tests/sanitize.py --only block-bitmap,norm-layer --repeat 2
    python tests/sanitize.py --under memcheck,racecheck --csv sanitize.csv --jobs 8

The exit code is the number of cases that failed, of 100 at most; under a tool, of runs that were
neither clean nor skipped nor unsupported.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MOST = 100  # an exit code has eight bits


def options(arguments=None):
    """The command line, read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the cases and whether they can run here")
    add("--only", default="", metavar="NAME,...", help="these cases; 'norm-' takes all that begin")
    add("--repeat", type=int, default=1, metavar="N", help="run every case so many times")
    add("--no-poison", action="store_true", help="leave new memory as it is instead of NaN")
    under = parser.add_argument_group("under compute-sanitizer, a process for each case")
    add = under.add_argument
    add("--under", default="", metavar="TOOL,...", help="memcheck, racecheck, synccheck, initcheck")
    add("--csv", type=Path, default=Path("sanitize.csv"), help="where verdicts are added")
    add("--resume", action="store_true", help="leave out what the CSV has a verdict of")
    add("--jobs", type=int, default=4, metavar="N", help="processes at a time")
    add("--limit", type=float, default=120.0, metavar="SECONDS", help="of one case under a tool")
    add("--budget", type=float, default=0.0, metavar="SECONDS", help="start nothing later; 0: none")
    add("--logs", type=Path, help="folder for what the tool said about each case")
    add("--flags", help="options of compute-sanitizer in place of the usual ones, without --tool")
    add("--kernel-regex", default="", metavar="EXPRESSION",
        help="instrument these kernels only, as kns=attention; the usual is all: nearly nothing "
        "else runs on the GPU")  # fmt: skip
    add("--no-warm", action="store_true", help="skip the pass that compiles kernels before")
    return parser.parse_args(arguments)


def all_cases():
    """Every case; the lists are imported here, since they need Triton."""
    import sanitize_attention
    import sanitize_linear

    return sanitize_attention.CASES + sanitize_linear.CASES


def chosen(cases, only):
    """The cases whose name is given, or begins with a given word that ends with a hyphen."""
    wanted = [word for word in only.split(",") if word]
    if not wanted:
        return list(cases)

    def named(case, word):
        return case.name.startswith(word) if word.endswith("-") else case.name == word

    unknown = [word for word in wanted if not any(named(case, word) for case in cases)]
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; --list prints their names")
    return [case for case in cases if any(named(case, word) for word in wanted)]


def run_here(cases, repeat, poison):
    """Run cases in this process and print a line for each; returns how many failed."""
    from sanitize_case import reason_to_skip, run_case

    failed = 0
    for case in cases:
        reason = reason_to_skip(case)
        if reason:
            print(f"skip  {case.name}: {reason}", flush=True)
            continue
        start = time.perf_counter()
        try:
            for _ in range(repeat):
                run_case(case, poison)
            verdict = "ok   "
        except Exception:  # whatever went wrong: the other cases are run as well
            failed += 1
            verdict = "FAIL "
            traceback.print_exc()
        print(f"{verdict} {case.name} {time.perf_counter() - start:.2f} s", flush=True)
    return failed


def main(arguments=None):
    """Do what the command line asks for; returns the exit code."""
    given = options(arguments)
    for folder in ("templates", "kernels"):  # helpers of the tests, as pytest finds them
        sys.path.append(str(TESTS / folder))
    from sanitize_case import reason_to_skip

    cases = chosen(all_cases(), given.only)
    if given.list:
        for case in cases:
            reason = reason_to_skip(case)
            print(f"{case.name:32} {case.launcher:24}" + (f" skip: {reason}" if reason else ""))
        return 0
    if not given.under:
        return min(MOST, run_here(cases, given.repeat, not given.no_poison))
    from sanitize_tool import Plan, run_under

    plan = Plan(
        tools=tuple(word for word in given.under.split(",") if word),
        csv=given.csv,
        resume=given.resume,
        jobs=given.jobs,
        limit_s=given.limit,
        budget_s=given.budget,
        logs=given.logs,
        flags=None if given.flags is None else tuple(given.flags.split()),
        kernel_regex=given.kernel_regex,
        repeat=given.repeat,
        warm=not given.no_warm,
    )
    return min(MOST, run_under(plan, [case.name for case in cases], os.environ, time.monotonic))


if __name__ == "__main__":
    sys.exit(main())
