"""C++ kernels that Inductor goes on building while its caller goes on compiling something else.

Inductor starts g++ in a thread as soon as it has the code, and waits for it before it hands out
what it compiled. Here the wait is put off until a kernel is first called.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def can_build_later() -> bool:
    """Whether Inductor builds C++ kernels in threads and keeps what it has built."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    return (
        hasattr(AsyncCompile, "cpp_pybinding")
        and get_compile_threads() > 1
        and not config.force_disable_caches
        and not config.cpp_wrapper  # one library, which is loaded at once
    )


class LateKernel:
    """A kernel that is loaded at its first call.

    Args:
        result: waits for the kernel and returns it.
        argtypes, source: of the kernel, as Inductor's code has them.
    """

    def __init__(self, result: Callable[[], Any], argtypes: list[str], source: str) -> None:
        self._result, self._argtypes, self._source = result, argtypes, source
        self._process = os.getpid()
        self._kernel: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Call the kernel; the first time, wait for it."""
        if self._kernel is None:
            self._kernel = self._loaded()
        return self._kernel(*arguments)

    def _loaded(self) -> Callable[..., Any]:
        # the threads of a process end in its forks, and nobody would ever build the kernel there
        if os.getpid() == self._process:
            try:
                kernel: Callable[..., Any] = self._result()
                return kernel
            except (RuntimeError, ImportError, OSError):  # g++ was killed, its folder is gone
                pass
        return _built_here(self._argtypes, self._source)


def _built_here(argtypes: list[str], source: str) -> Callable[..., Any]:
    """Build a kernel, or load it where it was built in the meantime, and wait for that."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    CppPythonBindingsCodeCache.cache.clear()  # it remembers builds that failed; loads stay loaded
    kernel: Callable[..., Any] = CppPythonBindingsCodeCache.load_pybinding(argtypes, source)
    return kernel


@contextmanager
def kernels_built_later() -> Iterator[None]:
    """Do not wait for C++ kernels of what this thread compiles while this context is open."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor.async_compile import AsyncCompile

    def later(self: Any, argtypes: list[str], source: str, *more: Any, **named: Any) -> Any:
        future = begin(self, argtypes, source, *more, **named)
        if threading.get_ident() != here or more or named or not hasattr(future, "result"):
            return future
        return LateKernel(future.result, argtypes, source)

    here = threading.get_ident()
    with compile_lock:
        begin = AsyncCompile.cpp_pybinding
        AsyncCompile.cpp_pybinding = later  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            AsyncCompile.cpp_pybinding = begin  # type: ignore[method-assign]
