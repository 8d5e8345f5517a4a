"""Rotary embeddings behind a product: found in the models' own spelling, refused with a reason."""

from typing import Any

import pytest
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


# -- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [1, BATCH], ids=["one table", "a table each"])
@pytest.mark.parametrize("pack", [False, True], ids=["apart", "packed"])
def test_grouped_heads(bias, batch, pack):
    backend = rotated(Layer(plain, bias).eval(), *inputs(batch), pack=pack)
    assert backend.reasons == [] and backend.rotations_left == 0
    found = [site.recipe.steps[-1].attr("heads") for site in backend.sites]
    assert found == ([(4, 2)] if pack else [(4,), (2,)])
    for site in backend.sites:
        assert site.recipe.operands[-1].shape == (batch * LENGTH, DIM)
        assert len(site.operands) == 2 + bias and site.copied == (False,) * len(site.results)


def split_by_the_model(q, k, v, cos, sin):
    q, k, v = torch.cat((q, k, v), -1).split((4 * DIM, 2 * DIM, 2 * DIM), -1)
    return plain(q, k, v, cos, sin)


def one_product(spell):
    weight = nn.Parameter(torch.randn(8 * DIM, WIDTH, generator=torch.Generator().manual_seed(2)))

    def run(x, cos, sin):
        return spell(F.linear(x, weight / 6), cos.unsqueeze(1), sin.unsqueeze(1))

    return run


def by_split(y, cos, sin):
    q, k, v = y.split((4 * DIM, 2 * DIM, 2 * DIM), -1)
    return attend(turn(heads(q), cos, sin), turn(heads(k), cos, sin), heads(v))


def by_heads(y, cos, sin):
    y = y.unflatten(-1, (8, DIM)).permute(0, 2, 1, 3)
    q, k, v = y[:, :4], y[:, 4:6], y.narrow(1, 6, 2)
    return attend(turn(q, cos, sin), turn(k, cos, sin), v)


def together(y, cos, sin):
    y = heads(y)
    turned = turn(y[:, :6], cos, sin)
    return attend(turned[:, :4], turned[:, 4:], y[:, 6:])


def heads_last(y, cos, sin):
    cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    q, k, v = y.view(*y.shape[:2], 8, DIM).split((4, 2, 2), 2)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    return attend(*(t.transpose(1, 2) for t in (q, k, v)))


def swapped_and_chunked(y, cos, sin):
    def other(x):
        low, high = x.chunk(2, -1)
        return sin * torch.cat([-high, low], x.dim() - 1) + cos * x

    q, k, v = y[..., : 4 * DIM], y[..., 4 * DIM : 6 * DIM], y[..., 6 * DIM :]
    return attend(other(heads(q)), other(heads(k)), heads(v))


def whole_heads_by_parts(y, cos, sin):
    """As Phi3 writes it with all of a head rotated."""

    def other(x):
        return torch.cat([turn(x[..., :DIM], cos, sin), x[..., DIM:]], -1)

    q, k, v = y.split((4 * DIM, 2 * DIM, 2 * DIM), -1)
    return attend(other(heads(q)), other(heads(k)), heads(v))


SPELLINGS = [
    by_split, by_heads, together, heads_last, swapped_and_chunked, whole_heads_by_parts,
]  # fmt: skip


@pytest.mark.parametrize("spell", SPELLINGS, ids=lambda f: f.__name__)
def test_any_views_will_do(spell):
    backend = rotated(one_product(spell), *inputs())
    assert backend.reasons == [] and backend.rotations_left == 0
    (site,) = backend.sites
    assert site.recipe.steps[-1].attr("heads") == ((6,) if spell is together else (4, 2))


def test_one_value_without_others_and_a_weight_of_columns():
    weight = nn.Parameter(torch.randn(WIDTH, 4 * DIM) / 6)
    backend = rotated(
        lambda x, c, s: turn(heads(x @ weight), c[:, None], s[:, None]) * 2, *inputs()
    )
    (site,) = backend.sites
    assert site.recipe.steps[0].attr("weight_kn") and site.recipe.steps[1].attr("heads") == (4,)


@pytest.mark.parametrize("length", [1, LENGTH])
@pytest.mark.parametrize("rows", [1, BATCH])
def test_single_rows(length, rows):
    backend = rotated(Layer(plain).eval(), *inputs(rows, length, rows=rows))
    assert len(backend.sites) == 1 and backend.reasons == []


def test_tables_that_come_after_the_product():
    def use(q, k, v, cos, sin):
        q, k, v = heads(q), heads(k), heads(v)
        cos, sin = (cos * 0.5).unsqueeze(1), (sin * 0.5).unsqueeze(1)
        return attend(turn(q, cos, sin), turn(k, cos, sin), v)

    backend = rotated(Layer(use).eval(), *inputs())
    (site,) = backend.sites
    assert site.place != site.product


def test_results_that_are_returned_are_memory_of_their_own():
    def use(q, k, v, cos, sin):
        k = turn(heads(k), cos.unsqueeze(1), sin.unsqueeze(1))
        q = turn(heads(q), cos.unsqueeze(1), sin.unsqueeze(1))
        return attend(q, k, heads(v)), k

    backend = rotated(Layer(use).eval(), *inputs())
    (site,) = backend.sites
    assert site.copied == (False, True)
    assert sum(operation(node) == "clone" for node in backend.gm.graph.nodes) == 1


