"""Torch's bytecode: a process that finds none compiles torch's sources as it imports them.

Python keeps bytecode beside the sources unless it is told to write none or cannot write there, and
some installers leave it to that. On a host with H100s the modules that compile took 14.4 to 16.1 s
to import without bytecode, and 4.7 to 5.6 s with it (torch 2.11).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stof_compile.places import can_write

NONE_WRITTEN = "PYTHONDONTWRITEBYTECODE"
FOLDER = "PYTHONPYCACHEPREFIX"
SOURCES = ("__init__.py", "_inductor/compile_fx.py")
"""Modules of torch that every process imports that compiles; the others go with them."""
OTHERS_WRITE = 0o022  # bits of a folder's mode


@dataclass(frozen=True)
class LackingBytecode:
    """Bytecode that is not there, and that no import here would write.

    Args:
        file: where Python looks for it. forbidden: Python was told to write none.
        writable: whether the file could be written.
    """

    file: Path
    forbidden: bool
    writable: bool


def lacking_bytecode(torch_folder: Path) -> LackingBytecode | None:
    """What every process looks for in vain; None where it is there, or an import leaves it there.

    Args:
        torch_folder: of torch's sources.
    """
    forbidden = sys.dont_write_bytecode
    for source in (torch_folder / name for name in SOURCES):
        file = Path(importlib.util.cache_from_source(str(source)))
        writable = can_write(file.parent)
        if source.exists() and not file.exists() and (forbidden or not writable):
            return LackingBytecode(file, forbidden, writable)
    return None


def keeping_bytecode(
    environment: Mapping[str, str], folder: Path, torch_folder: Path
) -> dict[str, str]:
    """An environment for processes of ours: where torch lacks bytecode, they keep it in a folder.

    Not to write any is meant for other folders than ours. One that the user has for bytecode stays.

    Args:
        folder: made if it is not there. Code is read from it: not used where others may write.
        torch_folder: of torch's sources.
    """
    kept = dict(environment)
    if sys.pycache_prefix or kept.get(FOLDER) or lacking_bytecode(torch_folder) is None:
        return kept
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError:
        return kept
    if about.st_uid == os.getuid() and not about.st_mode & OTHERS_WRITE and can_write(folder):
        kept.pop(NONE_WRITTEN, None)
        kept[FOLDER] = str(folder)
    return kept
