"""The documentation: generated pages are current, links lead somewhere, code blocks run."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from running import without_flex

import stof_compile
from stof_compile.cli import main as stof
from stof_compile.dump import STAGES
from stof_compile.options import options_table

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*OUTSIDE, *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = re.compile(r"<!-- options: [^>]*-->\n(.*?)<!-- /options -->", re.DOTALL)
FENCE = re.compile(r"^(<!-- run -->\n)?```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:    |\| `)stof (\w[^`|\n]*?)(?:  .*|`.*)?$", re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MENTIONED = re.compile(r"`((?:\w+/)*\w+\.py)`")
DUMPED = tuple(f"{stage}.py" for stage in STAGES)


class Block(NamedTuple):
    """A fenced block of Python or of shell commands; ``run``: it stands behind ``<!-- run -->``."""

    line: int
    run: bool
    language: str
    code: str


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start(3)) + 1, bool(found[1]), found[2], found[3])
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
def test_every_code_block_runs(page):
    left = [block.line for block in blocks(page) if not block.run]
    assert not left, f"{relative(page)}: no <!-- run --> before the blocks at lines {left}"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(block.run for block in blocks(p))], ids=relative
)
def test_code_blocks_run(page, tmp_path, monkeypatch, fresh_dynamo):
    """Blocks of a page run in order in one namespace; the README also finds a small model."""
    monkeypatch.chdir(tmp_path)
    # a dataclass asks for the module it stands in
    monkeypatch.setitem(sys.modules, "docs", ModuleType("docs"))
    names = {"__name__": "docs"}
    for_inference = page.name == "README.md"
    names |= small_model() if for_inference else {}
    with torch.set_grad_enabled(not for_inference), without_flex():
        for block in blocks(page):
            if block.language == "python":
                source = "\n" * (block.line - 1) + block.code
                exec(compile(source, str(page), "exec"), names)
            else:
                run_commands(block.code)


def run_commands(code):
    for line in code.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "stof" and stof(arguments) == 0, line


def test_commands_of_the_pages_exist(capsys, monkeypatch):
    """Every ``stof`` line names a command, and options that its help has."""
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table cuts options
    found = {(page, line) for page in PAGES for line in COMMAND.findall(page.read_text("utf-8"))}
    assert len(found) > 5
    shown = {}
    for page, line in sorted(found):
        words = tuple(re.match(r"[a-z ]*(?!\w)", line)[0].split())
        if words[0] == "bench":  # hands all the rest to bench/run.py
            continue
        if words not in shown:
            assert stof([*words, "--help"]) == 0, f"{relative(page)}: stof {line}"
            shown[words] = capsys.readouterr().out
        for option in re.findall(r"(?<!\w)--[a-z-]+", line):
            assert option in shown[words], f"{relative(page)}: stof {line}: no {option}"


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


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_api_page_is_the_generated_one():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == tool("make_api").api_page(), "run python docs/tools/make_api.py"


def test_links_across_the_border_of_docs():
    """What the site makes of links between docs/ and the pages beside it."""
    rewritten = tool("outside_pages").rewritten
    text = "[a](../bench/README.md#peers) [b](masks.md) [c](#here) [d](https://example.org/x)"
    shown = "[a](bench/README.md#peers) [b](masks.md) [c](#here) [d](https://example.org/x)"
    assert rewritten(text, "limits.md", inside=True) == shown
    text = "[a](../README.md) [b](../../docs/fusion.md#the-verdict)"
    shown = "[a](../README.md) [b](../../fusion.md#the-verdict)"
    assert rewritten(text, "bench/results/README.md", inside=False) == shown
    text = "[a](../../bench/README.md) [b](../faq.md)"
    shown = "[a](../bench/README.md) [b](../faq.md)"
    assert rewritten(text, "guides/start.md", inside=True) == shown


def test_version_is_the_same_everywhere():
    version = stof_compile.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_coverage_page_has_every_model():
    page = ROOT / "docs" / "coverage.md"
    if not page.is_file():
        pytest.skip("docs/coverage.md is written by tests/e2e/test_coverage.py")
    from models import CASES

    rows = re.findall(r"^\| ([\w.-]+) \| \d", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [case.id for case in CASES]
