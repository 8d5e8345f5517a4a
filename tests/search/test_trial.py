"""Trials: measured once ever, shared by processes, failures included."""

import json
import logging
import math
import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from stof_compile.budget import Budget
from stof_compile.errors import StofUnsupportedError
from stof_compile.measure import ErrorReport, Timing
from stof_compile.search.trial import STORE_KIND, Trial, TrialTable
from stof_compile.store import Store

SEGMENT = "linear,bias,gelu|128x768x3072|float16"
CONFIG = {"block_m": 64, "block_n": 128, "warps": 4}
GOOD = ErrorReport(1e-4, 1e-5, True)


def timing(median_us):
    return Timing(median_us, median_us, median_us, 3, "clock")


def takes(median_us):
    return lambda: (GOOD, timing(median_us))


def raises(error):
    def run():
        raise error

    return run


def never():
    raise AssertionError("measured again")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, "gpu | torch 2.13")


def test_measured_once(store):
    table = TrialTable(store)
    trial = table.measure(SEGMENT, "gemm", CONFIG, takes(12.5))
    assert (trial.status, trial.median_us, trial.cost_us) == ("measured", 12.5, 12.5)
    assert trial.config == (("block_m", 64), ("block_n", 128), ("warps", 4))
    assert table.measure(SEGMENT, "gemm", dict(reversed(CONFIG.items())), never) == trial
    assert (table.measured, table.reused) == (1, 1)
    later = TrialTable(store)
    assert later.measure(SEGMENT, "gemm", CONFIG, never) == trial
    assert (later.measured, later.reused) == (0, 1)


def test_segment_template_config_and_environment_keep_trials_apart(store, tmp_path):
    table = TrialTable(store)
    table.measure(SEGMENT, "gemm", CONFIG, takes(1.0))
    assert table.known("another", "gemm", CONFIG) is None
    assert table.known(SEGMENT, "chain", CONFIG) is None
    assert table.known(SEGMENT, "gemm", {**CONFIG, "warps": 8}) is None
    assert TrialTable(Store(tmp_path, "gpu | torch 2.12")).known(SEGMENT, "gemm", CONFIG) is None
    table.measure(SEGMENT, "gemm", {"split": 1}, takes(1.0))
    assert table.known(SEGMENT, "gemm", {"split": True}) is None  # 1 == True, another config


@pytest.mark.parametrize(
    ("run", "status", "reason"),
    [
        (raises(StofUnsupportedError("needs N <= 512")), "refused", "needs N <= 512"),
        (raises(RuntimeError("out of registers")), "failed", "RuntimeError: out of registers"),
        (lambda: (ErrorReport(0.5, 0.1, False), None), "failed", "relative error 5.00e-01"),
        (lambda: (ErrorReport(math.inf, math.inf, False), None), "nan", "NaN or infinities"),
        (lambda: (ErrorReport(math.nan, math.nan, False), None), "nan", "NaN or infinities"),
        (takes(math.nan), "nan", "time nan us"),
    ],
    ids=["refused", "raised", "wrong", "infinite", "nan", "no time"],
)
def test_failures_are_trials_of_infinite_cost(store, run, status, reason):
    trial = TrialTable(store).measure(SEGMENT, "gemm", CONFIG, run)
    assert trial.status == status
    assert reason in trial.reason
    assert (trial.median_us, trial.cost_us) == (None, math.inf)
    later = TrialTable(store)
    assert later.measure(SEGMENT, "gemm", CONFIG, never) == trial
    assert later.best(SEGMENT) is None


def test_strict_raises_failures_and_records_refusals(store):
    table = TrialTable(store, strict=True)
    with pytest.raises(RuntimeError, match="broken"):
        table.measure(SEGMENT, "gemm", CONFIG, raises(RuntimeError("broken")))
    assert table.known(SEGMENT, "gemm", CONFIG) is None
    refusal = raises(StofUnsupportedError("no"))
    assert table.measure(SEGMENT, "gemm", CONFIG, refusal).status == "refused"


def test_out_of_memory_holds_for_this_process_only(store):
    table = TrialTable(store)
    table.measure(SEGMENT, "gemm", CONFIG, raises(torch.OutOfMemoryError("full")))
    assert table.measure(SEGMENT, "gemm", CONFIG, never).status == "failed"
    table.measure(SEGMENT, "gemm", {"warps": 2}, takes(3.0))
    later = TrialTable(store)
    assert later.known(SEGMENT, "gemm", {"warps": 2}) is not None
    assert later.measure(SEGMENT, "gemm", CONFIG, takes(2.0)).median_us == 2.0


