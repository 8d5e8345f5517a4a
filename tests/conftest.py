"""Shared set-up: a private cache folder, and skips for what this process cannot run."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # the cores are taken: a pool of Inductor's for each test process only imports torch once more
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Dynamo makes many objects and torch and transformers leave millions: with Python's thresholds a
# sixth of the time goes into walking over them, with (10_000, 10, 10) still a twentieth. Tests in
# which garbage matters collect it
gc.set_threshold(50_000, 20, 20)

# how long an example takes says something about the machine only
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# in CI the same examples each time: a new one must not stop an unrelated change; local runs explore
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture
def bench_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test import the modules of bench/, some of which have names of modules of tests/."""
    folder = Path(__file__).resolve().parent.parent / "bench"
    monkeypatch.syspath_prepend(str(folder))
    names = [path.stem for path in folder.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_interpreter = pytest.mark.skip(reason="needs a process with TRITON_INTERPRET=1")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("interpreter") and os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker(no_interpreter)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and tests live as long as the process


def pytest_unconfigure() -> None:
    gc.unfreeze()


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
