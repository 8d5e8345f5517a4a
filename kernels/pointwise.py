"""Elementwise chains in one pass: the kernel of a program, made from generated source, and launch.

The source is executed as a module that exists in ``linecache`` only: ``inspect`` reads it there, so
that Triton compiles it and torch's caches key on it, and nothing has to be written to disk.
"""

import hashlib
import json
import linecache
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from .operand_checks import check_gpu, check_operand, check_power_of_two, require
from .pointwise_program import (
    ACTIVATIONS,
    ARITHMETIC,
    BINARY,
    POWERS,
    UNARY,
    Access,
    read_program,
    source_of,
)
from .problem import launchable, on_device

_NAME = "stof::fused_pointwise"


def pointwise_forward(
    operands: Sequence[Tensor], program: str, shape: Sequence[int], config: Sequence[int]
) -> Tensor:
    """Launch the kernel of a program.

    Args:
        operands: at least one, fp16, bf16 or fp32 on one device; each broadcasts to ``shape`` by
            trailing dimensions. Contiguous ones are read in place when what they are broadcast
            over comes before or behind their own dimensions; others are copied first.
        program: JSON, see ``pointwise_program``.
        shape: of the result.
        config: [elements of a program, a power of two; warps].
    Returns:
        Contiguous tensor of ``shape`` in the program's dtype.
    Raises:
        ValueError: an operand, the program or the config does not fit.
    """
    block, num_warps = config
    check_power_of_two(_NAME, block=block, num_warps=num_warps)
    require(len(operands) > 0, _NAME, "there must be an operand", 0)
    first = operands[0]
    check_gpu("operand 0", first, _NAME)
    for number, operand in enumerate(operands):
        name = f"operand {number}"
        check_operand(name, operand, first, _NAME, own_dtype=True)
        rule = f"{name} must broadcast to {tuple(shape)}"
        require(broadcasts(operand.shape, shape), _NAME, rule, tuple(operand.shape))
    read = read_program(program, len(operands))
    out = first.new_empty(shape, dtype=getattr(torch, read.dtype))
    total = out.numel()
    if total == 0:
        return out
    placed = [_in_place(operand, shape) for operand in operands]
    accesses = [access for _, access in placed]
    even, wide = total % block == 0, total > 2**31 - block
    kernel = kernel_of(source_of(read, accesses, even, wide))
    sizes: dict[str, int] = {}
    for number, access in enumerate(accesses):
        if access.kind in ("tail", "middle"):
            sizes[f"COUNT{number}"] = access.size
        if access.kind in ("head", "middle"):
            sizes[f"INNER{number}"] = access.inner
    with on_device(first):
        launchable(kernel, first)[(-(-total // block),)](
            *(tensor for tensor, _ in placed), out, total, **sizes, BLOCK=block, num_warps=num_warps
        )
    return out


def pointwise_bytes(operands: Sequence[Tensor], out: Tensor) -> int:
    """Bytes moved if every operand and the result pass memory once."""
    return sum(t.numel() * t.element_size() for t in (*operands, out))


def pointwise_flops(program: str, total: int) -> int:
    """Steps times elements: an operation a step, however long it takes."""
    return len(json.loads(program)["steps"]) * total


def broadcasts(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Whether a shape broadcasts to the result's by trailing dimensions."""
    ending = result[len(result) - len(shape) :] if len(shape) <= len(result) else ()
    return len(shape) <= len(result) and all(
        size in (1, wanted) for size, wanted in zip(shape, ending, strict=True)
    )


def access_of(shape: Sequence[int], result: Sequence[int]) -> Access | None:
    """Where a contiguous operand holds an element; None if its own dimensions have gaps between
    them, which a single division cannot skip.
    """
    aligned = [1] * (len(result) - len(shape)) + list(shape)
    own = [i for i, size in enumerate(aligned) if size != 1]
    if not own:
        return Access("one")
    start, stop = own[0], own[-1] + 1
    if any(aligned[i] != result[i] for i in range(start, stop)):
        return None
    count, inner = prod(result[start:stop]), prod(result[stop:])
    if count == prod(result):
        return Access("full")
    if inner == 1:
        return Access("tail", count)
    if count * inner == prod(result):
        return Access("head", count, inner)
    return Access("middle", count, inner)


@cache
def kernel_of(source: str) -> Any:
    """The kernel of a generated module; equal sources share one."""
    name = f"<stof pointwise {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # no time of change: linecache keeps the entry for good
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module: dict[str, Any] = {"__name__": f"{__name__}_generated"}
    exec(compile(source, name, "exec"), module)
    return module["pointwise_kernel"]


def sample_program() -> str:
    """A program with every step there is: its source changes whenever the generator does."""
    steps: list[list[Any]] = []

    def add(kind: str, *inputs: str, **attrs: Any) -> None:
        steps.append([kind, list(inputs), attrs])

    add("add", "x0", "x1")
    for kind in BINARY:
        add(kind, f"v{len(steps) - 1}", "x2")
    for kind in ARITHMETIC:
        add(kind, f"v{len(steps) - 1}", number=2.0, number_first=True)
    for kind in UNARY:
        add(kind, f"v{len(steps) - 1}")
    for name in ACTIVATIONS:
        add("activation", f"v{len(steps) - 1}", name=name)
    for power in POWERS:
        add("pow", f"v{len(steps) - 1}", number=power)
    for dtype in ("float16", "bfloat16", "float32"):
        add("cast", f"v{len(steps) - 1}", dtype=dtype)
    add("add", f"v{len(steps) - 1}", "x3")
    add("add", f"v{len(steps) - 1}", "x4")
    return json.dumps({"dtype": "float16", "steps": steps})


def _in_place(operand: Tensor, shape: Sequence[int]) -> tuple[Tensor, Access]:
    access = access_of(operand.shape, shape)
    if access is None:
        return operand.expand(shape).contiguous(), Access("full")
    return operand.contiguous(), access


# What torch's caches take for the code of the operator: a program is among its arguments, and the
# generator shows in this kernel.
_KINDS = tuple(Access(kind, 2, 2) for kind in ("full", "tail", "head", "middle", "one"))
KERNELS = tuple(
    kernel_of(source_of(read_program(sample_program(), 5), _KINDS, even, wide))
    for even, wide in ((True, False), (False, True))
)
