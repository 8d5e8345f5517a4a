"""The command line apart from the dump printer."""

import pytest

from stof_compile.cli import main
from stof_compile.plan import PlanFile
from stof_compile.store import Store, default_root


def test_cache_is_listed_and_cleared(capsys):
    Store(default_root(), "here").put("attention", "some problem", {"kernel": "block"})
    assert main(["cache", "ls"]) == 0
    assert "attention" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "entries deleted" in capsys.readouterr().out
    assert main(["cache", "ls"]) == 0
    assert "nothing stored" in capsys.readouterr().out


def test_doctor_names_the_device(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "cpu: " in printed
    assert "GB/s" in printed


def test_demo_refuses_bad_input(capsys, tmp_path):
    assert main(["demo", "--device", "cpu", "--tokens", "3"]) == 2
    assert "at least 16 tokens" in capsys.readouterr().err
    assert main(["demo", "--device", "tpu"]) == 2
    assert "cpu or cuda" in capsys.readouterr().err
    assert main(["demo", "--device", "cpu", "--model", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_tune_saves_a_plan(capsys, tmp_path, fresh_dynamo, monkeypatch):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", lambda gm, *_: gm.forward)
    out = tmp_path / "plan.json"
    call = ["tune", "--model", "bert-tiny", "--batch", "2", "--seq", "32", "--mask", "bigbird"]
    call += ["--device", "cpu", "--budget", "0", "--out", str(out)]
    assert main(call) == 0
    assert "attention: 2x" in capsys.readouterr().out
    (plan,) = PlanFile.from_json(out.read_text()).plans
    assert plan.attention


def test_tune_refuses_bad_input(capsys):
    assert main(["tune", "--model", "bert-bass"]) == 2
    assert "neither a model of the zoo" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune"])


def test_unknown_command():
    with pytest.raises(SystemExit):
        main(["nothing"])
