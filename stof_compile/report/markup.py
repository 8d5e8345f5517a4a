"""Writing HTML and SVG so that no text of a dump can become markup: everything is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """Text that is markup already; all other text is escaped."""

    __slots__ = ()


SPELLED = {
    "cls": "class",
    "view_box": "viewBox",
    "preserve_aspect_ratio": "preserveAspectRatio",
}
VOID = frozenset({"meta", "link", "br", "hr", "col", "wbr"})
Child = str | float | int | Markup | None


def el(name: str, /, *children: Child, **attributes: Child) -> Markup:
    """An element.

    Args:
        name: of the tag. children: text is escaped; None is left out.
        attributes: ``cls`` is class; an underscore is a hyphen, but ``view_box`` is viewBox; None
            is left out, "" is an attribute without a value.
    """
    spelled = []
    for key, value in attributes.items():
        if value is None:
            continue
        key = SPELLED.get(key, key).replace("_", "-")
        text = escape(_plain(value), quote=True)
        spelled.append(f' {key}="{text}"' if text else f" {key}")
    start = f"<{name}{''.join(spelled)}>"
    return Markup(start if name in VOID else f"{start}{join(children)}</{name}>")


def join(children: Iterable[Child], between: str = "") -> Markup:
    """Pieces one after the other, text escaped."""
    parts = (
        child if isinstance(child, Markup) else escape(_plain(child), quote=False)
        for child in children
        if child is not None
    )
    return Markup(between.join(parts))


def table(
    head: Sequence[str], rows: Sequence[Markup], label: str, numbers: Sequence[str] = ()
) -> Markup:
    """A table that scrolls sideways where it is too wide.

    Args:
        head: titles of the columns. rows: of ``tr``. label: the table in words.
        numbers: titles of the columns with numbers, which stand to the right.
    """
    titles = [el("th", h, scope="col", cls="n" if h in numbers else None) for h in head]
    body = el("table", el("thead", el("tr", *titles)), el("tbody", *rows))
    return el("div", body, cls="scroll", tabindex=0, role="region", aria_label=label)


def _plain(value: Child) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
