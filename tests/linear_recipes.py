"""Recipes of linear layers that the tests of their templates share."""

from dataclasses import replace

import torch
from norm_recipes import DEVICE, HALF, Recording, random, rows_apart
from template_checks import check_template

__all__ = ["SHAPES", "SMALL", "Writer", "check_template", "linear_recipe", "on_gpu", "sized"]

SMALL = {
    "block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 2, "num_stages": 2, "group_m": 2,
    "split_k": 1, "persistent": 0, "tma": 0, "depth_first": 0,
}  # fmt: skip
"""The smallest config of the linear template."""

SHAPES = {
    "BERT 128": (128, 768, 768),
    "BERT 128 up": (128, 3072, 768),
    "BERT 128 down": (128, 768, 3072),
    "BERT 4096": (4096, 768, 768),
    "BERT 4096 down": (4096, 768, 3072),
    "BERT 32768 up": (32768, 3072, 768),
    "one row": (1, 4096, 4096),
    "ragged": (1000, 300, 72),
}
"""M, N, K of its products."""


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


def sized(m, n, k, dtype=HALF):
    """A product of [m, k] and [n, k] alone, without memory."""
    w = Writer(dtype, "cpu")
    with torch.device("meta"):
        x, weight = torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    w.operands += [x, weight]
    w.step("linear", ("o", 0), ("o", 1))
    return w.done()[0]
