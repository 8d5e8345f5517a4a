"""The segment as the rest of the graph would run it without us: library products and Inductor."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from stof_compile.fusion.recipe import Recipe, Ref, run_recipe
from stof_compile.fusion.rotate import rotated
from stof_compile.short_gelu import HALF_TYPES, short_gelu

log = logging.getLogger(__name__)

OWN_SETTINGS = ("_", "trace", "compile_threads", "worker_")
"""How settings of Inductor begin that a process has for itself."""


def library_call(
    recipe: Recipe, operands: Sequence[Tensor]
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Compile a recipe with Inductor, as plain operations.

    A recipe of one product is the library's kernel, called without compiling anything: Inductor
    would call the same. A recipe that ends with a rotation gives its result in parts, as the
    graph has them without us: each value that is rotated, then a view of what stays as it is.

    Args:
        operands: tensors it will be called with (their shapes and strides count).
    """
    if not needs_compiling(recipe):
        return lambda *given: run_recipe(recipe, given)
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(recipe_graph(recipe), list(operands))

    def run(*given: Tensor) -> Tensor | tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = tuple(compiled(*given))
        return parts if len(parts) > 1 else parts[0]

    return run


def needs_compiling(recipe: Recipe) -> bool:
    """Whether Inductor writes a kernel for a recipe: one of a product calls the library."""
    working = [step.kind for step in recipe.steps if step.kind != "reshape"]
    return working not in ([], ["linear"])


def recipe_graph(recipe: Recipe) -> GraphModule:
    """A recipe as a torch-level graph with one placeholder an operand and one result, or the
    parts of a rotation.
    """
    graph = Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies: list[Any] = [
        torch.fx.Proxy(graph.placeholder(f"operand_{i}"), tracer)
        for i in range(len(recipe.operands))
    ]
    results: list[Any] = []
    parts: tuple[Any, ...] = ()
    for step in recipe.steps:
        values = [(proxies if ref.kind == "operand" else results)[ref.index] for ref in step.inputs]
        is_gelu = step.kind == "activation" and step.attr("name") == "gelu"
        on_gpu = any(operand.device == "cuda" for operand in recipe.operands)
        if is_gelu and on_gpu and step.dtype in HALF_TYPES:
            results.append(short_gelu(values[0], step.dtype))  # as the back end writes it
            continue
        if step.kind == "rope" and step is recipe.result:
            rows, columns = prod(step.shape[:-1]), step.shape[-1]
            sizes = rows, columns, recipe.shape(step.inputs[1])[0]
            value, cos, sin = values
            flat, head_dim = value.reshape(rows, columns), int(step.attr("head_dim"))
            parts = rotated(flat, cos, sin, sizes, head_dim, step.attr("heads"))
            continue
        inputs = tuple(Ref("operand", i) for i in range(len(values)))
        alone = Recipe(recipe.operands, (replace(step, inputs=inputs),))
        results.append(run_recipe(alone, values))
    graph.output(tuple(part.node for part in parts or results[-1:]))
    return GraphModule(torch.nn.Module(), graph)


def inductor_settings() -> bytes:
    """Inductor's settings as far as they are plain values, pickled for a process that compiles for
    this one; empty where they cannot be copied. What else they hold may be code of the user's,
    which no other process imports.
    """
    import torch._inductor.config as settings

    try:
        held = settings.get_config_copy().items()
    except Exception as failure:  # a copy of a pass of the user's may raise anything
        log.debug("settings of Inductor cannot be copied: %r", failure)
        return b""
    return pickle.dumps({k: v for k, v in held if not k.startswith(OWN_SETTINGS) and is_plain(v)})


def is_plain(value: Any) -> bool:
    """Whether a setting is made of numbers, texts and collections of them, and no code."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(kept) for key, kept in value.items())
    if isinstance(value, list | tuple | set):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
