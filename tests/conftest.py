"""Shared set-up: every test starts from an empty Dynamo cache and a cache folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    # XDG_CACHE_HOME is what platformdirs reads on Linux: no test meets the user's measured choices
    folder: Path = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget all compiled code before and after a test that compiles."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
