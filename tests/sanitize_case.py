"""What a case of ``sanitize.py`` is, and how it runs a kernel.

Operands, masks and fp64 references are made on the CPU by the helpers of the tests; a case copies
the operands to the GPU, runs one kernel and copies the result back, so that nothing but our own
kernels and copies runs there. Under ``TRITON_INTERPRET=1`` everything runs on the CPU.
"""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from norm_recipes import INTERPRETED


@dataclass(frozen=True)
class Case:
    """One run of a kernel.

    Args:
        name: unique; words of letters and digits with hyphens between them.
        launcher: module of ``kernels/`` whose function starts the kernel.
        run: makes the operands, runs the kernel and fails where the result is wrong.
        needs: what it runs on besides Triton: "", "gpu", "hopper", "tilelang", or "e4m3" (a GPU of
            capability 8.9 or newer, or the interpreter).
    """

    name: str
    launcher: str
    run: Callable[[], None]
    needs: str = ""


def reason_to_skip(case: Case) -> str:
    """Why a case cannot run here; "" where it can."""
    if not INTERPRETED and not torch.cuda.is_available():
        return "needs a GPU, or TRITON_INTERPRET=1"
    if case.needs == "e4m3":
        new = INTERPRETED or torch.cuda.get_device_capability() >= (8, 9)
        return "" if new else "needs a GPU of capability 8.9 or newer"
    if case.needs and INTERPRETED:
        return "the interpreter cannot run it"
    if case.needs == "hopper":
        if torch.cuda.get_device_capability()[0] != 9:
            return "needs a Hopper GPU"
        if importlib.util.find_spec("triton.experimental.gluon") is None:
            return "this Triton has no Gluon"
    if case.needs == "tilelang" and importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed"
    return ""


# -- from the CPU to the GPU and back -------------------------------------------------------------


def _there(value):
    """The same on the GPU: strides stay, and nothing is allocated behind the last element."""
    if isinstance(value, torch.Tensor):
        if INTERPRETED:
            return value
        steps = zip(value.shape, value.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps) if value.numel() else 0
        held = value.as_strided((extent,), (1,)).cuda()
        return held.as_strided(value.shape, value.stride(), 0)
    if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return [_there(item) for item in value]
    return value


def _back(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return tuple(map(_back, value)) if isinstance(value, tuple) else value


def on_gpu(function):
    """A launcher for tensors on the CPU."""

    def run(*arguments, **named):
        found = function(*map(_there, arguments), **{k: _there(v) for k, v in named.items()})
        if not INTERPRETED:
            torch.cuda.synchronize()
        return _back(found)

    return run


def as_on_gpu():
    """A context in which the interpreter converts numbers as a GPU does."""
    if not INTERPRETED:
        return nullcontext()
    from right_e4m3 import right_e4m3

    return right_e4m3()


def check_template(template, recipe, operands, config=None, scale=2.0):
    """As ``template_checks.check_template``, for operands on the CPU.

    The template is not asked whether it takes the recipe: these problems are smaller than what
    some kernels are offered for.
    """
    from close import assert_close
    from linear_recipes import on_gpu as labelled
    from template_checks import HOPPER

    recipe = labelled(recipe)
    call = template.build(recipe, config or template.first(recipe, HOPPER))
    out = on_gpu(call.run)(operands)
    assert out.is_contiguous() and out.dtype == recipe.result.dtype
    assert out.shape == recipe.result.shape
    assert_close(out, template.reference(recipe, operands, torch.float64), scale=scale)


# -- lists of cases -------------------------------------------------------------------------------


def forms(prefix, launcher, run, found, needs=""):
    """Cases by the end of their name; arguments of ``run``, a tuple where there are several."""
    for name, arguments in found.items():
        given = arguments if isinstance(arguments, tuple) else (arguments,)
        yield Case(f"{prefix}-{name}", launcher, partial(run, *given), needs)


def run_case(case: Case, poison: bool) -> None:
    """Run a case once.

    Args:
        poison: memory that nothing was written to is NaN; it must be off for a tool that looks
            for reads of such memory.
    """
    from template_checks import poisoned_memory

    with poisoned_memory() if poison else nullcontext():
        case.run()
