"""Hand-over of a rewritten graph to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._dynamo.convert_frame import _clear_fake_mode_weakrefs
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from stof_compile.early_start import (
    EARLY,
    SETTING,
    early_start_settings,
    kernels_starting_early,
    with_every_wait,
)
from stof_compile.kernel_facts import remembered_kernel_facts
from stof_compile.options import StofOptions


def config_patches(options: StofOptions) -> dict[str, Any]:
    """Return the Inductor settings that the mode and ``options["inductor"]`` stand for."""
    settings = _asked_for(options)
    return early_start_settings(settings) if is_replayed(options) else settings


def _asked_for(options: StofOptions) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    mode = list_mode_options(options.mode) if options.mode else {}
    return {**mode, **options.inductor}


def uses_cuda_graphs(options: StofOptions) -> bool:
    """Whether Inductor wraps the compiled graph in CUDA graphs."""
    from torch._inductor import config

    return bool(_asked_for(options).get("triton.cudagraphs", config.triton.cudagraphs))


def is_replayed(options: StofOptions) -> bool:
    """Whether calls are replays of CUDA graphs: Inductor's, or, under reduce-overhead with settings
    that switch Inductor's off, of graphs that the caller captures.
    """
    return uses_cuda_graphs(options) or options.mode == "reduce-overhead"


def compile_with_inductor(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: StofOptions
) -> Callable[..., Any]:
    """Compile a torch-level graph as ``torch.compile`` would, with the mode and settings given.

    Takes ownership of ``gm``.
    """
    trains = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
    )
    return compile_with_settings(gm, example_inputs, config_patches(options), trains)


def compile_with_settings(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], trains: bool
) -> Callable[..., Any]:
    """Compile a torch-level graph under settings of Inductor; takes ownership of ``gm``.

    Args:
        trains: gradients are recorded.
    """
    from torch._inductor.compile_fx import compile_fx

    given = dict(settings)
    if trains and given.get(SETTING) == EARLY:  # a backward pass is compiled later
        del given[SETTING]
    given = with_every_wait(given)
    with remembered_kernel_facts(trains), kernels_starting_early(), _tracing(inputs):
        compiled = compile_fx(gm, list(inputs), config_patches=given or None)
    return cast("Callable[..., Any]", compiled)  # its other results belong to ahead-of-time modes


@contextmanager
def _tracing(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Where Dynamo does not trace, as at a call: the context that ``compile_fx`` would make.

    What is compiled holds its fake mode, and that remembers real inputs by weak references, with
    which ``torch.utils.swap_tensors`` takes no parameter. Dynamo removes those of its own modes.
    """
    if detect_fake_mode(list(example_inputs)) is not None:
        yield
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with tracing(TracingContext(mode)):
            yield
    finally:
        _clear_fake_mode_weakrefs(mode)
