"""Graphs with rotary embeddings behind a product, and a back end that rewrites them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from true_values import assert_values_are_true

from stof_compile.capture import read_capture
from stof_compile.fusion.recipe import run_recipe
from stof_compile.fusion.rope import find_rotations
from stof_compile.fusion.rope_rewrite import rewrite_rotations
from stof_compile.node_ops import operation
from stof_compile.normalize import normalize
from stof_compile.packing import apply_packs, search_packs

BATCH, LENGTH, DIM, WIDTH = 2, 9, 8, 32


class Rotating:
    """A backend that rewrites every rotation it finds, after packing."""

    def __init__(self, pack=True):
        self.pack, self.sites, self.refusals, self.gm = pack, [], [], None

    def __call__(self, gm, inputs):
        facts = read_capture(gm, inputs)
        normalize(gm, facts)
        if self.pack:
            packs, _ = search_packs(gm, facts)
            apply_packs(gm, facts, [pack for pack in packs if pack.role == "attention"])
        self.sites, self.refusals = find_rotations(gm, facts)
        calls = [(site, lambda given, s=site: self.run(s, given)) for site in self.sites]
        assert rewrite_rotations(gm, calls) == len(self.sites)
        gm.graph.lint()
        gm.recompile()
        assert find_rotations(gm, facts)[0] == [], "a second run finds nothing"
        assert_values_are_true(gm, skipped=("empty", "rand"))
        self.gm = gm
        return gm.forward

    @staticmethod
    def run(site, given):
        return rope_op(list(given), site.recipe)

    @property
    def reasons(self):
        return [refusal.reason for refusal in self.refusals]

    @property
    def rotations_left(self):
        return sum(operation(node) == "neg" for node in self.gm.graph.nodes)


RECIPES: list[Any] = []


@torch.library.custom_op("stof_test::rope", mutates_args=())
def _rope(operands: list[torch.Tensor], number: int) -> torch.Tensor:
    return run_recipe(RECIPES[number], operands).contiguous()


@_rope.register_fake
def _(operands, number):
    result = RECIPES[number].result
    return operands[0].new_empty(result.shape, dtype=result.dtype)


def rope_op(given, recipe):
    RECIPES.append(recipe)
    return torch.ops.stof_test.rope(given, len(RECIPES) - 1)


def rotated(fn, *args, pack=True, **kwargs):
    """The backend, after checking that the result is that of the plain call."""
    given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.no_grad():
        wanted = fn(*given, **kwargs)
        backend = Rotating(pack)
        torch._dynamo.reset()
        result = torch.compile(fn, backend=backend, dynamic=False)(*args, **kwargs)
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
    return backend


def half_turned(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def turn(x, cos, sin):
    return x * cos + half_turned(x) * sin


def heads(x, dim=DIM):
    return x.view(*x.shape[:-1], -1, dim).transpose(1, 2)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Layer(nn.Module):
    """Projections of 4 and 2 heads; ``use`` makes the result of them and the tables."""

    def __init__(self, use, bias=False, dim=DIM):
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(WIDTH, 4 * dim, bias=bias)
        self.k, self.v = (nn.Linear(WIDTH, 2 * dim, bias=bias) for _ in range(2))
        self.use = use

    def forward(self, x, cos, sin):
        return self.use(self.q(x), self.k(x), self.v(x), cos, sin)


def plain(q, k, v, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return attend(turn(heads(q), cos, sin), turn(heads(k), cos, sin), heads(v))


def inputs(batch=1, length=LENGTH, dim=DIM, rows=BATCH):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, length, WIDTH, generator=g)
    return x, *torch.randn(2, batch, length, dim, generator=g).unbind()


def one_product(spell):
    weight = nn.Parameter(torch.randn(8 * DIM, WIDTH, generator=torch.Generator().manual_seed(2)))

    def run(x, cos, sin):
        return spell(F.linear(x, weight / 6), cos.unsqueeze(1), sin.unsqueeze(1))

    return run
