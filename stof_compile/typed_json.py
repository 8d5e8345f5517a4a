"""JSON read back: into plain values, and into dataclasses whose fields have their types."""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")
_HINTS: dict[type, tuple[tuple[str, Any], ...]] = {}  # of each dataclass seen


MOST = 2**100
"""Whole numbers beyond it are no count and no size; products of some of them still have a float."""
JSON_NAMES: dict[type, str] = {dict: "object", list: "list", str: "string"}


def read_json(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: broken JSON, or a whole number beyond all use. TypeError: something else than
            an object. RecursionError: brackets in brackets.
    """
    body = json.loads(text, parse_int=_whole)
    if not isinstance(body, dict):
        raise TypeError(f"it is {_shown(body)}, which is no JSON object")
    return body


def part(body: Any, name: str, kind: type[Made]) -> Made:
    """A field of a JSON object.

    Raises:
        KeyError: there is none. TypeError: it, or what it should stand in, is of another type.
    """
    if not isinstance(body, dict):
        raise TypeError(f"{_shown(body)} stands where an object with {name!r} should be")
    value = body[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {_shown(value)}, which is no {JSON_NAMES[kind]}")
    return value


def problem_told(error: Exception) -> str:
    """What reading found wrong, for people."""
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    if isinstance(error, RecursionError):
        return "brackets in brackets without end"
    return str(error)


def built(kind: type[Made], data: Any, place: str = "") -> Made:
    """A dataclass from its JSON form, nested ones in it too; lists become what is declared.

    Args:
        place: of the data in the file, for errors.
    Raises:
        TypeError: names the field that is missing, unknown or of another type than declared.
    """
    if not isinstance(data, dict):
        raise TypeError(f"{place or 'it'} is {_shown(data)}, which is no object")
    hints = dict(_hints(kind))
    inside = f"{place}." if place else ""
    for name in data:
        if name not in hints:
            raise TypeError(f"{inside}{name} is a field that is not known here")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in data and field.default is field.default_factory is MISSING:
            raise TypeError(f"the field {inside}{field.name} is missing")
    return kind(**{k: _built(value, hints[k], f"{inside}{k}") for k, value in data.items()})


def _built(value: Any, hint: Any, place: str) -> Any:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        classes = [each for each in arguments if is_dataclass(each)]
        if value is not None and classes:
            return _built(value, classes[0], place)
    elif is_dataclass(origin):
        return built(origin, value, place)  # type: ignore[arg-type]
    elif origin is dict and isinstance(value, dict):
        return {k: _built(v, arguments[1], f"{place}[{k}]") for k, v in value.items()}
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        hints = list(arguments) if fixed else [arguments[0]] * len(value)
        if len(hints) == len(value):
            pairs = enumerate(zip(value, hints, strict=True))
            return origin(_built(v, each, f"{place}[{i}]") for i, (v, each) in pairs)
    problem = _problem(value, hint, place)
    if problem:
        raise TypeError(problem)
    return value


def typed(made: Made) -> Made:
    """A dataclass as it is, when each of its fields, in nested ones too, has its declared type.

    An int stands for a float, and a bool for nothing but a bool.

    Raises:
        TypeError: names the field, its value and the type.
    """
    problem = _problem_of_fields(made, "")
    if problem:
        raise TypeError(problem)
    return made


def _hints(kind: type) -> tuple[tuple[str, Any], ...]:
    if kind not in _HINTS:
        hints = get_type_hints(kind)
        _HINTS[kind] = tuple((field.name, hints[field.name]) for field in fields(kind))
    return _HINTS[kind]


def _problem_of_fields(made: Any, place: str) -> str:
    for name, hint in _hints(type(made)):
        problem = _problem(getattr(made, name), hint, f"{place}{name}")
        if problem:
            return problem
    return ""


def _problem(value: Any, hint: Any, place: str) -> str:
    """What is wrong with a value, empty when it is of a type."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Any:
        return ""
    if origin in (Union, types.UnionType):
        found = [_problem(value, each, place) for each in arguments]
        return min(found, key=bool)  # the empty one, where one of the types fits
    if is_dataclass(origin):
        if isinstance(value, origin):  # type: ignore[arg-type]
            return _problem_of_fields(value, f"{place}.")
    elif origin is dict and isinstance(value, dict):
        pairs = [(key, arguments[0], "key") for key in value]
        pairs += [(item, arguments[1], str(key)) for key, item in value.items()]
        return _first_problem(pairs, place)
    elif origin in (list, tuple) and isinstance(value, origin):
        if origin is tuple and arguments[-1] is not Ellipsis:
            if len(value) == len(arguments):
                pairs = [
                    (v, a, str(i)) for i, (v, a) in enumerate(zip(value, arguments, strict=True))
                ]
                return _first_problem(pairs, place)
        else:
            return _first_problem([(v, arguments[0], str(i)) for i, v in enumerate(value)], place)
    elif origin in (int, float, bool):
        allowed = (int, float) if origin is float else origin
        if isinstance(value, allowed) and isinstance(value, bool) == (origin is bool):
            return ""
    elif isinstance(value, origin):
        return ""
    name = getattr(hint, "__name__", str(hint)) if not arguments else str(hint)
    return f"{place} is {_shown(value)}, which is no {name}"


def _first_problem(items: Sequence[tuple[Any, Any, str]], place: str) -> str:
    problems = (_problem(value, hint, f"{place}[{key}]") for value, hint, key in items)
    return next((problem for problem in problems if problem), "")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 80 else shown[:77] + "..."


def _whole(digits: str) -> int:
    number = int(digits)
    if abs(number) > MOST:
        raise ValueError(f"a number of {len(digits)} digits")
    return number
