"""Recipes written by hand, recipes of norms, and the devices that the tests of templates know."""

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


def norm_recipe(
    rows=(33,), n=72, dtype=HALF, norm="layer_norm", bias=False, residual=False, affine=True,
    swapped=False, norm_dtype=None, strided=False, device=DEVICE,
):  # fmt: skip
    """([x + bias] + residual) -> norm, and its operands; ``swapped`` puts the value second."""
    x = random(*rows, n, dtype=dtype, device=device)
    operands = [rows_apart(x) if strided else x]
    rec = Recording(*operands)
    last = ("o", 0)

    def operand(tensor):
        operands.append(tensor)
        rec.operands = operands
        return ("o", len(operands) - 1)

    def add(last, number):
        pair = (number, last) if swapped else (last, number)
        return ("v", rec.add("add", *pair))

    if bias:
        last = add(last, operand(random(n, dtype=dtype, device=device)))
    if residual:
        last = add(last, operand(random(*rows, n, dtype=dtype, device=device, seed=5)))
    read = [last]
    has_bias = affine and norm == "layer_norm"
    if affine:
        read.append(operand(1 + 0.2 * random(n, dtype=norm_dtype or dtype, device=device, seed=6)))
    if has_bias:
        read.append(operand(random(n, dtype=norm_dtype or dtype, device=device, seed=7)))
    rec.add(norm, *read, eps=1e-5, width=n, has_weight=affine, has_bias=has_bias)
    return rec.recipe(), operands


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
