"""Compile the kernels of linear layers for a GPU that is not here, from a config and sizes."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"parts": "*fp32", "flags": "*i64"}
SIZES = ("M",)


def compile_sized(
    kernel: Any, target: int, dtype: str, constants: dict[str, Any], num_warps: int, stages: int
) -> Any:
    """Compile for an sm number; every argument but a size and a constant is a pointer."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "i32" if name in SIZES else POINTERS.get(name, f"*{dtype}")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (name in SIZES and constants.get(f"EVEN_{name}"))
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(
        source,
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": num_warps, "num_stages": stages},
    )
