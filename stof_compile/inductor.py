"""Hand-over of a rewritten graph to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from stof_compile.kernel_facts import remembered_kernel_facts
from stof_compile.options import StofOptions


def config_patches(options: StofOptions) -> dict[str, Any]:
    """Return the Inductor settings that the mode and ``options["inductor"]`` stand for."""
    from torch._inductor import list_mode_options

    mode = list_mode_options(options.mode) if options.mode else {}
    return {**mode, **options.inductor}


def uses_cuda_graphs(options: StofOptions) -> bool:
    """Whether Inductor wraps the compiled graph in CUDA graphs."""
    from torch._inductor import config

    return bool(config_patches(options).get("triton.cudagraphs", config.triton.cudagraphs))


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

    with remembered_kernel_facts(trains):
        compiled = compile_fx(gm, list(inputs), config_patches=dict(settings) or None)
    return cast("Callable[..., Any]", compiled)  # its other results belong to ahead-of-time modes
