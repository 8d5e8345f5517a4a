"""The page: well formed, self-contained, everything escaped, every link leads somewhere."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from written_dump import HOSTILE, make_record

from stof_compile.cli import main
from stof_compile.dump import Record
from stof_compile.report.html import html_page
from stof_compile.report.load import Ceilings
from stof_compile.report.markup import VOID, Markup, el, join
from stof_compile.report.model import read_report


class Page(HTMLParser):
    """Collects elements and checks that they are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return " ".join(data for tag, data in self.texts if tag not in ("style", "script"))


@pytest.fixture(scope="module")
def page():
    return Page(html_page([read_report(0, make_record(), Ceilings(4.0, 500.0))], f"d {HOSTILE}"))


def test_nothing_is_loaded_and_nothing_inline_runs(page):
    policy = next(m["content"] for m in page.all("meta") if "http-equiv" in m)
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("style", "script"):
        (code,) = [data for name, data in page.texts if name == tag]
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert "url(" not in code and "http" not in code
    for _, attributes in page.elements:
        assert not any(name == "style" or name.startswith("on") for name in attributes)
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:,"))


def test_text_of_a_dump_is_never_markup(page):
    assert len(page.all("script")) == 1
    assert page.text.count(HOSTILE) >= 6  # names, masks, reasons, the path: shown as they are


def test_links_lead_somewhere_and_names_are_unique(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.all("a"):
        assert attributes["href"].removeprefix("#") in ids, attributes


def test_from_a_node_to_source_line_template_and_config(page):
    nodes = [a for a in page.all("a") if "node" in a.get("class", "")]
    assert len(nodes) == 6 + 3
    grouped = [a for a in nodes if "data-group" in a]
    assert len(grouped) == 5 + 2  # the mask, its range, attention, add and norm; the operators
    assert all("/home/me/model.py" in a["aria-label"] for a in nodes)
    for words in ("x = self.norm(x + a)", "num_warps=2, rows=4", "class TritonNorm"):
        assert words in page.text
    assert "3x add + layer_norm" in page.text


def test_what_the_search_did_and_what_time_it_took(page):
    for words in (
        "accepted", "rolled back", "illegal", "7 more that were rejected", "1000 GB/s",
        "25% of the floor", "Measured in turns: 90.0 us before, 60.0 us after", "2.00x",
        "9.0 us apart", "1.50x", "torch.compile: 150.0 us",
    ):  # fmt: skip
        assert words in page.text, words


def test_rewritten_attention_is_no_fused_operator(page):
    assert "attention sites 3 of 4 rewritten" in page.text
    assert "fused operators 3 captured 17 operations" in page.text  # three norms


def test_pictures_have_words_and_regions_can_be_reached(page):
    for attributes in page.all("svg"):
        words = attributes.get("aria-label") or attributes.get("aria-hidden")
        assert words, attributes
    (mask,) = [a for a in page.all("svg") if a.get("class") == "mask"]
    assert "8 x 8 tiles of 64 x 64" in mask["aria-label"] and "density" in mask["aria-label"]
    for attributes in page.all("div"):
        if attributes.get("class") == "scroll":
            assert attributes["tabindex"] == "0" and attributes["aria-label"]
    classes = {a.get("class", "").split(" ")[0] for a in page.all("rect")}
    assert {"full", "part", "empty"} <= classes
    assert page.all("html")[0]["lang"] == "en"


def test_shares_of_the_floor_are_not_invented():
    text = Page(html_page([read_report(0, make_record())], "dump")).text
    assert "of the floor." not in text and "--ceilings" in text and "1000 GB/s" in text


def test_a_template_of_another_version_is_not_shown():
    record = make_record()
    record.versions["stof-compile"] = "0.0.1"
    text = Page(html_page([read_report(0, record)], "dump")).text
    assert "class TritonNorm" not in text and "stof-compile 0.0.1" in text


def test_an_empty_record_has_a_page():
    text = Page(html_page([read_report(0, Record()), read_report(1, make_record())], "dump")).text
    assert "No attention was found" in text and "no measured times" in text


def test_the_command_writes_it(dump, tmp_path, capsys):
    path = tmp_path / "deep" / "page.html"
    assert main(["inspect", str(dump), "--html", str(path)]) == 0
    assert "written" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and len(text) < 200_000
    assert path.stat().st_mode & 0o044 and list(path.parent.iterdir()) == [path]


def test_style_and_script_are_packaged():
    root = Path(__file__).resolve().parents[2]
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    for file in (root / "stof_compile" / "report").iterdir():
        assert file.suffix == ".py" or file.is_dir() or f'"{file.name}"' in project, file


def test_markup_escapes():
    assert el("p", "<b>", Markup("<i>"), None, cls='"') == '<p class="&quot;">&lt;b&gt;<i></p>'
    assert el("a", href=None, open="") == "<a open></a>"
    assert join(["a&b", 1.5], "|") == "a&amp;b|1.5"
    assert re.fullmatch(r'<meta charset="utf-8">', el("meta", charset="utf-8"))
