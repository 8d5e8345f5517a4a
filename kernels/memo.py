"""A bound on what is remembered for as long as the process lives."""

from collections.abc import MutableMapping
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

MOST = 1000


def remember(known: MutableMapping[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add to what is known; where that has :data:`MOST` entries, it begins anew."""
    if len(known) >= MOST:
        known.clear()
    known[key] = value
