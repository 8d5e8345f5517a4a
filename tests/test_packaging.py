"""The package lists every folder with code, and imports without GPU, Triton or TileLang."""

import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = {"stof_compile": "stof_compile", "kernels": "stof_compile.kernels"} | {
    "templates": "stof_compile.templates"
}


def test_package_list_names_every_folder_with_code():
    found = set()
    for folder, package in SOURCES.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inner)))
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_no_code_outside_packages():
    for folder in SOURCES:
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), f"{file.parent} lacks __init__.py"


def test_entry_point_and_script():
    (backend,) = metadata.entry_points(group="torch_dynamo_backends", name="stof")
    assert backend.value == "stof_compile.backend:stof"
    (script,) = metadata.entry_points(group="console_scripts", name="stof")
    assert script.value == "stof_compile.cli:main"


def test_versions_agree():
    import stof_compile

    assert stof_compile.__version__ == PROJECT["project"]["version"]


def test_typed():
    assert (ROOT / "stof_compile" / "py.typed").is_file()


def test_the_source_distribution_has_all_code_and_no_fragment_of_the_tests(tmp_path):
    """setuptools would take those of the tests that are called ``test_*.py``, without the rest."""
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in (*SOURCES, "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert not [name for name in names if name.startswith("tests")]
    code = {f.relative_to(ROOT).as_posix() for d in SOURCES for f in (ROOT / d).rglob("*.py")}
    assert code <= names


def test_public_names_exist():
    import stof_compile

    for name in stof_compile.__all__:
        assert getattr(stof_compile, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        stof_compile.nothing  # noqa: B018


IMPORTS = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "tilelang"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import stof_compile, stof_compile.masks, stof_compile.backend, stof_compile.cli
assert not any(name.split(".")[0] in ("triton", "tilelang") for name in sys.modules)
for name in stof_compile.__all__:
    getattr(stof_compile, name)
assert not stof_compile.backend.torch.cuda.is_initialized()
"""


def test_imports_need_neither_triton_nor_a_gpu():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
