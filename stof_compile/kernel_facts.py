"""Facts of our Triton kernels, worked out once a kernel instead of several times a call site.

Functionalisation and Inductor ask torch which arguments a user's kernel writes wherever it is
called, and torch lowers the kernel to Triton's IR each time it is asked (pytorch/pytorch#193227):
for twelve layers with four of our kernels each this was much of a cold compile. Torch's caches
and Inductor's wrapper likewise ask for the source of a kernel and of all that it calls.

Launches that overlap (kernels/overlap.py) need two answers more: a kernel that waits for the one
before writes what it would write without waiting, and Inductor has to launch it with the attribute
that makes the wait mean something; it has no way to ask for that in a user's kernel. Neither has it
one for a limit of registers (``register_limit.py``). Both are added to the code it writes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

import torch

from stof_compile.stored_operands import operands_stored

KERNELS = "stof_compile.kernels."
EFFECTS = ("identify_accessed_tensors", "identify_mutated_tensors")  # torch 2.13; 2.11
# as in kernels/overlap.py, overlap_kernel.py
ARGUMENT, REGISTERS, WAIT = "PDL", "REGISTERS", "start_after_previous("
AUTOTUNE = "@triton_heuristics.user_autotune("
SOURCE = ("user_defined_triton_kernel_transitive_closure_source_code",)
LIMITED = """try:
    from stof_compile.register_limit import user_autotune as limited_autotune
except ImportError:
    limited_autotune = triton_heuristics.user_autotune

@limited_autotune("""

_known: dict[tuple[Any, ...], Any] = {}
_lock = RLock()


@contextmanager
def remembered_kernel_facts(trains: bool = False) -> Iterator[None]:
    """Answer torch's questions from memory, for our own kernels, while this context is open.

    What a kernel writes depends on its source, its constants and the kinds of its arguments only,
    not on the numbers that it is given (where twelve layers have a mark each, for instance).
    Where torch has no such function, nothing is changed.

    Args:
        trains: gradients are recorded; launches do not overlap then.
    """
    from torch._higher_order_ops import triton_kernel_wrap
    from torch._inductor.codegen import wrapper

    from stof_compile.kernels.overlap import overlap_in_traces

    with _lock, ExitStack() as ending:
        for module, names, key in (
            (triton_kernel_wrap, EFFECTS, _effects_key),
            (wrapper, SOURCE, _source_key),
        ):
            name = next((name for name in names if hasattr(module, name)), None)
            if name is not None:
                asked = getattr(module, name)
                ending.callback(setattr, module, name, asked)
                setattr(module, name, _remembering(name, asked, key))
        writer: Any = getattr(wrapper, "PythonWrapperCodegen", None)
        if hasattr(writer, "define_kernel") and any(
            hasattr(triton_kernel_wrap, name) for name in EFFECTS
        ):
            ending.callback(setattr, writer, "define_kernel", writer.define_kernel)
            writer.define_kernel = _as_asked(writer.define_kernel)
            # a backward pass may run a kernel of the forward pass again, and is compiled at its
            # first call, when nothing of this holds any more
            if not trains:
                ending.enter_context(overlap_in_traces())
        ending.enter_context(operands_stored(_is_ours))
        yield


def _remembering(
    name: str, asked: Callable[..., Any], key_of: Callable[..., tuple[Any, ...] | None]
) -> Callable[..., Any]:
    def answer(*question: Any) -> Any:
        question = _as_if_alone(*question)
        about = key_of(*question)
        if about is None:
            return asked(*question)
        key = (name, *about)
        if key not in _known:
            _known[key] = asked(*question)
        return copy.copy(_known[key])

    return answer


def _as_if_alone(kernel: Any, *more: Any) -> tuple[Any, ...]:
    """The question about a kernel that does not wait for another: torch cannot read the wait."""
    if _is_ours(kernel) and more and isinstance(more[0], dict) and more[0].get(ARGUMENT):
        return (kernel, {**more[0], ARGUMENT: False}, *more[1:])
    return (kernel, *more)


def _as_asked(define: Callable[..., Any]) -> Callable[..., Any]:
    """``PythonWrapperCodegen.define_kernel`` that passes launch attribute and limit on."""

    def defining(self: Any, name: str, body: str, *rest: Any, **named: Any) -> Any:
        return define(self, name, with_register_limit(with_launch_attribute(body)), *rest, **named)

    return defining


def with_launch_attribute(body: str) -> str:
    """Inductor's code of a user's kernel; with the attribute if it waits for the kernel before.

    Without it the kernel is as right, and starts when the one before has ended.
    """
    head, mark, rest = body.partition("@triton.jit")
    if not mark or f"'{ARGUMENT}': True" not in head or WAIT not in rest:
        return body
    return head.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1) + mark + rest


def with_register_limit(body: str) -> str:
    """Inductor's code of a user's kernel; with its limit of registers, if it is ours and has one.

    Where this package cannot be imported, as in a process that was started without its folder, the
    kernel has no limit and is as right.
    """
    head, mark, rest = body.partition("@triton.jit")
    limit = re.search(rf"'{REGISTERS}': ([1-9][0-9]*)", head)
    if not mark or limit is None or AUTOTUNE not in head or WAIT not in rest:
        return body
    before, _, after = head.partition(AUTOTUNE)
    after = after.replace("triton_meta={", f"triton_meta={{'maxnreg': {limit[1]}, ", 1)
    return f"{before}{LIMITED}{after}{mark}{rest}"


def _is_ours(kernel: Any) -> bool:
    module = getattr(getattr(kernel, "fn", None), "__module__", None) or ""
    return bool(module.startswith(KERNELS))


def _source_key(kernel: Any, *epilogue: Any) -> tuple[Any, ...] | None:
    return (kernel.fn,) if _is_ours(kernel) and not any(epilogue) else None


def _effects_key(kernel: Any, kwargs: dict[str, Any], *descriptors: Any) -> tuple[Any, ...] | None:
    """What the answer depends on; None for what is not ours or cannot be told."""
    if not _is_ours(kernel) or any(descriptors):
        return None
    params = getattr(kernel, "params", ())
    numbers = {param.name for param in params if not param.is_constexpr}
    kinds: list[tuple[Any, ...]] = []
    for name, value in sorted(kwargs.items()):
        if isinstance(value, torch.Tensor):
            kinds.append((name, "tensor", value.dtype))
        elif hasattr(value, "get_dtype"):  # Inductor's own tensors
            kinds.append((name, "tensor", value.get_dtype()))
        elif type(value) is int and name in numbers:  # a 1 becomes a constant
            kinds.append((name, "number", value == 1, abs(value) < 2**31))
        elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
            kinds.append((name, type(value).__name__, value))
        else:
            return None
    return (kernel.fn, tuple(kinds))