def test_failures_after_a_device_fault_hold_for_this_process_only(store):
    table = TrialTable(store)
    fault = torch.AcceleratorError("illegal memory access")
    table.measure(SEGMENT, "gemm", {"warps": 1}, raises(fault))
    table.measure(SEGMENT, "gemm", {"warps": 2}, raises(fault))
    later = TrialTable(store)
    assert later.known(SEGMENT, "gemm", {"warps": 1}).status == "failed"  # the one to blame
    assert later.known(SEGMENT, "gemm", {"warps": 2}) is None


def test_best_and_trials(store):
    table = TrialTable(store)
    assert table.best(SEGMENT) is None
    for warps, us in ((1, 9.0), (2, 4.0), (4, 6.0)):
        table.measure(SEGMENT, "gemm", {"warps": warps}, takes(us))
    table.measure(SEGMENT, "chain", {}, raises(RuntimeError("no")))
    assert table.best(SEGMENT).config == (("warps", 2),)
    assert [t.status for t in table.trials(SEGMENT)] == ["failed", *["measured"] * 3]
    TrialTable(store).measure(SEGMENT, "gemm", {"warps": 8}, takes(3.0))
    assert table.best(SEGMENT).median_us == 3.0  # measured by another table


def test_budget_counts_what_is_measured(store):
    table = TrialTable(store)
    budget = Budget(1.0, clock=lambda: 0.0, trials=2)
    table.measure(SEGMENT, "gemm", {"warps": 1}, takes(9.0), budget)
    table.measure(SEGMENT, "gemm", {"warps": 1}, never, budget)
    assert not budget.spent
    table.measure(SEGMENT, "gemm", {"warps": 2}, raises(RuntimeError("no")), budget)
    assert budget.spent


def test_without_a_store():
    table = TrialTable(None)
    table.measure(SEGMENT, "gemm", CONFIG, takes(2.0))
    assert table.measure(SEGMENT, "gemm", CONFIG, never).median_us == 2.0
    assert table.best(SEGMENT).median_us == 2.0


@pytest.mark.parametrize("strange", [{"status": "great"}, {"median_us": None}, {"config": 3}])
def test_trial_round_trip_and_refusal(strange):
    trial = Trial(SEGMENT, "gemm", (("warps", 4),), "measured", 2.0, 1e-4)
    text = json.dumps(trial.to_dict(), allow_nan=False)
    assert Trial.from_dict(SEGMENT, json.loads(text)) == trial
    with pytest.raises((ValueError, TypeError, AttributeError)):
        Trial.from_dict(SEGMENT, {**trial.to_dict(), **strange})


@pytest.mark.parametrize("broken", ["cut", "other value", "other trials"])
def test_corrupt_file_is_a_warning_and_a_miss(store, tmp_path, caplog, broken):
    TrialTable(store).measure(SEGMENT, "gemm", CONFIG, takes(2.0))
    (file,) = tmp_path.glob("*/*/*.json")
    if broken == "cut":
        file.write_text(file.read_text()[:40])
    elif broken == "other value":
        store.put(STORE_KIND, SEGMENT, {"candidates": []})
    else:
        store.put(STORE_KIND, SEGMENT, {"trials": [{"template": "gemm"}]})
    table = TrialTable(store)
    with caplog.at_level(logging.WARNING, "stof_compile"):
        assert table.measure(SEGMENT, "gemm", CONFIG, takes(3.0)).median_us == 3.0
    assert "ignored" in caplog.text
    assert TrialTable(store).measure(SEGMENT, "gemm", CONFIG, never).median_us == 3.0


def test_folder_that_cannot_be_written_costs_time_only(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    table = TrialTable(Store(blocked / "cache", "here"))
    assert table.measure(SEGMENT, "gemm", CONFIG, takes(3.0)).median_us == 3.0
    assert table.measure(SEGMENT, "gemm", CONFIG, never).median_us == 3.0
    assert "cannot be written" in caplog.text


def _measure_all(root, runs, order):
    table = TrialTable(Store(Path(root), "here"))
    for warps in order:

        def run(warps=warps):
            with open(runs, "a") as file:
                file.write(f"{warps}\n")
            time.sleep(0.01)
            return GOOD, timing(100.0 + warps)

        table.measure(SEGMENT, "gemm", {"warps": warps}, run)
    assert table.best(SEGMENT).median_us == 100.0
    assert table.measured + table.reused == len(order)


def test_processes_share_a_table(tmp_path):
    runs = tmp_path / "runs"
    context = multiprocessing.get_context("fork")
    orders = [list(range(12)), list(range(11, -1, -1))]
    workers = [
        context.Process(target=_measure_all, args=(str(tmp_path / "cache"), str(runs), order))
        for order in orders
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(map(int, runs.read_text().split())) == list(range(12))  # each of them once
    assert len(TrialTable(Store(tmp_path / "cache", "here")).trials(SEGMENT)) == 12
