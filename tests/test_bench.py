"""Benchmarks of whole models: rows, resuming, summaries. No figure of these runs means anything."""

import csv
import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from side_by_side import only_once

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("compile-default", "flex-default", "stof-default", "stof-fusion")
RUN = {
    "t5-tiny": WAYS,  # three kinds of attention, a learned bias
    "llama-tiny": ("flex-default", "stof-attention"),  # fewer key heads
    "vit-tiny": ("compile-default", "flex-default", "stof-default"),  # no mask argument, ragged
}


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder, stdout and stderr of one process for all commands: it takes seconds to start.

    Test processes that work side by side share it.
    """
    folder, said = only_once(tmp_path_factory, "bench", run_all)
    return folder, *said


def run_all(folder):
    common = ["--device", "cpu", "--seed", "1", "--tune-budget", "0", "--caches", str(folder)]
    e2e = ["e2e", *common, "--smoke", "--out", str(folder / "e2e.csv")]
    e2e += ["--dump-dir", str(folder / "dumps")]
    tuning = ["tuning", *common, "--out", str(folder / "tuning.csv")]
    accuracy = ["accuracy", *common, "--smoke", "--out", str(folder / "accuracy.csv")]
    accuracy += ["--peers", "auto,rules"]
    commands = [
        *([*e2e, "--peers", ",".join(peers), "--worker", f"{m}/1x100"] for m, peers in RUN.items()),
        [*e2e, "--resume", "--cells", "1x100", "--model", "t5-base", "--peers", ",".join(WAYS)],
        ["report", str(folder / "e2e.csv")],
        [*tuning, "--repeats", "1", "--worker", "bert-tiny/1x64"],
        [*tuning, "--resume", "--models", "bert-tiny", "--cells", "1x64"],
        [*accuracy, "--worker", "bert-tiny/1x32"],
        [*accuracy, "--resume", "--model", "bert-base", "--cells", "1x32"],
        [*e2e, "--model", "bert-bass", "--resume"],
        [*e2e, "--peers", "nothing", "--resume"],
    ]
    script = ROOT / "tests" / "bench_without_inductor.py"
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(commands)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def test_every_cell_dumps_into_a_folder_of_its_own(ran):
    folder, _, _ = ran
    dumps = {path.parent.parent.name for path in folder.glob("dumps/*/graph_*/record.json")}
    assert dumps == {f"{m}-1x100-{p}" for m, names in RUN.items() for p in names if "stof" in p}


def test_whole_models_under_every_form_of_mask(ran):
    folder, stdout, stderr = ran
    rows = rows_of(folder / "e2e.csv")
    assert [(r["model"], r["peer"]) for r in rows] == [
        (model, way) for model, ways in RUN.items() for way in ways
    ]
    for row in rows:
        assert float(row["rms_rel"]) < 1e-6  # all compute one function
        assert float(row["floor_us"]) > 0
        assert (row["cell"], row["seq"]) == (
            "1x100",
            "101" if row["model"] == "vit-tiny" else "100",
        )
        if {"compile-default", "stof-default"} <= set(RUN[row["model"]]):
            tested = "x compile-default: " in row["detail"] and ", 2 rounds)" in row["detail"]
            assert tested == row["peer"].startswith("stof")
    assert "e2e on cpu: 0 cells to run" in stderr
    assert "STOF against the best peer, launches included: geometric mean" in stdout
    assert "t5-tiny 1x100" in stdout


def test_cost_of_tuning(ran):
    folder, _, stderr = ran
    (row,) = rows_of(folder / "tuning.csv")
    assert (row["model"], row["cell"], row["trials"]) == ("bert-tiny", "1x64", "0")
    assert 0 < float(row["tuning_s"]) < float(row["cold_s"])
    assert float(row["warm_extra_s"]) == pytest.approx(
        float(row["warm_s"]) - float(row["plain_warm_s"]), rel=0.01, abs=1e-3
    )
    assert "tuning on cpu: 0 cells to run" in stderr
    assert stderr.count("  bert-tiny/1x64 stof: ") == 2  # a cold process and, as asked, one more


def test_accuracy_beside_that_of_torch_compile(ran):
    folder, stdout, stderr = ran
    rows = rows_of(folder / "accuracy.csv")
    assert [(r["model"], r["cell"], r["setting"]) for r in rows] == [
        ("bert-tiny", "1x32", "auto"),
        ("bert-tiny", "1x32", "rules"),
    ]
    for row in rows:
        assert 0 < float(row["mean"]) < float(row["max"]) < 1e-5
        assert row["ok"] == "1" and float(row["max_ratio"]) <= 2.0
    assert "accuracy on cpu: 0 cells to run" in stderr
    assert "2 of 2 within 2x of torch.compile's own distance from fp64" in stdout


def test_unknown_names_are_refused(ran):
    _, _, stderr = ran
    assert "refused: no model 'bert-bass' in the zoo; did you mean 'bert-base'" in stderr
    assert "refused: no way nothing; ways: compile-default" in stderr


# -- summaries -------------------------------------------------------------------------------------


def row(model, cell, peer, graph_us, median_us):
    return {
        "model": model, "cell": cell, "seq": cell.split("x")[1], "peer": peer,
        "graph_us": str(graph_us), "median_us": str(median_us), "floor_us": "50",
        "device": "NVIDIA H200", "torch": "2", "transformers": "5", "stof": "0", "mask": "bigbird",
        "dtype": "float16", "rms_rel": "0.001", "compile_s": "3",
    }  # fmt: skip


ROWS = [
    row("bert-base", "1x128", "compile-default", 200, 900),
    row("bert-base", "1x128", "compile-ro", "", 300),
    row("bert-base", "1x128", "compile-max-autotune", 180, 950),
    row("bert-base", "1x128", "flex-default", 160, 800),
    row("bert-base", "1x128", "stof-default", 100, 700),
    row("bert-base", "1x128", "stof-ro", "", 150),
    row("bert-base", "1x128", "stof-fusion", 90, 100),
    row("gpt2", "8x512", "compile-default", 400, 500),
    row("gpt2", "8x512", "stof-default", 100, 1000),
]


@pytest.fixture
def stats(bench_path):
    import e2e_stats

    return e2e_stats


def test_best_times_of_a_cell(stats):
    first, second = stats.compare(ROWS, stats.replayed)
    assert first.cell == "bert-base 1x128"
    assert first.peers == {"torch.compile": 180.0, "expert flex": 160.0}
    assert (first.stof, first.best_ratio) == (100.0, 1.6)  # the ablation does not count
    assert second.best_ratio == 4.0  # FlexAttention has no row there
    (launched, _) = stats.compare(ROWS, stats.launched)
    assert launched.peers["torch.compile"] == 300.0 and launched.stof == 150.0


def test_means_and_the_worst_cell(stats):
    text = stats.e2e_summary(ROWS)
    assert "STOF against the best peer, graph replay: geometric mean 2.53x over 2 cells" in text
    assert "worst 1.60x in bert-base 1x128" in text
    assert "launches included: geometric mean 1.00x over 2 cells, worst 0.50x in gpt2 8x512" in text
    assert "nan" not in text


# -- several GPUs ---------------------------------------------------------------------------------


@pytest.fixture
def driver(bench_path):
    import driver

    return driver


def given(tmp_path, **changed):
    given = {"command": "e2e", "gpus": 2, "budget": 100.0, "cell_timeout": 9.0}
    return Namespace(**{**given, "out": tmp_path / "rows.csv", "caches": tmp_path, **changed})


def test_cells_run_side_by_side_each_on_a_gpu(driver, tmp_path, monkeypatch):
    """Three cells on two GPUs: the one that is done first takes the third."""
    seen, both = [], threading.Barrier(2)

    def run(args, unit, limit_s, gpu):
        seen.append((unit.name, gpu))
        if unit.name != "c":
            both.wait(10)  # only if they run at the same time
        return int(unit.name == "b")

    monkeypatch.setattr(driver, "run_unit", run)
    units = [driver.Unit(name, 1) for name in "abc"]
    assert driver.run_units(given(tmp_path), units, time.monotonic()) == 1
    assert sorted(name for name, _ in seen) == ["a", "b", "c"]
    assert {gpu for _, gpu in seen[:2]} == {0, 1}


def test_what_the_budget_leaves_is_told(driver, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(driver, "run_unit", None)
    units = [driver.Unit(name, 1) for name in "abc"]
    assert driver.run_units(given(tmp_path, budget=10.0), units, time.monotonic()) == 0
    assert "3 cells left; run again with --resume" in capsys.readouterr().err
    (line,) = rows_of(tmp_path / "rows.log.csv")
    assert (line["cell"], line["reason"]) == ("a", "budget spent before this cell and 2 more")


def test_workers_side_by_side_share_no_gpu_core_or_cache(driver, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7}, raising=False)
    places = [driver.worker_environment(given(tmp_path), gpu) for gpu in (0, 1)]
    assert [p["CUDA_VISIBLE_DEVICES"] for p in places] == ["4", "6"]
    assert [p[driver.CORES] for p in places] == ["2,5", "3,7"]
    names = "grid peers device kernel axes model seed length tune_budget dump_dir samples repeats"
    names += " turn_seconds dtype sweep smoke compile_together"
    args = given(tmp_path, **dict.fromkeys(names.split()))
    caches = [driver.worker_command(args, "cell", gpu) for gpu in (0, 1, None)]
    found = [command[command.index("--caches") + 1] for command in caches]
    assert found == [str(tmp_path / "gpu0"), str(tmp_path / "gpu1"), str(tmp_path)]


@pytest.mark.parametrize(("gpus", "words"), [(0, "from 1 to"), (-1, "from 1 to"), (2, "on cuda")])
def test_a_number_of_gpus_that_cannot_be(driver, tmp_path, gpus, words):
    args = given(tmp_path, gpus=gpus, device="cpu", smoke=False, grid=None, model=None)
    with pytest.raises(SystemExit, match=words):
        driver.settle(Namespace(**vars(args), dump_dir=None, seed=1, warm=0))


def test_rows_of_workers_side_by_side_have_one_header(driver, tmp_path):
    from results import append_row

    out = tmp_path / "rows.csv"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: append_row(out, ("cell", "time"), {"cell": n}), range(40)))
    assert sorted(int(r["cell"]) for r in rows_of(out)) == list(range(40))


def test_what_would_only_repeat_itself_is_not_run_again(driver, tmp_path):
    from e2e import e2e_units
    from results import log_event, settled_lines

    args = given(tmp_path, cells="1x128", device="cpu", smoke=False, model="t5-base", peers=None)
    args.dtype = None
    where = (args.out, "t5-base/1x128")
    left = dict(e2e_units(args))["t5-base/1x128"]
    log_event(
        *where, "flex-default", "t5-base", "error", "InductorError: ValueError: not comparable"
    )
    log_event(*where, "compile-default", "t5-base", "error", "OutOfMemoryError: another's")
    log_event(*where, "stof-default", "t5-base", "error", "InductorError: ours to mend")
    assert [row["peer"] for row in settled_lines(args.out)] == ["flex-default"]
    assert dict(e2e_units(args))["t5-base/1x128"] == left - 1


def test_a_file_has_models_of_one_dtype(driver, tmp_path):
    from e2e import FIELDS, e2e_units
    from results import append_row

    args = given(tmp_path, cells="1x128", device="cpu", smoke=False, model="t5-base", peers=None)
    args.dtype = None
    named = {"model": "t5-base", "cell": "1x128", "peer": "flex-default", "dtype": "float32"}
    append_row(args.out, FIELDS, named)
    assert len(e2e_units(args)) == 1
    args.dtype = "bfloat16"
    with pytest.raises(SystemExit, match="rows of float32, asked for is bfloat16"):
        e2e_units(args)


def test_only_what_will_be_timed_is_compiled_ahead(driver, tmp_path, monkeypatch):
    import attention
    import torch
    from cases import GRIDS
    from peers import chosen_variants

    cell, compiled, device = GRIDS["smoke"][0], [], torch.device("cpu")
    every = [(v.peer, v.name) for v in chosen_variants(cell, device, [])]
    monkeypatch.setattr(attention.timing, "first_call", lambda *a: compiled.append(a))
    paths = attention.Paths(tmp_path / "rows.csv", tmp_path)
    attention.warm_cell(cell, device, paths, 1, done=every[1:])
    assert len(compiled) == 1 < len(every)


# -- columns ---------------------------------------------------------------------------------------


def command(*words):
    import run

    return run.parser().parse_args(words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda names: [n for n in names if n != "p80_us"], "it lacks p80_us. Move"),
        (lambda names: [*names, "speed"], "it has speed too many. Move"),
        (lambda names: ["old", *names[1:]], "it lacks cell; it has old too many. Move"),
        (lambda names: names[::-1], "they are in another order. Move"),
    ],
    ids=["missing", "unknown", "both", "order"],
)
def test_a_file_with_other_columns_ends_the_command_before_it_measures(
    driver, tmp_path, monkeypatch, change, words
):
    import density
    import paper
    from attention import FIELDS

    out = tmp_path / "attention-cpu.csv"
    out.write_text(",".join(change(list(FIELDS))) + "\n")
    for module in (driver, paper):
        monkeypatch.setattr(module, "run_command", None)
    args = ["attention", "--grid", "smoke,quick", "--device", "cpu", "--out", str(out), "--resume"]
    with pytest.raises(SystemExit, match=words) as refused:
        driver.drive(command(*args))
    assert str(out) in str(refused.value) and "--out" in str(refused.value)
    (tmp_path / "density-cpu.csv").write_text(",".join(density.FIELDS) + "\n")  # a part before it
    args = ["paper", "--quick", "--device", "cpu", "--out", str(tmp_path), "--resume"]
    with pytest.raises(SystemExit, match=words):
        driver.drive(command(*args))


def test_a_log_with_other_columns_ends_the_command_too(driver, tmp_path):
    (tmp_path / "rows.log.csv").write_text("cell,text\n")
    args = command("density", "--device", "cpu", "--out", str(tmp_path / "rows.csv"), "--resume")
    with pytest.raises(SystemExit, match=r"rows\.log\.csv.* lacks peer, variant, kind, reason"):
        driver.drive(args)


def test_every_command_with_rows_has_columns(driver, tmp_path):
    from columns import check_columns
    from run import COMMANDS

    out = tmp_path / "rows.csv"
    for name in set(COMMANDS) - {"report", "page", "paper"}:
        for sweep in (False, True)[: 1 + (name == "attention")]:
            check_columns(Namespace(command=name, sweep=sweep, out=out))  # there is no file yet
    out.write_text("")
    check_columns(Namespace(command="mask", sweep=False, out=out))


def test_a_log_names_no_folder_of_this_machine(bench_path, tmp_path):
    import results

    out = tmp_path / "rows.csv"
    reason = f'RuntimeError: no memory\n  File "{ROOT}/bench/attention.py", line 1, in measure'
    results.log_event(out, "1x128", "stof", "option", "error", reason, loud=False)
    (row,) = rows_of(results.log_path(out))
    assert 'File "bench/attention.py", line 1' in row["reason"] and str(ROOT) not in row["reason"]
