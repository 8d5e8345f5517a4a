"""Everything STOF keeps on disk between processes: small JSON files, atomic and locked.

Layout: ``<root>/<environment>/<kind>/<hash of key>.json``. The environment names device and
versions, so that a choice measured on another machine is never met. A file that cannot be read is
a miss with a warning, a folder that cannot be written to is a warning: losing the cache costs time,
never a result. ``<root>/bytecode`` is Python's (``bytecode.py``); nothing here reads or deletes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from filelock import FileLock
from platformdirs import user_cache_path

from stof_compile.device import DeviceFacts
from stof_compile.places import NO_FILE

log = logging.getLogger(__name__)

FORMAT = 15
"""Raised when what stored files say changes its meaning, or a kernel so much that it should be
measured anew; files of another format are misses."""

ENVIRONMENT_PARTS = ("device", "runtime", "arch", "torch", "triton", "stof")
"""What an environment key is made of, in this order."""


@dataclass(frozen=True)
class Entry:
    """One stored file, for listings.

    Args:
        environment, kind, key: what it is addressed by.
        modified_s: when it was written, in seconds since 1970.
        value: what is stored; None where the file has another format, which is never read.
    """

    environment: str
    kind: str
    key: str
    path: Path
    size_bytes: int
    modified_s: float
    value: dict[str, Any] | None


@dataclass(frozen=True)
class Written:
    """What :meth:`Store.put_all` did with its values."""

    added: int
    replaced: int
    kept: int


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
        path, text = self._path(kind, key), self._text(kind, key, value)
        try:
            write_atomic(path, text)
        except OSError as error:
            log.warning("choice not kept, %s cannot be written: %s", path, error)

    def put_all(
        self, items: Iterable[tuple[str, str, Mapping[str, Any]]], *, overwrite: bool = False
    ) -> Written:
        """Write many values, none unless all can be staged, while no other process does the same.

        Args:
            items: (kind, key, value).
            overwrite: replace values that are there; else they are kept.
        Raises:
            OSError: the folder cannot be written to; mostly before anything was changed.
        """
        staged: list[tuple[str, Path]] = []
        replaced = kept = 0
        with self.lock("put_all"):
            try:
                for kind, key, value in items:
                    there = self.get(kind, key) is not None
                    if there and not overwrite:
                        kept += 1
                        continue
                    replaced += there
                    path = self._path(kind, key)
                    staged.append((_write_beside(path, self._text(kind, key, value)), path))
                for temporary, path in staged:
                    os.replace(temporary, path)
            finally:
                for temporary, _ in staged:
                    Path(temporary).unlink(missing_ok=True)
        return Written(len(staged) - replaced, replaced, kept)

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

    def _text(self, kind: str, key: str, value: Mapping[str, Any]) -> str:
        body = {
            "format": FORMAT,
            "environment": self.environment,
            "kind": kind,
            "key": key,
            "value": dict(value),
        }
        return json.dumps(body, indent=1, sort_keys=True)

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


def environment_parts(key: str) -> dict[str, str]:
    """An environment key taken apart: :data:`ENVIRONMENT_PARTS` -> value.

    A key of another form is one part, ``environment``.
    """
    values = key.split(" | ")
    if len(values) != len(ENVIRONMENT_PARTS):
        return {"environment": key}
    pairs = zip(ENVIRONMENT_PARTS, values, strict=True)
    return {name: value.removeprefix(f"{name} ") for name, value in pairs}


def entries(root: Path) -> Iterator[Entry]:
    """All stored values below ``root``, over all environments, sorted by path."""
    for path in _stored_files(root):
        body = _read(path)
        if body is None:
            continue
        try:
            about = path.stat()
        except FileNotFoundError:  # another process has just deleted it
            continue
        value = body.get("value") if body.get("format") == FORMAT else None
        yield Entry(
            environment=str(body.get("environment", "?")),
            kind=str(body.get("kind", "?")),
            key=str(body.get("key", "?")),
            path=path,
            size_bytes=about.st_size,
            modified_s=about.st_mtime,
            value=value if isinstance(value, dict) else None,
        )


def damaged_files(root: Path, environment: str = "") -> list[Path]:
    """Stored files below ``root`` that cannot be read, of one environment or of all."""
    own = _file_name(environment) if environment else ""
    return [
        path
        for path in _stored_files(root)
        if (not own or path.parents[1].name == own) and _is_damaged(path)
    ]


def _is_damaged(path: Path) -> bool:
    """Whether the contents are none of ours; not where they cannot be looked at now."""
    try:
        return not isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True


def clear(root: Path) -> int:
    """Delete all stored values below ``root``; returns how many there were.

    Only files of the layout above go; whatever else lies in the folder stays.
    """
    count = 0
    for path in _stored_files(root):
        path.unlink(missing_ok=True)
        count += 1
    for locks in Path(root).glob("*/locks"):
        shutil.rmtree(locks, ignore_errors=True)
    return count


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that no reader ever sees a part of it; the umask says who may read."""
    temporary = _write_beside(path, text)
    try:
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_named(path: Path, text: str) -> None:
    """Write a text file that a user named, atomically.

    Raises:
        OSError: it cannot be written, or is there and no ordinary file.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, NO_FILE, str(path))
    write_atomic(path, text)


# -- helpers --------------------------------------------------------------------------------------


def _stored_files(root: Path) -> list[Path]:
    found = sorted(Path(root).glob("*/*/*.json"))
    return [path for path in found if re.fullmatch(r"[0-9a-f]{32}", path.stem)]


def _write_beside(path: Path, text: str) -> str:
    """Write a text into a new file in the folder of ``path``; returns its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # tempfile would make it private, and to ask for the umask is to change it for a moment
    temporary = str(path.parent / f".{uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return temporary


def _read(path: Path) -> dict[str, Any] | None:
    body = _parsed(path)
    if isinstance(body, str):
        log.warning("stored file %s %s and ignored", path, body)
        return None
    return body


def _parsed(path: Path) -> dict[str, Any] | str | None:
    """The contents of a stored file, what is wrong with it, or None where there is none."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    # ValueError: broken JSON or broken UTF-8; RecursionError: brackets in brackets
    except (OSError, ValueError, RecursionError) as error:
        return f"is unreadable ({error})"
    return body if isinstance(body, dict) else "is no JSON object"


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
