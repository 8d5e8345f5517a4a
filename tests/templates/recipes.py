"""Recipes for tests of templates, without a graph."""

import torch

from stof_compile.device import DeviceFacts
from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec

H200 = DeviceFacts(
    "cuda", "NVIDIA H200", "cuda 13.0", (9, 0), "sm_90", 132, 232448, 60 << 20, 140 << 30
)
A100 = DeviceFacts(
    "cuda", "NVIDIA A100", "cuda 13.0", (8, 0), "sm_80", 108, 166912, 40 << 20, 40 << 30
)


def spec(*shape, dtype=torch.float16):
    stride = torch.empty(shape, device="meta").stride()
    return TensorSpec(tuple(shape), tuple(stride), dtype, "cuda")


def linear_recipe(
    m=64, n=64, k=64, bias=True, activation="", residual=False, kn=False, dtype=torch.float16
):
    """linear [bias] [activation] [residual]."""
    operands = [spec(m, k, dtype=dtype), spec(*((k, n) if kn else (n, k)), dtype=dtype)]
    if bias:
        operands.append(spec(n, dtype=dtype))
    attrs = (("weight_kn", True),) if kn else ()
    refs = tuple(Ref("operand", i) for i in range(len(operands)))
    steps = [Step("linear", refs, (m, n), dtype, attrs)]
    if activation:
        last = Ref("step", len(steps) - 1)
        steps.append(Step("activation", (last,), (m, n), dtype, (("name", activation),)))
    if residual:
        operands.append(spec(m, n, dtype=dtype))
        pair = (Ref("operand", len(operands) - 1), Ref("step", len(steps) - 1))
        steps.append(Step("add", pair, (m, n), dtype))
    return Recipe(tuple(operands), tuple(steps))


def random_operands(recipe, device="cuda", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    found = []
    for i, operand in enumerate(recipe.operands):
        values = torch.randn(operand.shape, device=device, generator=generator)
        is_weight = any(
            s.kind == "linear" and s.inputs[1] == Ref("operand", i) for s in recipe.steps
        )
        if is_weight:
            values *= min(operand.shape[-1], max(operand.shape)) ** -0.5
        found.append(values.to(operand.dtype))
    return found
