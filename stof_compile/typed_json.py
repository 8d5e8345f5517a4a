"""Dataclasses rebuilt from JSON: whether their fields have the types they declare."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")
_HINTS: dict[type, tuple[tuple[str, Any], ...]] = {}  # of each dataclass seen


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


def _problem_of_fields(made: Any, place: str) -> str:
    kind = type(made)
    if kind not in _HINTS:
        hints = get_type_hints(kind)
        _HINTS[kind] = tuple((field.name, hints[field.name]) for field in fields(kind))
    for name, hint in _HINTS[kind]:
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
    shown = repr(value)
    name = getattr(hint, "__name__", str(hint)) if not arguments else str(hint)
    return f"{place} is {shown if len(shown) < 80 else shown[:77] + '...'}, which is no {name}"


def _first_problem(items: Sequence[tuple[Any, Any, str]], place: str) -> str:
    problems = (_problem(value, hint, f"{place}[{key}]") for value, hint, key in items)
    return next((problem for problem in problems if problem), "")
