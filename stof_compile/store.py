"""Everything STOF keeps on disk between processes: small JSON files, atomic and locked.

Layout: ``<root>/<environment>/<kind>/<hash of key>.json``. The environment names device and
versions, so that a choice measured on another machine is never met. A file that cannot be read is
a miss with a warning, a folder that cannot be written to is a warning: losing the cache costs time,
never a result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_path

from stof_compile.device import DeviceFacts

log = logging.getLogger(__name__)

FORMAT = 3
"""Raised when the meaning of stored files changes; files of another format are misses."""


@dataclass(frozen=True)
class Entry:
    """One stored file, for listings."""

    environment: str
    kind: str
    key: str
    path: Path
    size_bytes: int


class Store:
    """A folder of JSON values addressed by (environment, kind, key).

    Args:
        root: folder, created on the first write.
        environment: see :func:`environment_key`.
    """

    def __init__(self, root: Path, environment: str) -> None:
        self.root = Path(root)
        self.environment = environment
        self._folder = self.root / _file_name(environment)

    def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """The stored value, or None: never written, unreadable, or of another format."""
        path = self._path(kind, key)
        body = _read(path)
        if body is None or body.get("format") != FORMAT or body.get("key") != key:
            return None
        value = body.get("value")
        return value if isinstance(value, dict) else None

    def put(self, kind: str, key: str, value: Mapping[str, Any]) -> None:
        """Write a value; readers see the old one or the new one, never a part.

        Args:
            value: plain JSON; anything else is a mistake of the caller and raises TypeError.
        """
        path = self._path(kind, key)
        body = {
            "format": FORMAT,
            "environment": self.environment,
            "kind": kind,
            "key": key,
            "value": dict(value),
        }
        text = json.dumps(body, indent=1, sort_keys=True)
        try:
            write_atomic(path, text)
        except OSError as error:
            log.warning("choice not kept, %s cannot be written: %s", path, error)

    @contextmanager
    def lock(self, name: str, timeout_s: float = 600.0) -> Iterator[None]:
        """Hold a lock between processes, so that only one of them measures.

        A folder that cannot be written to, or a lock not given within ``timeout_s`` seconds, is a
        warning: then two processes may measure the same thing, which is slow and not wrong.
        """
        path = self._folder / "locks" / f"{_digest(name)}.lock"
        held: FileLock | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held = FileLock(path, timeout=timeout_s)
            held.acquire()
        except (OSError, NotImplementedError) as error:  # filelock's Timeout is an OSError
            log.warning("going on without the lock %s: %s", path, error)
            held = None
        try:
            yield
        finally:
            if held is not None:
                held.release()

    def _path(self, kind: str, key: str) -> Path:
        return self._folder / _file_name(kind) / f"{_digest(key)}.json"


def default_root() -> Path:
    """The user's cache folder of STOF."""
    return user_cache_path("stof-compile", appauthor=False)


def environment_key(facts: DeviceFacts) -> str:
    """Name what a measured time depends on beside the problem: device and versions."""
    device = facts.name if facts.is_cuda else f"{facts.name} {facts.arch} {facts.units}t"
    parts = [
        device,
        facts.runtime,
        facts.arch,
        f"torch {torch.__version__}",
        f"triton {_version('triton')}",
        f"stof {_version('stof-compile')}",
    ]
    return " | ".join(parts)


def entries(root: Path) -> Iterator[Entry]:
    """All stored values below ``root``, over all environments, sorted by path."""
    for path in sorted(Path(root).glob("*/*/*.json")):
        body = _read(path)
        if body is None:
            continue
        yield Entry(
            environment=str(body.get("environment", "?")),
            kind=str(body.get("kind", "?")),
            key=str(body.get("key", "?")),
            path=path,
            size_bytes=path.stat().st_size,
        )


def clear(root: Path) -> int:
    """Delete all stored values below ``root``; returns how many there were.

    Only files of the layout above go; whatever else lies in the folder stays.
    """
    count = 0
    for path in sorted(Path(root).glob("*/*/*.json")):
        if re.fullmatch(r"[0-9a-f]{32}", path.stem):
            path.unlink(missing_ok=True)
            count += 1
    for locks in Path(root).glob("*/locks"):
        shutil.rmtree(locks, ignore_errors=True)
    return count


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# -- helpers --------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any] | None:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: broken JSON or broken UTF-8
        log.warning("stored file %s is unreadable and ignored: %s", path, error)
        return None
    if not isinstance(body, dict):
        log.warning("stored file %s is no JSON object and ignored", path)
        return None
    return body


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _file_name(text: str) -> str:
    # readable for people, unique through the digest, short enough for every file system
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")[:60]
    return f"{readable}-{_digest(text)[:10]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
