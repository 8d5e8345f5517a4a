"""The pictures of docs/report.md: the tool takes them in a real browser, and tells of which run."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from find_browser import MISSING, find_browser
from written_dump import make_record

from stof_compile.report.model import read_report

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "docs" / "img" / "report"


@pytest.fixture(scope="module")
def tool():
    pytest.importorskip("PIL")
    path = ROOT / "docs" / "tools" / "screenshots.py"
    spec = importlib.util.spec_from_file_location("screenshots", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # its dataclasses look there for their module
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def browser():
    if find_browser() is None:
        pytest.skip(MISSING)


def section(tool):
    (found,) = tool.SECTION.finditer((ROOT / "docs" / "report.md").read_text(encoding="utf-8"))
    return found[0]


def test_the_run_is_told(tool):
    about = tool.where_from(read_report(0, make_record()), "a model", "2026-01-02")
    for words in ("a model", "batch 2", "512 tokens", "float16", "Some GPU", "2026-01-02", "torch"):
        assert words in about
    assert tool.model_of(read_report(0, make_record())) == "`model`"


def test_the_page_shows_all_pictures_there_are(tool):
    shown = set(re.findall(r"!\[[^\]]{40,}\]\(img/report/(\w+)\.png\)", section(tool)))
    files = list(FOLDER.glob("*"))
    assert {file.stem for file in files} == shown
    assert sum(file.stat().st_size for file in files) < 600_000


@pytest.mark.usefixtures("browser")
def test_pictures_are_taken(tool, dump, tmp_path, capsys):
    from PIL import Image

    before = section(tool)
    assert tool.main([str(dump), "--out", str(tmp_path / "shots"), "--model", "a model"]) == 0
    printed = capsys.readouterr().out
    assert section(tool) == before
    shots = tool.shots(read_report(0, make_record()))
    assert len(shots) == 4
    grounds = {}
    for shot in shots:
        assert f"![{shot.words}](img/report/{shot.name}.png)" in printed
        with Image.open(tmp_path / "shots" / f"{shot.name}.png") as image:
            assert image.width in (1280, 3 * 390 + 2 * tool.GAP)
            assert "a model" in image.text["Description"]
            pixels = image.convert("RGB")
            assert len(pixels.getcolors()) > 15  # something is on it
            grounds[shot.name] = sum(pixels.getpixel((2, 2)))
    assert grounds["time"] < 100 and grounds["graph"] > 600  # dark, light
