"""Recipes, devices and helpers that the tests of the norm and pointwise templates share."""

import os

import torch

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec, run_recipe

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
NAMES = {HALF: "fp16", BRAIN: "bf16", SINGLE: "fp32"}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"

MACHINES = {
    80: (108, 166912), 86: (84, 101376), 89: (128, 101376), 90: (132, 232448), 100: (148, 232448)
}  # fmt: skip


def machine(target=90, kind="cuda", runtime="cuda 13.0"):
    units, shared = MACHINES[target]
    return DeviceFacts(
        kind, f"test sm_{target}", runtime, divmod(target, 10), f"sm_{target}", units, shared,
        50 << 20, 80 << 30,
    )  # fmt: skip


def spec(tensor):
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type)


class Recording:
    """Writes a recipe step by step and runs it on the way, so shapes and dtypes are right."""

    def __init__(self, *operands):
        self.operands = operands
        self.steps = []
        self.values = []

    def add(self, kind, *inputs, **attrs):
        """Inputs: ("o", i), ("v", j) or just the last value; returns the number of the step."""
        refs = tuple(Ref("operand" if which == "o" else "step", i) for which, i in inputs)
        attributes = tuple(sorted((k, v) for k, v in attrs.items() if k not in ("to", "shape")))
        held = {"operand": self.operands, "step": self.values}
        given = [held[ref.kind][ref.index] for ref in refs]
        shape = attrs.get("shape", ())
        single = Recipe(
            tuple(spec(t) for t in given),
            (
                Step(
                    kind, tuple(Ref("operand", i) for i in range(len(given))), shape,
                    attrs.get("to", SINGLE), attributes,
                ),
            ),
        )  # fmt: skip
        value = run_recipe(single, given)
        self.values.append(value)
        self.steps.append(Step(kind, refs, tuple(value.shape), value.dtype, attributes))
        return len(self.steps) - 1

    def recipe(self):
        return Recipe(tuple(spec(t) for t in self.operands), tuple(self.steps))


def random(*shape, dtype=HALF, device=DEVICE, seed=None):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape) if seed is None else seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def rows_apart(tensor, gap=24):
    """The same values with ``gap`` elements between the rows."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + gap), float("nan"))
    wide = wide.to(device=tensor.device, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def wide(*tensors):
    return [None if t is None else t.double() for t in tensors]


def needed_by(kernel, target, types, constants, num_warps, num_stages=1):
    """Resources of a kernel compiled for a GPU that is not here.

    Args:
        types: argument -> Triton type; arguments that are in neither are i32, multiples of 16.
        constants: its constexpr arguments.
    """
    import triton
    from compiling import needs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", target, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )  # fmt: skip
    return compiled, needs(compiled, target)


def written_by(kernel, types, constants, monkeypatch):
    """Names of the arguments that torch.compile takes for written by a kernel."""
    import triton
    from torch._higher_order_ops import triton_kernel_wrap as wrap
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    dtypes = {f"*{name}": dtype for dtype, name in NAMES.items()}
    with torch._subclasses.FakeTensorMode():
        arguments = {}
        for name in kernel.arg_names:
            if name in constants:
                arguments[name] = constants[name]
            elif name in types:
                arguments[name] = torch.empty(4, 4, dtype=dtypes[types[name]])
            else:
                arguments[name] = 64
        if hasattr(wrap, "identify_accessed_tensors"):
            accesses = wrap.identify_accessed_tensors(kernel, arguments, {})
            return {dependency.name for dependency in accesses.read_writes.writes}
        return set(wrap.identify_mutated_tensors(kernel, arguments, {}))


def assert_fits(found, target):
    from stof_compile.kernels.limits import shared_memory_limit

    assert found.shared_bytes <= shared_memory_limit(divmod(target, 10))
    assert found.spill_bytes == 0, f"{found.spill_bytes} bytes spilled"


def compiled_and_captured(function, *operands):
    """Results of a function under Inductor with CUDA graphs, and replayed from a graph by hand."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # the third call replays
        torch.compiler.cudagraph_mark_step_begin()
        by_inductor = compiled(*operands)
    by_inductor = by_inductor.clone()
    held = [None if t is None else t.clone() for t in operands]
    function(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*held)
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return by_inductor, captured
