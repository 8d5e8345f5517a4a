"""Tuning files: what the store holds of one environment, as one file that travels."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from stof_compile.errors import StofPlanError
from stof_compile.places import not_written
from stof_compile.store import FORMAT as STORE_FORMAT
from stof_compile.store import entries, environment_parts, write_named

FORMAT = 1
"""Raised when the form of the file changes; ``STORE_FORMAT`` stands for what the values mean."""

Item = tuple[str, str, dict[str, Any]]
"""(kind, key, value)"""


@dataclass(frozen=True)
class TuningFile:
    """Contents of a tuning file.

    Args:
        environment: its key.
        items: what was measured there.
        made: when, as ISO 8601 in UTC.
        store_format: of the values.
    """

    environment: str
    items: tuple[Item, ...]
    made: str
    store_format: int = STORE_FORMAT

    @staticmethod
    def of(root: Path, environment: str) -> TuningFile:
        """What a cache holds of an environment; files of another format are left out."""
        made = datetime.now(timezone.utc).isoformat(timespec="seconds")
        found = tuple(
            (entry.kind, entry.key, entry.value)
            for entry in entries(root)
            if entry.environment == environment and entry.value is not None
        )
        return TuningFile(environment, found, made)

    def write(self, path: Path) -> None:
        """Write the file, or leave what is there.

        Raises:
            StofOptionError: something else is there. StofPlaceError: it cannot be written.
        """
        body = {
            "stof_tuning_file": FORMAT,
            "made": self.made,
            "environment": {"key": self.environment, **environment_parts(self.environment)},
            "store_format": self.store_format,
            "checksum": self._checksum(),
            "entries": [{"kind": k, "key": key, "value": value} for k, key, value in self.items],
        }
        try:
            write_named(path, json.dumps(body, indent=1) + "\n")
        except OSError as error:
            raise not_written(str(path), error) from error

    @staticmethod
    def read(path: Path) -> TuningFile:
        """Read a tuning file.

        Raises:
            StofPlanError: it cannot be read, is damaged, or is something else.
        """
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise StofPlanError(
                f"{path} cannot be read ({error.strerror or error}): name a file that "
                "`stof cache export` has written"
            ) from error
        # ValueError: broken JSON or broken UTF-8; RecursionError: brackets in brackets
        except (ValueError, RecursionError) as error:
            raise StofPlanError(
                f"{path} is no tuning file, or a damaged one ({error}): copy it again, or write it "
                "again with `stof cache export`"
            ) from error
        found = body.get("stof_tuning_file") if isinstance(body, dict) else None
        if found is None:
            raise StofPlanError(
                f"{path} is no tuning file: `stof cache export` writes one; a plan goes into "
                "options={'plan': ...}"
            )
        if found != FORMAT:
            raise StofPlanError(
                f"{path} is a tuning file of format {found!r}, this STOF reads format {FORMAT}: "
                "export it with the STOF that is to import it"
            )
        try:
            items = tuple(
                (str(e["kind"]), str(e["key"]), dict(e["value"])) for e in body["entries"]
            )
            key, made = str(body["environment"]["key"]), str(body["made"])
            file = TuningFile(key, items, made, int(body["store_format"]))
            whole = file._checksum() == body["checksum"]
            for name in (key, *(name for item in items for name in item[:2])):
                name.encode()  # lone surrogates name no file
        # OverflowError: a format of infinity
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StofPlanError(
                f"{path} is a damaged tuning file ({error!r}): copy it again, or write it again "
                "with `stof cache export`"
            ) from error
        if not whole:
            raise StofPlanError(
                f"{path} is damaged or was edited (its checksum is of other contents): copy it "
                "again, or write it again with `stof cache export`"
            )
        return file

    def _checksum(self) -> str:
        covered = [self.environment, self.store_format, self.items]
        return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()
