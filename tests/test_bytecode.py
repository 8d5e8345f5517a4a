"""Where torch's bytecode is, and whether an import would leave it there."""

import sys

import pytest

from stof_compile.bytecode import SOURCES, lacking_bytecode


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
