"""The page in a real headless browser: it renders, and the console stays empty."""

import os
import re
import struct
import subprocess
import zlib
from dataclasses import replace

import pytest
from find_browser import MISSING, find_browser
from written_dump import make_record

from stof_compile.report.html import write_html
from stof_compile.report.model import read_report

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)
SHOW = """
addEventListener("message", (event) => {
  for (const [name, value] of Object.entries(event.data)) {
    document.body.setAttribute("data-" + name, value);
  }
});
"""
PROBE = (
    f"""
<script>{SHOW}</script>
"""
    + r"""
<script>
addEventListener("load", () => {
  const facts = {};
  const say = (name, value) => { facts[name] = value; };
  const channels = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = (text) => {
    const [r, g, b] = channels(text).map((c) => c / 255).map((c) =>
      c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const seen = (colour) => channels(colour).length < 4 || channels(colour)[3] > 0;
  const ground = (element) => {
    const rect = element.closest("a.node") && element.closest("a.node").querySelector("rect");
    if (rect) { return getComputedStyle(rect).fill; }
    for (let box = element; box; box = box.parentElement) {
      const colour = getComputedStyle(box).backgroundColor;
      if (seen(colour)) { return colour; }
    }
    return "rgb(255, 255, 255)";
  };
  let contrast = [99, ""], smallest = [99, ""];
  for (const element of document.querySelectorAll("body *")) {
    const own = Array.from(element.childNodes).some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || element.closest("script, title") || !element.getClientRects().length) { continue; }
    const style = getComputedStyle(element);
    const colour = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(colour), light(ground(element))].sort((x, y) => y - x);
    const words = element.textContent.trim().slice(0, 30);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < contrast[0]) { contrast = [ratio, words]; }
    const size = parseFloat(style.fontSize);
    if (size < smallest[0]) { smallest = [size, words]; }
  }
  say("contrast", contrast.join(" "));
  say("smallest", smallest.join(" "));
  say("overflow", document.documentElement.scrollWidth - innerWidth);
  say("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  say("ground", getComputedStyle(document.body).backgroundColor);
  const mask = document.querySelector("svg.mask").getBoundingClientRect();
  say("mask", Math.round(mask.width) + "x" + Math.round(mask.height));
  const node = document.querySelector("section.graph-of a.node[data-group='2']");
  node.focus();
  say("same", document.querySelectorAll("a.node.same").length);
  say("focus", document.activeElement === node);
  location.hash = node.getAttribute("href");
  setTimeout(() => {
    const target = document.getElementById(node.getAttribute("href").slice(1));
    say("open", target.closest("details").open);
    say("seen", target.getBoundingClientRect().height > 0);
    say("done", "yes");
    parent.postMessage(facts, "*");
  }, 50);
});
</script>
"""
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    record = make_record()
    # as long as real ones: what cannot be broken into lines would widen the page
    place = f"/home/me/{'deep/' * 30}model.py:11 in forward: {'attention_' * 20}"
    mask = " | ".join(["random_tiles(fill=0.1, empty_in=longformer(window=32))"] * 4)
    record.sites = [replace(site, source=place, mask=mask) for site in record.sites]
    return write_html([read_report(0, record)], f"/home/me/{'dump' * 40}", path)


@pytest.fixture(scope="module")
def probed(page):
    """The same page with a script that measures it; its policy would not let that run."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    path = page.with_name("probed.html")
    path.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    return path


def browse(path, folder, *arguments):
    """Run the browser; returns what it prints and the lines of the console."""
    # a profile of its own, or a browser of the user's would answer instead
    call = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    call += [f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--hide-scrollbars"]
    call += ["--enable-logging=stderr", "--v=0", "--window-size=1280,1600"]
    call += ["--virtual-time-budget=2000", *arguments, path.as_uri()]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(call, capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def facts(path, folder, *arguments):
    dom, console = browse(path, folder, "--dump-dom", *arguments)
    assert not console, console
    (body,) = re.findall(r"<body([^>]*)>", dom)
    found = dict(re.findall(r'data-([a-z]+)="([^"]*)"', body))
    assert found.get("done") == "yes", found
    return found


def test_it_renders_and_the_console_is_empty(page, tmp_path):
    dom, console = browse(page, tmp_path, "--dump-dom")
    assert not console, console
    assert 'data-ready="yes"' in dom  # its own script ran under its own policy
    assert dom.count('class="node') == 9


@pytest.fixture(scope="module")
def wide(probed, tmp_path_factory):
    return facts(probed, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def phone(probed, tmp_path_factory):
    """In a frame: a window is not made narrower than 500."""
    path = probed.with_name("phone.html")
    frame = f'<iframe src="{probed.name}" width="375" height="800"></iframe>'
    path.write_text(f"<body>{frame}<script>{SHOW}</script></body>", encoding="utf-8")
    return facts(path, tmp_path_factory.mktemp("phone"))


def legible(found):
    """WCAG 2.1, 1.4.3 level AA for text of this size; 11 px is the least in a picture."""
    assert float(found["contrast"].split(" ")[0]) >= 4.5, found["contrast"]
    assert float(found["smallest"].split(" ")[0]) >= 11, found["smallest"]


@pytest.mark.parametrize("screen", ["wide", "phone"])
def test_it_fits_keyboards_and_screens(request, screen):
    found = request.getfixturevalue(screen)
    assert int(found["overflow"]) <= 0  # nothing to scroll sideways but the pictures
    across, down = map(int, found["mask"].split("x"))
    assert across == pytest.approx(down, abs=4) and across > 200
    legible(found)
    assert found["focus"] == "true" and int(found["same"]) == 3  # add, norm and the operator
    assert found["open"] == "true" and found["seen"] == "true"


def test_dark(probed, wide, tmp_path):
    light = wide
    dark = facts(probed, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert (light["dark"], dark["dark"]) == ("false", "true")
    assert light["ground"] != dark["ground"]
    legible(dark)


def test_screenshot_has_something_on_it(page, tmp_path):
    file = tmp_path / "page.png"
    browse(page, tmp_path, f"--screenshot={file}")
    assert len(png_colours(file.read_bytes())) > 30


def png_colours(data):
    """Triples of bytes in an 8-bit PNG, about its colours: an empty page has hardly any."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    packed, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    return set(struct.iter_unpack("3s", zlib.decompress(packed)[: 3 * 10**6 // 3 * 3]))
