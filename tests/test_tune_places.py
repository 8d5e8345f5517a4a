"""``stof tune``: where it may write, what becomes of that which cannot be saved, its seconds."""

import io
import os
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stof_compile.dump import Record
from stof_compile.dump_text import spent
from stof_compile.errors import StofOptionError, StofPlaceError
from stof_compile.tune import run_tune
from stof_compile.tune_subject import TuneSettings, check_settings

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", lambda gm, *_: gm.forward)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=140)


@pytest.fixture
def unbuilt(monkeypatch):
    """No model may be built."""

    def fail(settings):
        raise AssertionError("what cannot be saved is not tuned")

    monkeypatch.setattr("stof_compile.tune.make_subject", fail)


@pytest.mark.parametrize(
    ("places", "kind", "words"),
    [
        ({"out": "no/x.json"}, StofPlaceError, "--out no/x.json cannot be written"),
        ({"out": "file/x.json"}, StofOptionError, "--out file/x.json cannot be written"),
        ({"out": "folder"}, StofOptionError, "--out folder is a folder"),
        ({"out": "pipe"}, StofOptionError, "--out pipe is no ordinary file"),
        ({"dump_dir": "no/dump"}, StofPlaceError, "--dump-dir no/dump cannot be written"),
        ({"dump_dir": "file"}, StofOptionError, "--dump-dir file is a file"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_tuned(
    places, kind, words, unbuilt, console, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "no").symlink_to("/proc")  # where not even root makes a file
    settings = TuneSettings("bert-tiny", **{name: Path(at) for name, at in places.items()})
    with pytest.raises(StofOptionError, match=words) as raised:
        run_tune(settings, console)
    assert type(raised.value) is kind


def test_trying_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("a plan")
    for out in ("new/deep/plan.json", "old.json"):
        check_settings(TuneSettings("bert-tiny", out=Path(out), dump_dir=Path("new/dump")))
    check_settings(TuneSettings("bert-tiny"))
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "a plan"


@pytest.mark.parametrize("lost", ["dump", "plan"])
def test_plan_and_dump_do_not_depend_on_each_other(quick, console, tmp_path, monkeypatch, lost):
    """The place goes while the model is tuned; what can be saved is, and people see the rest."""
    compile_it = torch.compile
    out, dump = tmp_path / "out" / "plan.json", tmp_path / "dump"

    def compile_and_spoil(*args, **options):
        spoilt = out.parent if lost == "plan" else dump
        spoilt.symlink_to("/proc/nothing")
        return compile_it(*args, **options)

    monkeypatch.setattr(torch, "compile", compile_and_spoil)
    settings = TuneSettings("bert-tiny", 1, 16, budget_s=0.0, device="cpu", out=out, dump_dir=dump)
    words = "--out .* cannot" if lost == "plan" else r"--dump-dir .* cannot .*\(the plan is in .*\)"
    with pytest.raises(StofOptionError, match=words):
        run_tune(settings, console)
    assert "attention: 2x" in console.file.getvalue()
    assert out.is_file() == (lost == "dump")
    assert bool(list(dump.glob("graph_*/plan.json"))) == (lost == "plan")


def test_files_of_a_dump_may_be_read_by_the_same_people(quick, console, tmp_path):
    dump = tmp_path / "dump"
    run_tune(TuneSettings("bert-tiny", 1, 16, budget_s=0.0, device="cpu", dump_dir=dump), console)
    modes = {file.name: file.stat().st_mode & 0o777 for file in dump.glob("graph_*/*")}
    assert modes["plan.json"] == modes["record.json"]


def test_seconds_add_up(quick, console, tmp_path):
    record = Record(
        timings_s={"form ahead": 1.0, "attention": 2.0, "fusion": 8.0, "measuring": 6.0}
        | {"stof": 12.0, "verdict": 7.0, "inductor": 3.0}
    )
    parts = dict(spent(record.timings_s))
    assert sum(parts.values()) == 12.0 + 7.0 + 3.0
    assert parts["comparing whole graphs"] == 7.0 and parts["other passes"] == 1.0
    run_tune(TuneSettings("bert-tiny", 1, 16, budget_s=0.0, device="cpu"), console)
    (line,) = [row for row in console.file.getvalue().splitlines() if " s in all: " in row]
    total, told = re.search(r"([\d.]+) s in all: (.*)", line).groups()
    seconds = [float(number) for number in re.findall(r"([\d.]+) s ", told)]
    assert sum(seconds) == pytest.approx(float(total), abs=0.06 * len(seconds))
    assert "attention with its trials" in told and "Inductor" in told
