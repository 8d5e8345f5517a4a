"""Compiles TileLang programs: once in a process, once on disk (TileLang's own cache).

Compiling needs nvcc (from a CUDA toolkit or the package ``tilelang[nvcc]``) but no GPU: a process
without one can fill the disk cache for another.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tilelang
from tilelang import tvm

NAMES = {"torch.float16": "float16", "torch.bfloat16": "bfloat16"}


def compile_program(
    program: Any, capability: tuple[int, int], *, portable: bool = False
) -> Callable[..., None]:
    """Compile a TileLang program for a CUDA device; takes seconds unless the disk cache has it.

    Args:
        program: a ``T.prim_func``; its last parameter is the result, which the caller allocates.
        capability: (major, minor) of the device.
        portable: use neither warp specialization nor Hopper's matrix instructions. Two kinds of
            program need this. Where a pipelined loop is inside another loop, products read what
            ordinary stores and copies wrote, which Hopper's instructions see only behind a fence
            that TileLang leaves out of a pipeline's last step. Where a pipelined loop has one
            step, specialised warps may wait for ever (TileLang issue 2566).
    Returns:
        A callable on contiguous CUDA tensors in the order of the parameters, None for one that
        the program does not read. It runs on the current stream and can be captured.
    """
    with _quiet():
        compiled: Callable[..., None] = tilelang.compile(
            program, target=target_of(capability), pass_configs=pass_configs(portable)
        )
    return compiled


def lower_program(program: Any, capability: tuple[int, int], *, portable: bool = False) -> Any:
    """Lower a program to CUDA source, with neither GPU nor nvcc: ``kernel_source`` of the result.

    Its ``device_mod`` tells the shared memory (see ``shared_bytes``).
    """
    target = tvm.target.Target(target_of(capability))
    with target, tvm.transform.PassContext(opt_level=3, config=pass_configs(portable)):
        return tilelang.lower(program, target=target)


def shared_bytes(artifact: Any) -> int:
    """Dynamic shared memory, in bytes, that a lowered program asks for when it is launched."""
    (function,) = artifact.device_mod.functions.values()
    return int(function.attrs["dyn_shared_memory_buf"]) if function.attrs else 0


def target_of(capability: tuple[int, int]) -> dict[str, str]:
    """TileLang's target of a device; the architecture's own instructions from Hopper on."""
    major, minor = capability
    return {"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if major >= 9 else ''}"}


def pass_configs(portable: bool) -> dict[str, bool]:
    """Settings of TileLang's compiler for a program."""
    return {"tl.disable_warp_specialized": portable, "tl.disable_wgmma": portable}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep TileLang from printing two lines for every kernel it compiles."""
    logger = logging.getLogger("tilelang.jit.kernel")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)
