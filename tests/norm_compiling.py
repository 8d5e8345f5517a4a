"""Compile the kernels of the norm and pointwise templates for a GPU that is not here.

Their types and constants are given; ``linear_compiling`` takes them from a launch.
"""

import torch
from compiling import compile_source, needs, with_defaults
from linear_compiling import written_arguments
from norm_recipes import NAMES
from stof_compile.kernels.limits import shared_memory_limit
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def needed_by(kernel, target, types, constants, num_warps, num_stages=1):
    """Resources of a kernel compiled for a GPU that is not here.

    Args:
        types: argument -> Triton type; arguments that are in neither are i32, multiples of 16.
        constants: its constexpr arguments.
    """
    names, constants = kernel.arg_names, with_defaults(kernel, constants)
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = compile_source(source, GPUTarget("cuda", target, 32), options)
    return compiled, needs(compiled, target)


def written_by(kernel, types, constants):
    """Names of the arguments that torch.compile takes for written by a kernel."""
    dtypes = {f"*{name}": dtype for dtype, name in NAMES.items()}
    given = dict.fromkeys(kernel.arg_names, 64) | with_defaults(kernel, constants)
    for name in set(types) & set(kernel.arg_names):
        given[name] = torch.empty(4, 4, dtype=dtypes[types[name]])
    return written_arguments(kernel, given)


def assert_fits(found, target):
    assert found.shared_bytes <= shared_memory_limit(divmod(target, 10))
    assert found.spill_bytes == 0, f"{found.spill_bytes} bytes spilled"
