"""What counts as a browser: something on PATH that tells its version."""

import subprocess
from pathlib import Path

import pytest
from find_browser import find_browser

CI = Path(__file__).resolve().parent.parent.parent / ".ci" / "browser"
SNAP = "requires the chromium snap to be installed. Please install it with: snap install chromium"
STUBS = {
    "stub": f"echo \"Command '$0' {SNAP}\" >&2; exit 1",
    "stub-that-ends-well": f"echo \"Command '$0' {SNAP}\"",
    "version-and-failure": "echo Chromium 1.2.3; exit 1",
}
WORKS = 'if [ "$1" = --version ]; then echo Chromium 156.0.8078.79; else exit 1; fi'


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Puts scripts on a PATH that has nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return put


def said_by_ci():
    return subprocess.run(["/bin/sh", CI], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("stub", STUBS)
def test_a_stub_is_no_browser(put, stub, monkeypatch):
    monkeypatch.delenv("STOF_INSTALL_BROWSER", raising=False)
    put("chromium-browser", STUBS[stub])
    assert find_browser() is None
    assert "browser tests will be skipped" in said_by_ci()
    behind = put("google-chrome", WORKS)
    assert find_browser() == behind and said_by_ci() == ""


def test_what_cannot_be_run_is_none(put, tmp_path):
    put("chromium", "")
    (tmp_path / "chromium").write_text("#!/no/such/interpreter\n")
    assert find_browser() is None
