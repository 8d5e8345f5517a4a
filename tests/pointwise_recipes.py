"""Recipes and programs of pointwise steps, and the template that they are run with."""

import json
from functools import partial

import torch
from norm_recipes import DEVICE, HALF, SINGLE, Recording, random
from stof_compile.templates.triton_pointwise import TritonPointwise
from template_checks import check_template, run_template

import stof_compile.ops_pointwise  # noqa: F401

TEMPLATE = TritonPointwise()
SMALL = {"block": 256, "num_warps": 2}
POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal")
"""Steps of positive numbers."""

run = partial(run_template, TEMPLATE)


def gelu_residual(rows=(33,), n=72, dtype=HALF, device=DEVICE):
    """gelu(x + bias) * gate + 0.5 x: a DAG that reads x twice."""
    given = [
        random(*rows, n, dtype=dtype, device=device),
        random(n, dtype=dtype, device=device),
        random(*rows, n, dtype=dtype, device=device, seed=3),
    ]
    rec = Recording(*given)
    rec.add("add", ("o", 0), ("o", 1))
    rec.add("activation", ("v", 0), name="gelu")
    rec.add("mul", ("v", 1), ("o", 2))
    rec.add("mul", ("o", 0), number=0.5, number_first=True)
    rec.add("add", ("v", 2), ("v", 3))
    return rec


def one_step(kind, *operands, **attrs):
    """A recipe of one step that reads all the operands."""
    rec = Recording(*operands)
    rec.add(kind, *(("o", i) for i in range(len(operands))), **attrs)
    return rec


def values(dtype=SINGLE, positive=False):
    """From tiny to large on both sides, with what is special."""
    x = torch.cat([torch.logspace(-6, 1.2, 120), torch.linspace(0, 3, 61)[1:]])
    x = x if positive else torch.cat([x, -x, torch.zeros(1)])
    special = torch.tensor([float("nan"), float("inf"), *([] if positive else [-float("inf")])])
    return torch.cat([x, special]).to(DEVICE, dtype)


def program(kind, *inputs, dtype="float16"):
    """The text of a program of one step."""
    return json.dumps({"dtype": dtype, "steps": [[kind, inputs, {}]]})


def check(rec, config=SMALL):
    """Compare the template's result with the recipe in fp64; returns it."""
    return check_template(TEMPLATE, rec.recipe(), list(rec.operands), config, scale=2.0)
