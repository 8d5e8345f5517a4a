"""Environments: which are here, which are in a cache, and how two of them differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stof_compile.device import device_facts
from stof_compile.errors import StofOptionError
from stof_compile.store import Entry, entries, environment_key, environment_parts

Difference = tuple[str, str, str]
"""(what, there, here)"""


@dataclass
class Stored:
    """What a cache holds of one environment.

    Args:
        key: of the environment. devices: of this machine that it is the environment of.
        kinds: how many entries of each kind.
        oldest_s, newest_s: when they were written, in seconds since 1970.
    """

    key: str
    devices: list[str]
    kinds: Counter[str] = field(default_factory=Counter)
    size_bytes: int = 0
    oldest_s: float = 0.0
    newest_s: float = 0.0

    def add(self, entry: Entry) -> None:
        """Count an entry."""
        self.oldest_s = min(self.oldest_s or entry.modified_s, entry.modified_s)
        self.newest_s = max(self.newest_s, entry.modified_s)
        self.kinds[entry.kind] += 1
        self.size_bytes += entry.size_bytes


def environments_here() -> dict[str, str]:
    """Device -> key of its environment; first the one that a model is tuned on by default."""
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] + ["cpu"]
    return {name: environment_key(device_facts(name)) for name in names}


def environments_in(found: Iterable[Entry], here: Mapping[str, str]) -> list[Stored]:
    """The environments of some entries, those of this machine first."""
    stored: dict[str, Stored] = {}
    for entry in found:
        key = entry.environment
        if key not in stored:
            stored[key] = Stored(key, [name for name, own in here.items() if own == key])
        stored[key].add(entry)
    return sorted(stored.values(), key=lambda item: (not item.devices, item.key))


def choose_environment(root: Path, wanted: str | None) -> str:
    """The environment that a command is about.

    Args:
        wanted: its key, or words that only one key of the cache has in it; None = of this machine.
    Raises:
        StofOptionError: the cache holds nothing of it, or the words fit several.
    """
    here = environments_here()
    keys = [stored.key for stored in environments_in(entries(root), here)]
    if wanted is None:
        fitting = [key for key in here.values() if key in keys][:1]
        what = f"of this machine ({next(iter(here.values()))})"
    else:
        fitting = [key for key in keys if wanted.lower() in key.lower()]
        fitting = [wanted] if wanted in fitting else fitting
        what = f"of --environment {wanted!r}"
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise StofOptionError(
            f"--environment {wanted!r} fits {len(fitting)} environments; give more of its key:"
            + _listed(fitting)
        )
    others = f"; --environment takes one of:{_listed(keys)}" if keys else ": tune a model first"
    absent = "" if root.exists() else " (there is no such folder)"
    raise StofOptionError(f"{root}{absent} holds nothing {what}{others}")


def differences(there: str, here: Mapping[str, str]) -> list[Difference]:
    """How an environment differs from the one of this machine that is most like it.

    Returns:
        Nothing where it is of this machine.
    """
    found = [_compared(environment_parts(there), environment_parts(own)) for own in here.values()]
    return min(found, key=len)


def _compared(there: Mapping[str, str], here: Mapping[str, str]) -> list[Difference]:
    names = [*there, *(name for name in here if name not in there)]
    pairs = ((name, there.get(name, "nothing"), here.get(name, "nothing")) for name in names)
    return [(name, left, right) for name, left, right in pairs if left != right]


def _listed(keys: Iterable[str]) -> str:
    return "".join(f"\n  {key}" for key in keys)
