"""Where torch's bytecode is, whether an import leaves it there, and where processes of ours do."""

import os
import subprocess
import sys

import pytest

from stof_compile.bytecode import SOURCES, keeping_bytecode, lacking_bytecode
from stof_compile.store import clear, damaged_files, entries


@pytest.fixture
def torch_folder(tmp_path, monkeypatch):
    """Sources in torch's place, without bytecode."""
    for name in SOURCES:
        (tmp_path / "torch" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "torch" / name).write_text("")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "torch"


def write_bytecode(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def test_bytecode_lacks_until_all_is_there(torch_folder):
    first = lacking_bytecode(torch_folder)
    assert first.forbidden and first.writable
    assert first.file.parent == torch_folder / "__pycache__"
    write_bytecode(first.file)
    second = lacking_bytecode(torch_folder)
    assert second.file.parent == torch_folder / "_inductor" / "__pycache__"
    write_bytecode(second.file)
    assert lacking_bytecode(torch_folder) is None


def test_bytecode_that_an_import_writes_does_not_lack(torch_folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert lacking_bytecode(torch_folder) is None


def test_bytecode_is_looked_for_where_python_does(torch_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "elsewhere"))
    assert lacking_bytecode(torch_folder).file.is_relative_to(tmp_path / "elsewhere")


def test_bytecode_lacks_where_it_cannot_be_written(torch_folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "file"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    lacking = lacking_bytecode(torch_folder)
    assert not lacking.forbidden and not lacking.writable


def test_without_sources_nothing_is_compiled(torch_folder):
    for name in SOURCES:
        (torch_folder / name).unlink()
    assert lacking_bytecode(torch_folder) is None


NONE_WRITTEN = {"PYTHONDONTWRITEBYTECODE": "1"}


def test_processes_of_ours_keep_bytecode_in_our_folder(torch_folder, tmp_path):
    folder = tmp_path / "cache" / "bytecode" / "torch-1"
    kept = keeping_bytecode(NONE_WRITTEN | {"OTHER": "stays"}, folder, torch_folder)
    assert kept == {"OTHER": "stays", "PYTHONPYCACHEPREFIX": str(folder)}
    assert folder.stat().st_mode & 0o777 == 0o700
    environment = kept | {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
    (written,) = folder.rglob("torch/__init__.*.pyc")
    before = written.stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
    assert written.stat().st_mtime_ns == before
    assert not (torch_folder / "__pycache__").exists()


def test_the_cache_knows_nothing_of_bytecode(torch_folder, tmp_path):
    root = tmp_path / "cache"
    folder = root / "bytecode" / "torch-1"
    keeping_bytecode(NONE_WRITTEN, folder, torch_folder)
    write_bytecode(folder / "site" / "module.pyc")
    assert not list(entries(root)) and not damaged_files(root)
    assert clear(root) == 0 and (folder / "site" / "module.pyc").exists()


def test_with_bytecode_of_torch_nothing_changes(torch_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert keeping_bytecode({}, tmp_path / "cache", torch_folder) == {}
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_the_users_stays(torch_folder, monkeypatch, tmp_path):
    own = NONE_WRITTEN | {"PYTHONPYCACHEPREFIX": "/own"}
    assert keeping_bytecode(own, tmp_path / "cache", torch_folder) == own
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert keeping_bytecode(NONE_WRITTEN, tmp_path / "cache", torch_folder) == NONE_WRITTEN
    assert not (tmp_path / "cache").exists()


def no_folder(place):
    place.write_text("no folder")


def open_to_all(place):
    place.mkdir()
    place.chmod(0o777)


@pytest.mark.parametrize("make", [no_folder, open_to_all])
def test_code_is_read_from_no_folder_that_others_write(make, torch_folder, tmp_path):
    make(tmp_path / "cache")
    assert keeping_bytecode(NONE_WRITTEN, tmp_path / "cache", torch_folder) == NONE_WRITTEN


def test_code_is_read_from_no_folder_of_another_user(torch_folder, monkeypatch, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert keeping_bytecode(NONE_WRITTEN, tmp_path / "cache", torch_folder) == NONE_WRITTEN
