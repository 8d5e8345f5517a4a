"""Recipes of a product and its norm, their configs, and the template that they are run with."""

from functools import partial

from norm_recipes import DEVICE, HALF, Recording, random, rows_apart
from stof_compile.templates.linear_norm_configs import DIMS
from stof_compile.templates.triton_linear_norm import TritonLinearNorm
from template_checks import check_template, run_template

import stof_compile.ops_norm  # noqa: F401

TEMPLATE = TritonLinearNorm()
run = partial(run_template, TEMPLATE)
check = partial(check_template, TEMPLATE, scale=2.0)


def linear_norm_recipe(
    rows=(33,), n=72, k=72, dtype=HALF, norm="layer_norm", bias="", residual="", affine=True,
    kn=False, strided=False, device=DEVICE,
):  # fmt: skip
    """x @ w -> [+ bias] -> [+ residual] -> norm, and its operands.

    bias: "" | "inside" the linear | "added" behind it; residual: "" | "first" | "second" side.
    """
    x = random(*rows, k, dtype=dtype, device=device)
    weight = random(*((k, n) if kn else (n, k)), dtype=dtype, device=device, seed=3) * k**-0.5
    operands = [rows_apart(x) if strided else x, weight]
    rec = Recording()
    rec.operands = operands

    def operand(*shape, seed, scale=1.0, dtype=dtype):
        operands.append(scale * random(*shape, dtype=dtype, device=device, seed=seed))
        return ("o", len(operands) - 1)

    read = [("o", 0), ("o", 1)]
    if bias == "inside":
        read.append(operand(n, seed=4))
    last = ("v", rec.add("linear", *read, **({"weight_kn": True} if kn else {})))
    if bias == "added":
        last = ("v", rec.add("add", last, operand(n, seed=4)))
    if residual:
        pair = [last, operand(*rows, n, seed=5)]
        last = ("v", rec.add("add", *(pair if residual == "second" else reversed(pair))))
    read = [last]
    has_bias = affine and norm == "layer_norm"
    if affine:
        read.append(operand(n, seed=6))
    if has_bias:
        read.append(operand(n, seed=7))
    rec.add(norm, *read, eps=1e-5, width=n, has_weight=affine, has_bias=has_bias)
    return rec.recipe(), operands


def config(form="split_k", block_m=32, block_n=32, block_k=32, split_k=1, **changes):
    """A config of the template; what is not given is small."""
    values = dict.fromkeys(DIMS, 1) | {"num_warps": 4, "num_stages": 2, "norm_warps": 4}
    values |= {"form": form, "block_m": block_m, "block_n": block_n, "block_k": block_k}
    return values | {"split_k": split_k} | changes


def one_of_each_tile(configs):
    """The deepest pipeline of each tile; the split of K changes the length of a loop only."""
    kept = {}
    for found in sorted(configs, key=lambda c: -c["num_stages"]):
        key = ("form", "block_m", "block_n", "block_k", "num_warps")
        kept.setdefault(tuple(found[name] for name in key), found)
    return list(kept.values())
