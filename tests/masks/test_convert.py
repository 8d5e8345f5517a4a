"""Traced mask functions, FlexAttention block masks in and out, dense masks recognised as rules."""

import json
import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    or_masks,
)

from stof_compile import masks
from stof_compile.errors import StofMaskError
from stof_compile.masks import MaskSpec

S = 150
TABLE = torch.arange(S) // 37
TWO = torch.stack([TABLE, TABLE.flip(0)])
LIMITS = torch.tensor([30, 90])


def documents(b, h, q, k):
    return (q >= k) & (TABLE[q] == TABLE[k])


def by_head(b, h, q, k):
    return torch.where(h == 0, q >= k, (q - k).abs() < 20)


def by_batch(b, h, q, k):
    return k < LIMITS[b]


def by_two_indices(b, h, q, k):
    return TWO[b, q] == TWO[b, k]


def mixed_index(b, h, q, k):
    return TWO[1, q] >= TWO[:, k][0]


def reduced(b, h, q, k):
    return (TABLE[:5] == q % 7).any() | (k < 3)


MODS = {
    "documents": (documents, (1, 1)),
    "by head": (by_head, (1, None)),
    "by batch": (by_batch, (None, 1)),
    "by two indices": (by_two_indices, (None, 1)),
    "mixed index": (mixed_index, (1, 1)),
    "reduced": (reduced, (1, 1)),
    "combined": (or_masks(and_masks(documents, by_head), by_batch), (None, None)),
    "constant tensor": (lambda b, h, q, k: q < torch.arange(5)[2] * 30, (1, 1)),
    "slope": (lambda b, h, q, k: (q - k).abs() * torch.exp2(-(h + 1.0)) < 9.5, (1, None)),
}


@pytest.mark.parametrize("name", MODS)
def test_any_mask_mod(name):
    mod, planes = MODS[name]
    spec = masks.rule(mod)
    assert spec.plane_shape() == planes
    mask = masks.build_block_mask(spec, S, S, (64, 32), batch=2, heads=2)
    expected = create_mask(mod, 2, 2, S, S, device="cpu")
    assert torch.equal(mask.to_dense().expand(2, 2, S, S), expected)
    for again in (
        pickle.loads(pickle.dumps(spec)),
        MaskSpec.from_json(spec.to_json(), spec.tensors()),
    ):
        assert (
            again == spec
            and masks.build_block_mask(again, S, S, (64, 32), batch=2, heads=2) == mask
        )


def test_a_rule_that_returns_a_python_bool():
    assert masks.build_block_mask(masks.rule(lambda b, h, q, k: True), 20, 20).density == 1


def test_captured_contents_decide_identity():
    def make(step):
        table = torch.arange(50) // step
        return masks.rule(lambda b, h, q, k: table[q] == table[k])

    assert make(7) == make(7) and make(7) != make(8)


def test_untraceable_rules_say_why():
    with pytest.raises(StofMaskError, match=r"no `if`"):
        masks.rule(lambda b, h, q, k: q if q > k else k)
    with pytest.raises(StofMaskError, match="mask_mod"):
        masks.rule(3)


@pytest.mark.parametrize(
    ("mask_mod", "got"),
    [
        (lambda b, h, q, k: torch.where(q >= k, 0.0, -torch.inf), r"\[\] of torch.float32"),
        (lambda b, h, q, k: None, "None"),
        (lambda b, h, q, k: 1.0, "1.0"),
        (lambda b, h, q, k: torch.arange(3) > q, r"\[3\] of torch.bool"),
    ],
    ids=["what is added to scores", "no return", "a number", "several"],
)
def test_a_rule_answers_yes_or_no(mask_mod, got):
    with pytest.raises(StofMaskError, match=rf"returned (a tensor )?{got}.*True where the query"):
        masks.rule(mask_mod)


def test_a_rule_may_answer_with_a_constant_or_an_integer():
    kept = torch.ones(5, 5, dtype=torch.bool)
    for mask_mod, keep in (
        (lambda b, h, q, k: True, kept),
        (lambda b, h, q, k: (q >= k).int(), kept.tril()),
        (lambda b, h, q, k: kept.triu()[q, k][None], kept.triu()),
    ):
        spec = masks.rule(mask_mod)
        assert masks.build_block_mask(spec, 5, 5, 16).to_dense().equal(keep[None, None])


def test_stored_graphs_call_aten_only():
    spec = masks.rule(documents)
    node = json.loads(spec.to_json())
    content = json.loads(node["graph"])
    content["steps"][0][0] = "os.system"
    node["graph"] = json.dumps(content)
    broken = MaskSpec.from_json(json.dumps(node), spec.tensors())
    with pytest.raises(StofMaskError, match=r"os\.system"):
        broken.plane_shape()