def test_a_view_across_heads_gets_a_copy():
    def use(q, k, v, cos, sin):
        q = turn(heads(q), cos.unsqueeze(1), sin.unsqueeze(1))
        return q.transpose(1, 2).view(BATCH, -1) * 2, k, v

    backend = rotated(Layer(use).eval(), *inputs(), pack=False)
    assert [site.copied for site in backend.sites] == [(False,)]
    backend = rotated(Layer(lambda q, k, v, c, s: (use(q, k, v, c, s), k * 2)).eval(), *inputs())
    assert [site.copied for site in backend.sites] == [(True,)]


# -- the models of transformers -------------------------------------------------------------------

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "Llama": {}, "Mistral": {}, "Qwen2": {}, "Gemma2": {"head_dim": 16},
    "Phi3": {"pad_token_id": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = torch.randint(0, 50, (2, 17))

    def run(ids):
        return model(ids, use_cache=False)[0]

    backend = rotated(run, ids)
    assert backend.reasons == [] and backend.rotations_left == 0
    assert [site.recipe.steps[1].attr("heads") for site in backend.sites] == [(4, 2), (4, 2)]
    assert {site.recipe.operands[-1].shape for site in backend.sites} == {(17, 16)}


# -- near misses ----------------------------------------------------------------------------------


def normed(q, k, v, cos, sin):
    return attend(
        turn(F.rms_norm(heads(q), (DIM,)), cos[:, None], sin[:, None]), heads(k), heads(v)
    )


def partial(q, k, v, cos, sin):
    q, half = heads(q), DIM // 2
    turned = turn(q[..., :half], cos[:, None, :, :half], sin[:, None, :, :half])
    return torch.cat((turned, q[..., half:]), -1) * 2, k, v


def interleaved(q, k, v, cos, sin):
    q = heads(q)
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None], k, v


def other_halves(q, k, v, cos, sin):
    q, half = heads(q), DIM // 2
    turned = torch.cat((-q[..., :half], q[..., half:]), -1)
    return q * cos[:, None] + turned * sin[:, None], k, v


def also_read(q, k, v, cos, sin):
    q = heads(q)
    return turn(q, cos[:, None], sin[:, None]) + q, k, v


def read_inside(q, k, v, cos, sin):
    other = half_turned(heads(q))
    return heads(q) * cos[:, None] + other * sin[:, None], other * 2, k, v


def last_columns(q, k, v, cos, sin):
    return q * 2, turn(heads(k), cos[:, None], sin[:, None]), v


def tables_of_heads(q, k, v, cos, sin):
    q = q.view(BATCH, LENGTH, 4, DIM)
    return turn(q, cos[:, :4], sin[:, :4]), k, v


def other_tables(q, k, v, cos, sin):
    return turn(heads(q), cos[:, None], sin[:, None]), turn(heads(k), sin[:, None], cos[:, None]), v


def in_half(q, k, v, cos, sin):
    return turn(heads(q).half(), cos[:, None].half(), sin[:, None].half()).float(), k, v


def wide_tables(q, k, v, cos, sin):
    return turn(heads(q), cos[:, None].double(), sin[:, None].double()).float(), k, v


def written_result(q, k, v, cos, sin):
    q = turn(heads(q), cos[:, None], sin[:, None])
    q[:, 0].zero_()
    return q, k, v


def written_table(q, k, v, cos, sin):
    first = heads(q)
    cos.mul_(0.5)
    return turn(first, cos[:, None], sin[:, None]) * 2, k, v


def flat_tables(q, k, v, cos, sin):
    return turn(heads(q), cos[:, None, :, :1], sin[:, None, :, :1]), k, v


def short_heads(q, k, v, cos, sin):
    c, s = cos[:, None, :, : DIM // 2], sin[:, None, :, : DIM // 2]
    return turn(heads(q, DIM // 2), c, s), turn(heads(k), cos[:, None], sin[:, None]), v


NEAR = {
    normed: "the result of 'rms_norm'",
    partial: "rotates 4 elements of heads that are 8 apart",
    interleaved: "interleaved",
    other_halves: "two halves",
    also_read: "is also read by",
    read_inside: "is also read by",
    last_columns: "does not follow the columns before it",
    tables_of_heads: "from head to head",
    other_tables: "different tables",
    in_half: "rotates a copy",
    wide_tables: "another dtype",
    written_result: "writes to",
    flat_tables: "the tables of",
    short_heads: "heads of different widths",
}


@pytest.mark.parametrize("use", NEAR, ids=lambda f: f.__name__)
def test_near_misses_have_a_reason(use):
    given = inputs()
    if use is tables_of_heads:
        given = given[0], *(t[:, :1].expand(1, LENGTH, DIM).contiguous() for t in given[1:])
    backend = rotated(Layer(use).eval(), *given)
    assert not backend.sites, "it was found"
    assert any(NEAR[use] in reason for reason in backend.reasons), backend.reasons


def test_a_table_that_is_written_before_it_is_read():
    given = inputs()
    layer = Layer(written_table).eval()
    backend = rotated(layer, *given)
    assert all("may write" in reason for reason in backend.reasons)
    assert not backend.sites and backend.reasons


def test_other_sums_are_no_rotations():
    backend = rotated(lambda x, c, s: x * 2 + x * 3 + torch.cat((x, x), -1)[..., :WIDTH], *inputs())
    assert backend.sites == [] and backend.refusals == []


def test_a_product_that_is_written_to():
    def spell(y, cos, sin):
        y[..., -1:].zero_()
        return turn(heads(y), cos, sin)

    backend = rotated(one_product(spell), *inputs())
    (reason,) = backend.reasons
    assert "writes to the result of the product" in reason and not backend.sites
