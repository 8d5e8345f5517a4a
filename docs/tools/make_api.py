"""Writes docs/api.md from the docstrings of what users import.

    python docs/tools/make_api.py

Runs on any machine: nothing it imports needs a GPU. A test compares the page with `api_page`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "api.md"
HEAD = """\
# API

Generated from the docstrings by `python docs/tools/make_api.py`. Everything else in the package is
internal and changes without notice. Letters: B batch, H heads, Q and K query and key length, D head
dim.
"""
LISTS = ("Args", "Returns", "Raises", "Source")
TITLES = {"Args": "Arguments"}
ITEM = re.compile(r"^([\w*]+(?:, [\w*]+)*): (.*)$")
WIDTH = 88  # of a signature on one line
SELF_MADE = ("BlockMask", "MaskSpec", "Explanation", "StofOptions")  # users do not call these


def api_page() -> str:
    """Return the whole page."""
    package = importlib.import_module("stof_compile")
    masks = importlib.import_module("stof_compile.masks")
    transformers = importlib.import_module("stof_compile.integrations.transformers")
    names = [name for name in package.__all__ if name not in ("__version__", "masks")]
    attends = [
        name
        for name, value in vars(transformers).items()
        if inspect.isfunction(value)
        and value.__module__ == transformers.__name__
        and not name.startswith("_")
    ]
    parts = [
        HEAD,
        *_module(package, sorted(names, key=_functions_first(package))),
        *_module(masks, sorted(masks.__all__, key=_functions_first(masks))),
        *_module(transformers, attends),
    ]
    return "\n".join(parts)


def _functions_first(module: ModuleType) -> Any:
    def key(name: str) -> tuple[int, str]:
        value = getattr(module, name)
        error = inspect.isclass(value) and issubclass(value, Exception)
        return (2 if error else 1 if inspect.isclass(value) else 0, name)

    return key


def _module(module: ModuleType, names: list[str]) -> Iterator[str]:
    yield f"## {module.__name__}\n"
    yield from _text(module)
    for name in names:
        value = getattr(module, name)
        yield f"### {name}\n"
        if not inspect.isclass(value):
            yield f"```\n{_signature(name, value)}\n```\n"
        yield from _text(value)
        if name == "StofOptions":
            yield "The fields are the [options](options.md), with type, default and unit.\n"
        elif name in SELF_MADE:
            members = [line for line in _members(value)]
            yield "**Members**\n"
            yield "\n".join(members) + "\n"


# -- docstrings -----------------------------------------------------------------------------------


def _text(value: Any) -> Iterator[str]:
    """Docstring as Markdown: paragraphs, then its sections as lists."""
    section = ""
    for block in _blocks(inspect.getdoc(value) or ""):
        first = block[0].rstrip(":")
        if block[0].startswith(tuple(f"{name}:" for name in LISTS)):
            section = first if first in LISTS else first.split(":")[0]
            rest = [block[0].partition(":")[2].strip(), *block[1:]]
            lines = [line for line in rest if line]
            body = "\n".join(_section(lines))
            yield f"**{TITLES.get(section, section)}**\n\n{body}\n"
        else:
            yield _joined(block) + "\n"


def _blocks(doc: str) -> Iterator[list[str]]:
    """Lines of each paragraph; a section's head begins a new one."""
    block: list[str] = []
    in_section = False
    for line in doc.splitlines():
        head = line.startswith(tuple(f"{name}:" for name in LISTS))
        if block and (head or not line.strip() or (in_section and line[:1].strip())):
            yield block
            block = []
        in_section = head or (in_section and (not line[:1].strip()))
        if line.strip():
            block.append(line)
    if block:
        yield block


def _section(lines: list[str]) -> Iterator[str]:
    """Items of a section as a list; what has no name before a colon is a paragraph."""
    edge = min(len(line) - len(line.lstrip()) for line in lines)
    items: list[list[str]] = []
    for line in lines:
        if items and len(line) - len(line.lstrip()) > edge:
            items[-1].append(line)
        else:
            items.append([line])
    found = [(ITEM.match(_joined(item)), _joined(item)) for item in items]
    if any(match for match, _ in found):
        for match, text in found:
            yield f"* {_code_names(match[1])}: {match[2]}" if match else f"* {text}"
    else:
        yield " ".join(text for _, text in found)


def _code_names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


def _members(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        function = getattr(member, "func", getattr(member, "fget", member))
        if name.startswith("_") or not inspect.getdoc(function) or not callable(function):
            continue
        shown = name if function is not member else _signature(name, function, short=True)
        first = _joined(next(_blocks(inspect.getdoc(function) or "")))
        yield f"* `{shown}`: {first}"


# -- signatures -----------------------------------------------------------------------------------


def _signature(name: str, function: Any, *, short: bool = False) -> str:
    """``name(...) -> result``; ``short`` leaves types and ``self`` out."""
    parts: list[str] = []
    signature = inspect.signature(function)
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        typed = parameter.annotation is not parameter.empty and not short
        text = f"{star}{parameter.name}" + (f": {_type(parameter.annotation)}" if typed else "")
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}" if typed else f"={parameter.default!r}"
        parts.append(text)
    result = "" if short else f" -> {_type(signature.return_annotation)}"
    line = f"{name}({', '.join(parts)}){result}"
    if short or len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _type(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return "None" if annotation in (None, type(None)) else str(getattr(annotation, "__name__", ""))


if __name__ == "__main__":
    PAGE.write_text(api_page(), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE.name}\n")
