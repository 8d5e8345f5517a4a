"""Places on disk: whether they can be written to; those that a user named are tried."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from stof_compile.errors import StofOptionError, StofPlaceError

NO_FILE = "is no ordinary file"


def check_file(path: Path, what: str) -> None:
    """Refuse a file that cannot be written, before what is to stand in it is made.

    Folders that lack are made and deleted again; a file that is there stays as it is.

    Args:
        what: the option and its value, for the message.
    Raises:
        StofOptionError: something else than a file is there. StofPlaceError: it cannot be written.
    """
    path = path.resolve()
    if path.is_dir():
        raise StofOptionError(f"{what} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise StofOptionError(f"{what} {NO_FILE}; name another one")
    _try(path.parent, what)


def check_folder(path: Path, what: str) -> None:
    """Refuse a folder that cannot be made or written to; as :func:`check_file`."""
    if path.exists() and not path.is_dir():
        raise StofOptionError(f"{what} is a file; name a folder")
    _try(path.resolve(), what)


def can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, or it can be made, as far as permissions tell."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK)


def not_written(what: str, error: OSError) -> StofOptionError:
    """The error for a place whose writing failed.

    Returns:
        A :class:`StofPlaceError`, or a plain option error where something else is there: then the
        call was wrong.
    """
    reason = error.strerror or str(error)
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        return StofOptionError(
            f"{what} cannot be written: {reason} ({error.filename}); name another place"
        )
    return StofPlaceError(
        f"{what} cannot be written: {reason}; name a place that can be written to, or make room"
    )


def _try(folder: Path, what: str) -> None:
    lacking = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".stof-"):
            pass
    except OSError as error:
        raise not_written(what, error) from error
    finally:
        for place in lacking:
            with suppress(OSError):  # not made, or somebody else has put something there
                place.rmdir()
