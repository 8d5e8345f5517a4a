"""``stof cache``: what is listed and deleted, and a tuning file that travels or is refused."""

import json
import multiprocessing
import os
import stat
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from stof_compile import fuse, verdict
from stof_compile.cli import main
from stof_compile.cli.environments import environments_here
from stof_compile.cli.stored_values import DESCRIPTIONS, in_words
from stof_compile.cli.tuning_file import TuningFile
from stof_compile.device import device_facts
from stof_compile.errors import StofPlanError
from stof_compile.plan import AttentionPlan, Candidate, ChainPlan, PackPlan, SegmentPlan
from stof_compile.search import learned, pack_choice, rope_choice, trial, tuner
from stof_compile.store import Store, entries, environment_key, environment_parts

OTHER = "GPU 9000 | cuda 13.0 | sm_90 | torch 2.11.0 | triton 3.6.0 | stof 0.0.9"
ATTENTION = AttentionPlan(
    "block",
    (64, 64, 4, 2),
    "measured",
    "fastest",
    (
        Candidate("sdpa", (), "measured", 9.0, 9.0, 9.0),
        Candidate("block", (64, 64, 4, 2), "measured", 3.5, 3.4, 3.6),
    ),
)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return environment_key(device_facts("cpu"))


@pytest.fixture
def filled(tmp_path, here):
    """A cache with three entries of this machine and one of another."""
    root = tmp_path / "cache"
    store = Store(root, here)
    store.put("attention", "problem", ATTENTION.to_dict())
    store.put("tuned", "graph one", {"trials": 12})
    store.put("tuned", "graph two", {"trials": 30})
    Store(root, OTHER).put("attention", "problem", {**ATTENTION.to_dict(), "kernel": "row"})
    return root


@pytest.fixture
def exported(filled, tmp_path, capsys):
    file = tmp_path / "tuning.json"
    assert main(["cache", "export", str(file), "--dir", str(filled)]) == 0
    assert "3 entries" in capsys.readouterr().out
    return file