def test_a_rule_can_be_traced_again():
    spec = masks.rule(documents) & masks.sliding_window(30)
    indices = [torch.zeros(1, 1, dtype=torch.int64)] * 2 + [
        torch.arange(S)[:, None],
        torch.arange(S)[None, :],
    ]
    traced = make_fx(lambda b, h, q, k: spec.keep(b, h, q, k))(*indices)
    assert torch.equal(traced(*indices), spec.keep(*indices))


@pytest.mark.parametrize("mod", [documents, by_head, by_batch], ids=lambda mod: mod.__name__)
@pytest.mark.parametrize("block", [32, 128])
def test_flex_block_masks_in_and_out(mod, block):
    flex = create_block_mask(mod, 2, 2, S, S, device="cpu", BLOCK_SIZE=block)
    expected = create_mask(mod, 2, 2, S, S, device="cpu")
    spec = masks.from_block_mask(flex)
    mask = masks.build_block_mask(spec, S, S, 16, batch=2, heads=2)
    assert torch.equal(mask.to_dense().expand(2, 2, S, S), expected)
    with pytest.raises(StofMaskError, match="give a rule"):
        masks.build_block_mask(spec, S + 1, S + 1, batch=2, heads=2)

    rule = masks.rule(mod)
    out = masks.to_flex(masks.build_block_mask(rule, S, S, block, batch=2, heads=2), rule)
    assert out.seq_lengths == (S, S)
    assert torch.equal(out.to_dense().expand(2, 2, -1, -1), flex.to_dense())


def test_a_flex_block_mask_without_a_function_is_its_blocks():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    columns = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    flex = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=16, seq_lengths=(32, 32))
    dense = masks.build_block_mask(masks.from_block_mask(flex), 32, 32, 16).to_dense()[0, 0]
    expected = torch.ones(32, 32, dtype=torch.bool)
    expected[:16, :16] = False
    assert torch.equal(dense, expected)


RECOGNISED = [
    masks.dense(),
    ~masks.dense(),
    masks.causal(),
    masks.sliding_window(8),
    masks.sliding_window(8, causal=True),
    masks.longformer(8, 5),
    masks.longformer(8, 5) & masks.causal(),
    masks.block_diagonal(16),
    masks.block_diagonal(16) & masks.causal(),
    masks.prefix_lm(7),
    masks.from_cu_seqlens([0, 20, 50, 100]),
    masks.from_cu_seqlens([0, 20, 50, 100]) & masks.causal(),
    masks.per_head([masks.causal(), masks.sliding_window(3)]),
]


@pytest.mark.parametrize("spec", RECOGNISED, ids=str)
def test_dense_masks_become_rules_again(spec):
    dense = masks.build_block_mask(spec, 100, 100, heads=2).to_dense()
    assert masks.recognise(dense) == spec
    assert masks.recognise(dense.expand(3, -1, -1, -1)) == spec


def test_lower_right_is_recognised():
    spec = masks.causal(lower_right=True)
    assert masks.recognise(masks.build_block_mask(spec, 64, 100).to_dense()) == spec


@pytest.mark.parametrize("size", [(1, 50), (33, 257), (257, 33), (64, 64)], ids=str)
def test_recognition_never_changes_the_mask(size):
    generator = torch.Generator().manual_seed(0)
    cases = [
        torch.rand(size, generator=generator) < 0.5,
        torch.rand(2, *size, generator=generator) < 0.9,
    ]
    for spec in (
        masks.longformer(8, 5),
        masks.bigbird(4, 4, 0.3, random_block=8),
        masks.strided(7),
    ):
        cases.append(masks.build_block_mask(spec, *size).to_dense())
    flipped = torch.ones(size, dtype=torch.bool).tril()
    flipped[0, -1] = ~flipped[0, -1]
    for dense in [*cases, flipped]:
        spec = masks.recognise(dense)
        sizes = {"batch": dense.shape[0]} if dense.dim() == 3 else {}
        again = masks.build_block_mask(spec, *size, 16, **sizes).to_dense()
        expected = dense[:, None] if dense.dim() == 3 else dense
        assert torch.equal(again, expected.expand_as(again))


def test_as_mask_spec():
    flex = create_block_mask(documents, None, None, S, S, device="cpu")
    for value in (masks.causal(), flex, torch.ones(3, 3).bool(), documents):
        assert isinstance(masks.as_mask_spec(value), MaskSpec)
