"""The store: atomic, locked, private to its environment, and never in the way."""

import json
import logging
import multiprocessing
from pathlib import Path

import pytest

from stof_compile.device import device_facts
from stof_compile.store import Store, clear, default_root, entries, environment_key


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, "gpu | torch 2.13")


def only_file(root: Path) -> Path:
    (file,) = root.glob("*/*/*.json")
    return file


def test_round_trip(store):
    assert store.get("attention", "problem") is None
    store.put("attention", "problem", {"kernel": "block", "us": 3.5})
    assert store.get("attention", "problem") == {"kernel": "block", "us": 3.5}
    store.put("attention", "problem", {"kernel": "row"})
    assert store.get("attention", "problem") == {"kernel": "row"}
    assert store.get("plan", "problem") is None


def test_environments_do_not_meet(store, tmp_path):
    store.put("attention", "problem", {"kernel": "block"})
    assert Store(tmp_path, "gpu | torch 2.12").get("attention", "problem") is None


@pytest.mark.parametrize(
    "content",
    [b"{ not json", b"", b"[1, 2]", b"\xff\xfe\x00", b'{"format": 1, "key": "x"'],
    ids=["broken", "empty", "list", "binary", "cut"],
)
def test_corrupt_file_is_a_miss_with_a_warning(store, tmp_path, caplog, content):
    store.put("attention", "problem", {"kernel": "block"})
    only_file(tmp_path).write_bytes(content)
    with caplog.at_level(logging.WARNING, "stof_compile.store"):
        assert store.get("attention", "problem") is None
    assert "ignored" in caplog.text
    store.put("attention", "problem", {"kernel": "row"})
    assert store.get("attention", "problem") == {"kernel": "row"}


def test_other_format_or_key_is_a_miss(store, tmp_path):
    store.put("attention", "problem", {"kernel": "block"})
    body = json.loads(only_file(tmp_path).read_text())
    only_file(tmp_path).write_text(json.dumps({**body, "format": 0}))
    assert store.get("attention", "problem") is None
    only_file(tmp_path).write_text(json.dumps({**body, "key": "another"}))
    assert store.get("attention", "problem") is None


def test_nothing_half_written_is_left_behind(store, tmp_path):
    store.put("attention", "problem", {"kernel": "block"})
    with pytest.raises(TypeError):
        store.put("attention", "problem", {"kernel": object()})
    assert store.get("attention", "problem") == {"kernel": "block"}
    assert not list(tmp_path.rglob("*.tmp"))


def test_unwritable_root_is_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    store = Store(blocked / "cache", "here")
    with caplog.at_level(logging.WARNING, "stof_compile.store"):
        store.put("attention", "problem", {"kernel": "block"})
        assert store.get("attention", "problem") is None
        with store.lock("problem"):
            pass
    assert "cannot be written" in caplog.text
    assert "without the lock" in caplog.text


def _add_one(root, times):
    store = Store(Path(root), "here")
    for _ in range(times):
        with store.lock("counter"):
            value = (store.get("count", "n") or {"n": 0})["n"]
            store.put("count", "n", {"n": value + 1})


def test_lock_excludes_other_processes(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_one, args=(str(tmp_path), 25)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert Store(tmp_path, "here").get("count", "n") == {"n": 75}


def test_lock_that_is_not_given_in_time_is_a_warning(store, caplog):
    with store.lock("busy"), store.lock("busy", timeout_s=0.05):
        pass
    assert "without the lock" in caplog.text


def test_list_and_clear(store, tmp_path):
    store.put("attention", "one", {"kernel": "block"})
    store.put("plan", "two", {"plan": {}})
    foreign = tmp_path / "mine" / "data"
    foreign.mkdir(parents=True)
    (foreign / "keep.json").write_text("{}")
    stored = [entry for entry in entries(tmp_path) if entry.key != "?"]
    assert {(entry.kind, entry.key) for entry in stored} == {("attention", "one"), ("plan", "two")}
    assert all(entry.environment == store.environment for entry in stored)
    assert clear(tmp_path) == 2
    assert store.get("attention", "one") is None
    assert (foreign / "keep.json").exists()


def test_default_root_and_environment():
    assert default_root().name == "stof-compile"
    key = environment_key(device_facts("cpu"))
    assert "torch" in key
    assert "triton" in key
    assert key == environment_key(device_facts("cpu"))
