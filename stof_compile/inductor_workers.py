"""Inductor's processes that compile, made ready to load our kernels while STOF's passes run.

In a process that finds a graph in Inductor's cache, Inductor's own kernels come with it. Ours are a
user's to it: each is loaded by such a process, which has to be started and to import first, and the
host waits. Inductor starts them when a graph is handed over, and stops them when they are idle.
"""

from __future__ import annotations

from stof_compile.device import DeviceFacts
from stof_compile.options import StofOptions

JOB = """try:
    from stof_compile.inductor_workers import prepare
except ImportError:  # a process that was started without the folder of this package
    pass
else:
    prepare({arch})
"""


def make_workers_ready(device: DeviceFacts, options: StofOptions) -> None:
    """Have Inductor's processes prepared; waits for none of them.

    Nothing is done on a CPU, and where Inductor is to compile without other processes.

    Args:
        device: that kernels are for. options: of the compile; Inductor's settings are among them.
    """
    if not device.is_cuda or options.inductor.get("compile_threads") in (0, 1):
        return
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    AsyncCompile.use_process_pool()  # asks for processes where they are allowed and wanted
    if getattr(AsyncCompile, "_ready_future", None) is None:
        return
    arch = None
    if device.runtime.startswith("cuda") and device.capability is not None:
        arch = 10 * device.capability[0] + device.capability[1]
    pool = AsyncCompile.process_pool()
    for _ in range(get_compile_threads()):  # one for each: they take jobs in turns
        pool.submit(exec, JOB.format(arch=arch), {})


def prepare(arch: int | None) -> None:
    """Import and find out, in one of these processes, what the first kernel would ask for.

    Args:
        arch: 90 for sm_90; None where kernels are for another maker's GPU.
    """
    import stof_compile.register_limit  # noqa: F401  # and torch's launchers, which it imports

    if arch is None:
        return
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    _set_triton_ptxas_path()  # first: Triton keeps the answer of the assembler it asks
    make_backend(GPUTarget("cuda", arch, 32)).hash()
