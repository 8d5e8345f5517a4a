"""Puts the pages that lie outside docs/ into the site; a hook of mkdocs.yml.

In the repository a page of docs/ links to ``../bench/README.md``; in the site that page stands at
``bench/README.md``. Links between the two are rewritten, so that they lead somewhere in both.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md", "bench/results/*.md")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the outside pages under their path in the repository."""
    from mkdocs.structure.files import File

    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that cross the border of docs/."""
    return rewritten(markdown, page.file.src_uri, inside=page.file.generated_by is None)


def rewritten(markdown: str, place: str, *, inside: bool) -> str:
    """Return a page with links as the site needs them.

    Args:
        markdown: text of the page.
        place: its path in the site.
        inside: whether it lies in docs/.
    """
    here = f"docs/{place}" if inside else place

    def link(found: re.Match[str]) -> str:
        target = normpath(join(dirname(here), found[1]))
        in_site = target.removeprefix("docs/")
        return f"]({relpath(in_site, dirname(place) or '.')}"

    return LINK.sub(link, markdown)