def call(capsys, *words):
    """(exit code, stdout, stderr) of ``stof cache``."""
    status = main(["cache", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def json_of(capsys, *words):
    status, out, _ = call(capsys, *words, "--json")
    return status, json.loads(out)


def contents(root):
    return {path: path.read_bytes() for path in Path(root).rglob("*.json")}


# -- ls, show, clear ------------------------------------------------------------------------------


def test_nothing_stored(capsys, tmp_path):
    assert call(capsys, "ls", "--dir", tmp_path) == (0, f"nothing stored in {tmp_path}\n", "")
    assert json_of(capsys, "ls", "--dir", tmp_path)[1]["environments"] == []
    status, _, error = call(capsys, "show", "--dir", tmp_path)
    assert status == 2 and "tune a model first" in error


def test_ls(capsys, filled, here):
    status, out, _ = call(capsys, "ls", "--dir", filled)
    assert status == 0
    for words in ("here: cpu", "GPU 9000", "attention 1", "tuned 2", time.strftime("%Y-")):
        assert words in out
    _, body = json_of(capsys, "ls", "--dir", filled)
    own, other = body["environments"]
    assert (own["environment"], own["here"], own["entries"]) == (here, ["cpu"], 3)
    assert own["kinds"] == {"attention": 1, "tuned": 2}
    assert other["here"] == [] and other["parts"]["torch"] == "2.11.0"
    files = filled.glob("*/*/*.json")
    assert own["bytes"] + other["bytes"] == sum(file.stat().st_size for file in files)
    assert own["oldest"] <= own["newest"]


def test_show(capsys, filled, here):
    status, out, _ = call(capsys, "show", "--dir", filled)
    assert status == 0 and "block[64,64,4,2], 3.5 us" in out and "30 candidates" in out
    _, body = json_of(capsys, "show", "--dir", filled, "--environment", "gpu 9000")
    assert body["environment"] == OTHER
    (entry,) = body["entries"]
    assert (entry["kind"], entry["key"]) == ("attention", "problem")
    assert entry["best"].startswith("row")


def test_show_names_the_choices_where_words_fit_none_or_several(capsys, filled, here):
    status, _, error = call(capsys, "show", "--dir", filled, "--environment", "TPU")
    assert status == 2 and here in error and OTHER in error
    status, _, error = call(capsys, "show", "--dir", filled, "--environment", "stof 0")
    assert status == 2 and "fits 2 environments" in error


def test_what_another_format_left_is_shown_as_such(capsys, filled):
    for file in filled.glob("*/tuned-*/*.json"):
        file.write_text(file.read_text().replace('"format": ', '"format": 9'))
    _, body = json_of(capsys, "show", "--dir", filled)
    assert [entry["best"] for entry in body["entries"]].count("of another format, never read") == 2


def test_every_kind_has_words():
    modules = (learned, pack_choice, rope_choice, trial, tuner, verdict)
    kinds = {module.STORE_KIND for module in modules} | {fuse.TUNED_KIND, "attention"}
    assert set(DESCRIPTIONS) == kinds
    segment = SegmentPlan(0, 2, "triton_gemm", (("rows", 4),), 3.0, 5.0)
    chain = ChainPlan(("linear", "gelu"), "1", "0", (segment,), "measured", 1, 5.0, 3.0)
    tried = [
        trial.Trial("", "triton_gemm", (("rows", rows),), "measured", us).to_dict()
        for rows, us in ((4, 7.0), (8, 6.0))
    ]
    verdict_ = verdict.Verdict("fused", {"fused": 1.0, "attention only": 2.0})
    for kind, value, words in (
        ("chains", chain.to_dict(), ("linear gelu", "scheme 1", "3.0 us (rules: 5.0 us)")),
        ("rotations", chain.to_dict(), ("triton_gemm",)),
        ("trials", {"trials": tried}, ('{"rows": 8}', "6.0 us, best of 2")),
        ("packs", PackPlan(True, (4, 4), "measured", reason="1.2x").to_dict(), ("packed: 1.2x",)),
        ("graphs", asdict(verdict_), ("fused of:", "2.0 us")),
        ("learned", {"code": "3", "kinds": ["linear"]}, ("linear", "scheme 3")),
        ("learned", {"template": "t", "config": {"a": 1}}, ('t {"a": 1}',)),
    ):
        for word in words:
            assert word in in_words(kind, json.loads(json.dumps(value))), kind
    assert "unreadable" in in_words("attention", {"kernel": 1})
    assert in_words("of a later version", {}) == ""


def test_clear(capsys, filled):
    assert call(capsys, "clear", "--dir", filled)[1] == f"4 entries deleted in {filled}\n"
    assert json_of(capsys, "clear", "--dir", filled)[1]["entries"] == 0


# -- prune ----------------------------------------------------------------------------------------


def age(root, environment, days):
    for entry in entries(root):
        if entry.environment == environment:
            then = time.time() - days * 24 * 3600
            os.utime(entry.path, (then, then))


def test_prune_needs_to_know_what(capsys, filled):
    before = contents(filled)
    status, _, error = call(capsys, "prune", "--dir", filled)
    assert status == 2 and "--older-than" in error and contents(filled) == before


def test_prune_other_environments(capsys, filled, here):
    before = contents(filled)
    status, out, _ = call(capsys, "prune", "--other-environments", "--dry-run", "--dir", filled)
    assert status == 0 and "1 entries" in out and "would be deleted" in out and OTHER in out
    assert contents(filled) == before
    _, body = json_of(capsys, "prune", "--other-environments", "--dir", filled)
    assert (body["entries"], body["environments"], body["dry_run"]) == (1, [OTHER], False)
    assert {entry.environment for entry in entries(filled)} == {here}


@pytest.mark.parametrize(
    "options, left",
    [
        (["--older-than", "30"], 1),
        (["--older-than", "50"], 4),
        (["--older-than", "30", "--other-environments"], 4),
        (["--older-than", "0.5", "--other-environments"], 3),
    ],
    ids=["old", "none", "neither", "both"],
)
def test_prune_by_age(capsys, filled, here, options, left):
    age(filled, here, days=40)
    age(filled, OTHER, days=1)
    assert call(capsys, "prune", *options, "--dir", filled)[0] == 0
    assert len(list(entries(filled))) == left


# -- export, import -------------------------------------------------------------------------------


def test_a_tuning_file_travels(capsys, exported, tmp_path, here, filled):
    body = json.loads(exported.read_text())
    assert body["environment"] == {"key": here, **environment_parts(here)}
    assert body["stof_tuning_file"] == 1 and len(body["entries"]) == 3
    there = tmp_path / "there"
    status, out, _ = call(capsys, "import", exported, "--dir", there)
    assert status == 0 and "3 entries added, 0 replaced, 0 kept" in out
    assert Store(there, here).get("attention", "problem") == Store(filled, here).get(
        "attention", "problem"
    )
    assert {entry.environment for entry in entries(there)} == {here}


def test_what_is_there_is_kept_unless_told_otherwise(capsys, exported, tmp_path, here):
    there = Store(tmp_path / "there", here)
    there.put("tuned", "graph one", {"trials": 99})
    _, body = json_of(capsys, "import", exported, "--dir", there.root)
    assert (body["added"], body["replaced"], body["kept"]) == (2, 0, 1)
    assert there.get("tuned", "graph one") == {"trials": 99}
    _, body = json_of(capsys, "import", exported, "--dir", there.root, "--overwrite")
    assert (body["added"], body["replaced"], body["kept"]) == (0, 3, 0)
    assert there.get("tuned", "graph one") == {"trials": 12}


def test_another_environment_is_refused_with_the_difference(
    capsys, exported, tmp_path, monkeypatch
):
    made_with = torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    status, out, error = call(capsys, "import", exported, "--dir", tmp_path / "there")
    assert status == 1 and not out
    assert f"torch: {made_with} in the file, 2.12.1 here" in error
    assert "device" not in error and "nothing was imported" in error
    status, body = json_of(capsys, "import", exported, "--dir", tmp_path / "there")
    assert status == 1
    assert body["differences"] == [{"what": "torch", "file": made_with, "here": "2.12.1"}]
    assert not (tmp_path / "there").exists()


def test_all_differences_are_named(capsys, filled, tmp_path):
    file = tmp_path / "other.json"
    options = ("--environment", "9000", "--dir", filled)
    assert json_of(capsys, "export", file, *options)[1]["entries"] == 1
    _, body = json_of(capsys, "import", file, "--dir", filled)
    found = {difference["what"]: difference["file"] for difference in body["differences"]}
    assert found["device"] == "GPU 9000" and found["torch"] == "2.11.0" and found["stof"] == "0.0.9"
    TuningFile(OTHER, (), "now", store_format=1).write(file)
    _, body = json_of(capsys, "import", file, "--dir", filled)
    assert body["differences"][-1]["what"] == "format of entries"


def test_export_leaves_what_is_no_ordinary_file_alone(capsys, tmp_path, filled):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, _, said = call(capsys, "export", pipe, "--dir", filled)
    assert status == 2 and "no ordinary file" in said
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_others_may_read_a_tuning_file(exported):
    umask = os.umask(0)
    os.umask(umask)
    assert exported.stat().st_mode & 0o777 == 0o666 & ~umask


def test_export_of_nothing(capsys, tmp_path, filled):
    file = tmp_path / "none.json"
    status, _, error = call(capsys, "export", file, "--dir", tmp_path / "empty")
    assert status == 2 and "holds nothing" in error and not file.exists()
    status, _, error = call(capsys, "export", tmp_path, "--dir", filled)
    assert status == 2 and "is a folder" in error
    (tmp_path / "file").write_text("x")
    status, _, error = call(capsys, "export", tmp_path / "file" / "x.json", "--dir", filled)
    assert status == 2 and "cannot be written" in error


def cut(text):
    return text[: len(text) // 2]


def edited(text):
    return text.replace('"trials": 12', '"trials": 13')


def of_another_format(text):
    return text.replace('"stof_tuning_file": 1', '"stof_tuning_file": 2')


def without_entries(text):
    body = json.loads(text)
    del body["entries"]
    return json.dumps(body)


@pytest.mark.parametrize(
    "damage, words",
    [
        (cut, "damaged"),
        (edited, "was edited"),
        (of_another_format, "format 2, this STOF reads format 1"),
        (without_entries, "damaged tuning file"),
        (lambda text: "", "no tuning file"),
        (lambda text: "[1, 2]", "no tuning file"),
        (lambda text: '{"version": 3, "graphs": []}', "a plan goes into"),
    ],
    ids=["cut", "edited", "format", "field", "empty", "list", "plan"],
)
def test_a_file_that_cannot_be_used_changes_nothing(capsys, exported, filled, damage, words):
    before = contents(filled)
    exported.write_text(damage(exported.read_text()))
    status, out, error = call(capsys, "import", exported, "--overwrite", "--dir", filled)
    assert status == 2 and not out
    assert words in error and str(exported) in error
    assert contents(filled) == before


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(StofPlanError, match="cannot be read"):
        TuningFile.read(tmp_path / "nothing.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StofPlanError, match="no tuning file"):
        TuningFile.read(tmp_path / "binary")


def test_an_import_that_fails_on_the_way_changes_nothing(
    capsys, exported, tmp_path, here, monkeypatch
):
    from stof_compile import store

    there = Store(tmp_path / "there", here)
    there.put("tuned", "graph one", {"trials": 99})
    before, write, written = contents(there.root), store._write_beside, []

    def full(path, text):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(write(path, text))
        return written[-1]

    monkeypatch.setattr(store, "_write_beside", full)
    status, _, error = call(capsys, "import", exported, "--overwrite", "--dir", there.root)
    assert status == 1 and "No space left" in error
    assert contents(there.root) == before and not list(there.root.rglob("*.tmp"))


def test_a_cache_that_cannot_be_written_to(capsys, exported, tmp_path):
    (tmp_path / "file").write_text("no folder")
    status, _, error = call(capsys, "import", exported, "--dir", tmp_path / "file" / "cache")
    assert status == 2 and str(tmp_path / "file") in error
    status, _, error = call(capsys, "import", exported, "--dir", "/proc/nothing/cache")
    assert status == 1 and "/proc/nothing" in error and "name a place" in error


def _import(file, root, begin, results):
    tuning = TuningFile.read(Path(file))
    begin.wait(30)
    done = Store(Path(root), tuning.environment).put_all(tuning.items)
    results.put((done.added, done.replaced, done.kept))


def test_imports_at_the_same_time(exported, tmp_path, here):
    """The lock makes them take turns: one of them adds, the others find what it added."""
    context = multiprocessing.get_context("fork")
    begin, results = context.Barrier(3), context.Queue()
    given = (str(exported), str(tmp_path / "there"), begin, results)
    workers = [context.Process(target=_import, args=given) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(found) == [(0, 0, 3), (0, 0, 3), (3, 0, 0)]
    assert len(list(entries(tmp_path / "there"))) == 3


def test_environments_here_are_those_of_all_devices(here):
    assert environments_here() == {"cpu": here}
