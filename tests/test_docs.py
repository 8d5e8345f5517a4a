"""The documentation: generated tables are current, links lead somewhere, code blocks run."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from stof_compile.dump import STAGES
from stof_compile.options import options_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = re.compile(r"<!-- options: [^>]*-->\n(.*?)<!-- /options -->", re.DOTALL)
FENCE = re.compile(r"^(<!-- run -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MENTIONED = re.compile(r"`((?:\w+/)*\w+\.py)`")
DUMPED = tuple(f"{stage}.py" for stage in STAGES)


class Block(NamedTuple):
    """A fenced Python block; ``run`` = it stands behind ``<!-- run -->``."""

    line: int
    run: bool
    code: str


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start(2)) + 1, bool(found.group(1)), found.group(2))
        for found in FENCE.finditer(text)
    ]


def relative(page):
    return str(page.relative_to(ROOT))


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in kept}


def test_options_table_is_the_generated_one():
    found = GENERATED.search((ROOT / "docs" / "options.md").read_text(encoding="utf-8"))
    assert found, "docs/options.md has lost the marks around its table"
    assert found.group(1) == options_table(), f"put this into docs/options.md:\n{options_table()}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{relative(page)} links to {link}"
        assert target.is_relative_to(ROOT), f"{relative(page)} links out of the repository: {link}"
        if anchor:
            assert anchor in anchors(target), f"{relative(page)}: no heading for {link}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_mentioned_files_exist(page):
    homes = [ROOT, ROOT / "stof_compile", ROOT / "stof_compile" / "masks", page.parent]
    for name in MENTIONED.findall(page.read_text(encoding="utf-8")):
        found = name in DUMPED or any((home / name).is_file() for home in homes)
        assert found, f"{relative(page)} mentions {name}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_code_blocks_compile(page):
    for block in blocks(page):
        compile("\n" * (block.line - 1) + block.code, relative(page), "exec")


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(block.run for block in blocks(p))], ids=relative
)
def test_code_blocks_run(page, tmp_path, monkeypatch, fresh_dynamo):
    """Blocks of a page run in order in one namespace; the README also finds a small model."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs", **(small_model() if page.name == "README.md" else {})}
    with torch.no_grad():
        for block in blocks(page):
            if block.run:
                source = "\n" * (block.line - 1) + block.code
                exec(compile(source, str(page), "exec"), names)


def small_model():
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1).eval()
    return {"model": model, "inputs": {"src": torch.randn(1, 128, 32)}}


def test_tour_names_the_files_of_a_dump(tmp_path, fresh_dynamo):
    """The script of the tour works, and the page shows every file it leaves."""
    source = (ROOT / "docs" / "tools" / "make_tour_dump.py").read_text(encoding="utf-8")
    names = {"__name__": "tour"}
    exec(compile(source, "make_tour_dump.py", "exec"), names)
    explanation = names["make_dump"](tmp_path, budget_s=0.0)
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    (folder,) = tmp_path.glob("graph_*")
    for file in folder.iterdir():
        assert file.name in page
    for site in explanation.sites:
        assert site.name in page and site.status == "rewritten"


def test_coverage_page_has_every_model():
    page = ROOT / "docs" / "coverage.md"
    if not page.is_file():
        pytest.skip("docs/coverage.md is written by tests/e2e/test_coverage.py")
    from models import CASES

    rows = re.findall(r"^\| ([\w.-]+) \| \d", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [case.id for case in CASES]
