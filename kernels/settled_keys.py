"""Keys of Triton kernels that do not depend on which kernel a process asked for first.

Triton keeps compiled kernels on disk under a key that contains the constants a kernel and the
functions it calls read from their modules. Up to 3.7 (triton-lang/triton#10494) those of a function
count only if its own key was made before: two kernels that share one have other keys in a process
that launched them in another order. What one process compiled, another does not find, then.
"""

import threading
from typing import Any

_lock = threading.Lock()
_settled: set[int] = set()


def settle_key(kernel: Any) -> None:
    """Have Triton make a kernel's key from those of the functions it calls, which come first.

    Args:
        kernel: one of ours, kept alive by its module. Nothing happens the second time, nor to what
            Triton does not compile (under its interpreter).
    """
    if id(kernel) in _settled:
        return
    from triton.runtime.jit import DependenciesFinder, JITFunction

    if not isinstance(kernel, JITFunction):
        return
    with _lock:
        plain = getattr(DependenciesFinder, "_update_hash", None)
        if plain is None:  # Triton is made otherwise
            _settled.add(id(kernel))
            return

        here = threading.get_ident()

        def called_first(self: Any, function: Any) -> None:
            if threading.get_ident() == here:  # keys of others stay what they were
                _ = function.cache_key
            plain(self, function)

        DependenciesFinder._update_hash = called_first
        try:
            _ = kernel.cache_key
        finally:
            DependenciesFinder._update_hash = plain
        _settled.add(id(kernel))
