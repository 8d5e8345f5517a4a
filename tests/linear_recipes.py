"""Recipes of linear layers that the tests of their templates share."""

from dataclasses import replace

import torch
from close import assert_close
from norm_recipes import DEVICE, HALF, Recording, random, rows_apart


def on_gpu(recipe):
    """The same recipe as a graph on a GPU has it, whatever device its operands were made on."""
    return replace(recipe, operands=tuple(replace(o, device="cuda") for o in recipe.operands))


class Writer:
    """Writes a recipe; operands are made on the way, ``operands`` in the order of the recipe."""

    def __init__(self, dtype=HALF, device=DEVICE):
        self.dtype, self.device = dtype, device
        self.recording = Recording()
        self.operands = []
        self.recording.operands = self.operands

    def operand(self, *shape, scale=1.0, strided=False, seed=None):
        """A new operand of random numbers; ``strided`` puts a gap between its rows."""
        if seed is None:
            seed = 7 + len(self.operands)
        value = random(*shape, dtype=torch.float32, device=self.device, seed=seed) * scale
        value = value.to(self.dtype)
        self.operands.append(rows_apart(value) if strided else value)
        return ("o", len(self.operands) - 1)

    def step(self, kind, *inputs, **attrs):
        """A step; returns the reference to its result."""
        return ("v", self.recording.add(kind, *inputs, **attrs))

    def linear(self, x, n, k, *, kn=False, bias=False):
        """A product with a new weight and, as third input, a new bias."""
        shape = (k, n) if kn else (n, k)
        read = [x, self.operand(*shape, scale=k**-0.5)]
        if bias:
            read.append(self.operand(n))
        return self.step("linear", *read, **({"weight_kn": True} if kn else {}))

    def done(self):
        """The recipe, labelled as on a GPU, and its operands."""
        return on_gpu(self.recording.recipe()), list(self.operands)


def linear_recipe(
    rows=(33,), n=40, k=72, dtype=HALF, bias="input", activation="gelu", factor=False,
    residual=False, kn=False, strided=False, swapped=False, regrouped=False, device=DEVICE,
):  # fmt: skip
    """A linear layer and its epilogue.

    Args:
        bias: "" for none, "input" for the third input of the product, "add" for a step.
        swapped: the value is the second side of the later steps.
        regrouped: the rows become [rows, 1] behind the product.
    """
    w = Writer(dtype, device)
    value = w.linear(w.operand(*rows, k, strided=strided), n, k, kn=kn, bias=bias == "input")

    def both(kind, other):
        return w.step(kind, *((other, value) if swapped else (value, other)))

    if bias == "add":
        value = both("add", w.operand(n))
    if regrouped:
        rows = (*rows, 1)
        value = w.step("reshape", value, shape=(*rows, n))
    if activation:
        value = w.step("activation", value, name=activation)
    if factor:
        value = both("mul", w.operand(*rows, n))
    if residual:
        both("add", w.operand(*rows, n, strided=strided))
    return w.done()


def check_template(template, recipe, operands, config, scale=1.0):
    """Run a template's call and compare it with the recipe in fp64; returns the result."""
    call = template.build(recipe, config)
    torch.use_deterministic_algorithms(True)  # fills new memory: NaN where nothing was written
    try:
        out = call.run(operands)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.is_contiguous() and out.dtype == recipe.result.dtype
    assert out.shape == recipe.result.shape
    assert_close(out, template.reference(recipe, operands, torch.float64), scale=scale)
    return out
