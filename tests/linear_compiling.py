"""Compile the kernels of linear layers for a GPU that is not here, from a call of their launcher.

The launcher runs on fake tensors and its launch is recorded, so that what is compiled is what a GPU
would be given.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from compiling import Needs, compile_source, needs, with_defaults
from stof_compile.kernels.linear_problem import pays
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DTYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Launch:
    """A recorded launch: the kernel, its arguments by name and what it is compiled with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


def record(module: Any, function: str, *arguments: Any, tma: bool = True) -> Launch:
    """The only launch of ``record_all``."""
    (launch,) = record_all(module, function, *arguments, tma=tma)
    return launch


def record_all(module: Any, function: str, *arguments: Any, tma: bool = True) -> list[Launch]:
    """Call a launcher of ``stof_compile.kernels`` on (fake) tensors and record its launches.

    Args:
        module: the module of the launcher.
        function: its name.
        arguments: of the launcher.
        tma: whether the device is taken to have a copy engine.
    """
    launches = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*values: Any, num_warps: int, num_stages: int, **named: Any) -> None:
                held = dict(zip(self.kernel.arg_names, values, strict=False)) | named
                launches.append(Launch(self.kernel, grid, held, num_warps, num_stages))

            return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launchable", lambda kernel, *_: Recorder(kernel))
        if hasattr(module, "describable"):
            patch.setattr(module, "describable", lambda tensor, stride: tma)
        getattr(module, function)(*arguments)
    return launches


def compile_launch(launch: Launch, target: int) -> Any:
    """Compile a recorded launch for an sm number, its numbers hinted at as Triton would."""
    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    for index, (param, name) in enumerate(zip(kernel.params, kernel.arg_names, strict=True)):
        value = launch.arguments.get(name, param.default)
        if value == "tf32x3" and not pays(divmod(target, 10)):
            value = "ieee"  # which the launcher would take there
        if param.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = DTYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if launch.arguments.get("PDL"):
        options["launch_pdl"] = True
    return compile_source(source, GPUTarget("cuda", target, 32), options)


def launch_needs(launch: Launch, target: int) -> Needs:
    """Shared memory, registers and spilled bytes of a recorded launch on an sm number."""
    return needs(compile_launch(launch, target), target)


def written_tensors(launch: Launch) -> set[str]:
    """Names of the arguments that torch's analysis of the kernel takes for written."""
    return written_arguments(launch.kernel, launch.arguments)


def written_arguments(kernel: Any, arguments: dict[str, Any]) -> set[str]:
    """The same of a kernel and all its arguments by name; only shapes and dtypes are read."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    with pytest.MonkeyPatch.context() as patch, torch._subclasses.FakeTensorMode():
        patch.setattr(triton.runtime.driver, "_active", Driver())
        given = {
            name: torch.empty(value.shape, dtype=value.dtype)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in with_defaults(kernel, arguments).items()
        }
        if hasattr(wrap, "identify_accessed_tensors"):
            accesses = wrap.identify_accessed_tensors(kernel, given, {})
            return {dependency.name for dependency in accesses.read_writes.writes}
        return set(wrap.identify_mutated_tensors(kernel, given, {}))
