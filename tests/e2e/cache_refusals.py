"""What torch's caches of compiled graphs refuse of what STOF was given and of what it hands on."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

from stof_compile import backend


def refusal(gm: torch.fx.GraphModule) -> str:
    """Why the caches do not take a graph; empty where they do."""
    try:
        check_cacheable(gm)
    except BypassAOTAutogradCache as why:
        return str(why)
    return ""


@contextmanager
def refusals() -> Iterator[dict[str, list[str]]]:
    """Note what is refused of every graph that is captured, and that Inductor is given, within.

    One capture serves both, and the test that compiles: to trace a model is what takes the time.
    """
    found: dict[str, list[str]] = {"captured": [], "rewritten": []}
    read, compile_graph = backend.read_capture, backend.compile_with_inductor

    def captured(gm, inputs):
        found["captured"].append(refusal(gm))
        return read(gm, inputs)

    def rewritten(gm, inputs, options):
        found["rewritten"].append(refusal(gm))
        return compile_graph(gm, inputs, options)

    with (
        mock.patch.object(backend, "read_capture", captured),
        mock.patch.object(backend, "compile_with_inductor", rewritten),
    ):
        yield found


def assert_none_is_new(found: dict[str, list[str]]) -> None:
    """No graph is refused where none of those captured was."""
    assert len(found["rewritten"]) >= len(found["captured"]) > 0
    if not any(found["captured"]):
        assert found["rewritten"] == [""] * len(found["rewritten"])
