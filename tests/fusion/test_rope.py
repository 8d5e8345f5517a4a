"""Rotary embeddings behind a product are found in the models' own spelling."""

import pytest
import torch
from rope_graphs import (
    BATCH,
    DIM,
    LENGTH,
    WIDTH,
    Layer,
    attend,
    heads,
    inputs,
    one_product,
    plain,
    rotated,
    turn,
)
from torch import nn

from stof_compile.node_ops import operation

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
