"""Finds the Chromium that shows the HTML report, for its pictures and its tests."""

from __future__ import annotations

import re
import shutil
import subprocess

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MISSING = f"no browser: none of {', '.join(BROWSERS)} on PATH runs (apt-get install chromium)"
ANSWER_S = 30.0


def find_browser() -> str | None:
    """Path of the first browser on PATH that tells its version, None where there is none.

    Ubuntu's ``chromium-browser`` is a script that only asks for its snap.
    """
    paths = (path for name in BROWSERS if (path := shutil.which(name)))
    return next((path for path in paths if _tells_version(path)), None)


def _tells_version(path: str) -> bool:
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and re.search(r"\d+\.\d+", done.stdout) is not None
