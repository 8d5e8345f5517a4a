"""Each rule against its definition written out, the paper's mask table, keys and errors."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from stof_compile import masks
from stof_compile.errors import StofMaskError
from stof_compile.masks import MaskSpec
from stof_compile.masks.bands import FAR, BandRule

S = 200


def dense(spec, q_len=S, k_len=S, offset=0, **sizes):
    return masks.build_block_mask(spec, q_len, k_len, 32, q_offset=offset, **sizes).to_dense()[0, 0]


Q, K = torch.arange(S)[:, None], torch.arange(S)[None, :]
D = Q - K
DOCUMENT = torch.tensor([0] * 50 + [1] * 70 + [2] * 80)

DEFINITIONS = {
    "dense": (masks.dense(), torch.ones(S, S, dtype=torch.bool)),
    "causal": (masks.causal(), D >= 0),
    "sliding": (masks.sliding_window(9), D.abs() <= 9),
    "sliding causal": (masks.sliding_window(9, causal=True), (D >= 0) & (D < 9)),
    "global": (masks.global_tokens(5), (Q < 5) | (K < 5)),
    "longformer": (masks.longformer(9, 5), (D.abs() <= 9) | (Q < 5) | (K < 5)),
    "dilated": (masks.dilated(6, 3), (D.abs() <= 18) & (D % 3 == 0)),
    "dilated causal": (masks.dilated(6, 3, causal=True), (D >= 0) & (D <= 18) & (D % 3 == 0)),
    "strided": (masks.strided(12), (D >= 0) & ((D <= 12) | (D % 12 == 0))),
    "fixed": (masks.fixed(12, 2), (D >= 0) & ((Q // 12 == K // 12) | (K % 12 >= 10))),
    "block diagonal": (masks.block_diagonal(30), Q // 30 == K // 30),
    "prefix": (masks.prefix_lm(70), (D >= 0) | (K < 70)),
    "documents": (masks.from_cu_seqlens([0, 50, 50, 120, S]), DOCUMENT[:, None] == DOCUMENT),
    "and": (masks.causal() & masks.block_diagonal(30), (D >= 0) & (Q // 30 == K // 30)),
    "or": (masks.causal() | masks.global_tokens(9), (D >= 0) | (K < 9) | (Q < 9)),
    "not": (~masks.sliding_window(9), D.abs() > 9),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definition(name):
    spec, expected = DEFINITIONS[name]
    assert torch.equal(dense(spec), expected)


@pytest.mark.parametrize(
    ("spec", "sparsity"),
    [
        (masks.causal(), 49.951),
        (masks.sliding_window(32), 93.753),
        (masks.longformer(32, 32), 87.799),
        (masks.bigbird(32, 32, 0.1), 80.768),
        (masks.bigbird(32, 32, 0.1, seed=7), 80.768),
        (masks.longformer_ae(32, 32), 82.141),
        (masks.bigbird_ae(32, 32, 0.1), 87.719),
    ],
    ids=str,
)
def test_sparsity_of_the_mask_table(spec, sparsity):
    assert 100 * (1 - masks.build_block_mask(spec, 1024, 1024).density) == pytest.approx(
        sparsity, abs=6e-4
    )


def test_bigbird_fills_18_of_the_182_tiles_that_longformer_leaves_empty():
    base = masks.build_block_mask(masks.longformer(32, 32), 1024, 1024)
    bigbird = masks.build_block_mask(masks.bigbird(32, 32, 0.1), 1024, 1024)
    assert base.empty_tiles == 182
    assert (bigbird.full_tiles - base.full_tiles, bigbird.part_tiles) == (18, base.part_tiles)


def test_random_tiles_do_not_depend_on_the_kernel_tile():
    spec = masks.bigbird(32, 32, 0.1)
    expected = masks.build_block_mask(spec, 500, 500, 64).to_dense()
    for block in (16, (64, 32), (128, 64), 24):
        assert torch.equal(masks.build_block_mask(spec, 500, 500, block).to_dense(), expected)


def test_random_tiles_of_a_shorter_length_are_a_prefix():
    spec = masks.bigbird(16, 16, 0.2, random_block=32, max_len=512)
    whole = dense(spec, 512, 512)
    assert torch.equal(dense(spec, 333, 333), whole[:333, :333])
    assert torch.equal(dense(spec, 1, 334, offset=333), whole[333:334, :334])


def test_random_tiles_without_max_len_refuse_growing_lengths():
    with pytest.raises(StofMaskError, match="max_len"):
        masks.build_block_mask(masks.bigbird(16, 16, 0.1), 1, 100, q_offset=99)
    with pytest.raises(StofMaskError, match="max_len=64"):
        masks.build_block_mask(masks.bigbird(16, 16, 0.1, max_len=64), 100, 100)


def test_heads_draw_their_own_random_tiles():
    mask = masks.build_block_mask(
        masks.random_blocks(0.3, block=16, heads=3), 128, 128, 16, heads=3
    )
    assert mask.planes == 3 and mask.full_tiles == 3 * round(0.3 * 64)


def test_few_random_tiles_are_counted_on_the_cpu_for_every_device():
    """Nothing can be counted on this one."""
    spec = masks.bigbird(22, 22, 0.1, heads=2)
    limits = [
        [rule.limits for rule in spec.bind(512, 512, 0, place).walk() if hasattr(rule, "limits")]
        for place in ("meta", "cpu")
    ]
    assert limits[0] == limits[1] and limits[0] and all(len(found) == 2 for found in limits[0])


def test_causal_positions_are_absolute_and_lower_right_is_not():
    assert torch.equal(
        dense(masks.causal(), 50, 120, offset=70), dense(masks.causal(lower_right=True), 50, 120)
    )
    lower_right = torch.ones(50, 120, dtype=torch.bool).tril(70)
    for offset in (0, 13, 70):
        assert torch.equal(
            dense(masks.causal(lower_right=True), 50, 120, offset=offset), lower_right
        )
    assert torch.equal(dense(masks.causal(), 50, 120), torch.ones(50, 120, dtype=torch.bool).tril())


def test_batch_rows_and_heads_of_their_own():
    ids = torch.tensor([[0] * 40 + [1] * 60, [0] * 70 + [1] * 30])
    spec = masks.document(ids) & masks.per_head([masks.causal(), masks.dense(), masks.causal()])
    mask = masks.build_block_mask(spec, 100, 100, 16, batch=2, heads=3)
    assert mask.planes == 4 and mask.plane_map[:, 0].equal(mask.plane_map[:, 2])
    same = ids[:, None, :, None] == ids[:, None, None, :]
    lower = torch.ones(100, 100, dtype=torch.bool).tril()
    heads = torch.stack([lower, torch.ones_like(lower), lower])
    assert torch.equal(mask.to_dense(), same & heads)


def test_batch_prefix():
    mask = masks.build_block_mask(masks.batch_prefix_lm([3, 60]), 100, 100, 16, batch=2)
    k, q = torch.arange(100), torch.arange(100)[:, None]
    expected = (k <= q) | (k < torch.tensor([3, 60])[:, None, None])
    assert torch.equal(mask.to_dense()[:, 0], expected)


def mask_mod(b, h, q, k):
    return q >= k


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: masks.sliding_window(-1), "at least 0"),
        (lambda: masks.sliding_window(2**31), "32 bits"),
        (lambda: masks.prefix_lm(2**63), "32 bits"),
        (lambda: masks.sliding_window(0, causal=True), "at least 1"),
        (lambda: masks.longformer(4, 2.5), "whole number"),
        (lambda: masks.bigbird(4, 4, 1.5), "between 0 and 1"),
        (lambda: masks.bigbird(4, 4, "0.1"), "between 0 and 1"),
        (lambda: masks.bigbird_ae(4, 4, -0.1), "between 0 and 1"),
        (lambda: masks.bigbird(4, 4, 0.1, seed=1.5), "seed is a whole number"),
        (lambda: masks.random_blocks(0.1, seed=None), "seed is a whole number"),
        (lambda: masks.rule(lambda b, h, q, k: torch.rand_like(q.float()) > 0.5), "random numbers"),
        (lambda: masks.fixed(8, 9), "1..stride"),
        (lambda: masks.document(torch.zeros(3)), "integers"),
        (lambda: masks.document([[0, 0, 1], [0, 1]]), "rows of one length"),
        (lambda: masks.document(None), "got NoneType"),
        (lambda: masks.from_cu_seqlens([0, 5, 3]), r"ascending .* got \[0, 5, 3\]"),
        (lambda: masks.from_cu_seqlens(torch.tensor([0.0, 3.5, 5.0])), r"float32 \[3\]; convert"),
        (lambda: masks.from_cu_seqlens([[0, 3], [0]]), "ascending"),
        (lambda: masks.from_cu_seqlens([0, 0]), r"got \[0, 0\]"),
        (lambda: masks.batch_prefix_lm([[1], [2, 3]]), "integers"),
        (lambda: masks.batch_prefix_lm([1j]), "complex64"),
        (lambda: masks.from_tensor(torch.zeros(3, 3)), "bool tensor"),
        (lambda: masks.per_head([]), "non-empty"),
        (lambda: masks.per_head(masks.causal()), "got the rule causal"),
        (lambda: masks.per_head(masks.causal() for _ in range(2)), "got generator"),
        (lambda: masks.per_head(torch.ones(2, 3)), "got Tensor; give a list"),
        (lambda: masks.per_head([masks.causal(), mask_mod]), "got function for head 1"),
        (lambda: masks.rule(masks.causal), "called first"),
        (lambda: masks.rule(lambda q, k: q >= k), "four indices"),
        (lambda: masks.causal() & torch.ones(3, 3), "masks.from_tensor"),
        (lambda: masks.causal() & 3, "'&' needs a mask rule on both sides, got int"),
        (lambda: 3 | masks.causal(), "got int"),
        (lambda: mask_mod & masks.causal(), "got function; wrap a function .* with masks.rule"),
        (lambda: torch.ones(3, 3).bool() & masks.causal(), "got Tensor"),
        (lambda: np.ones((3, 3), bool) | masks.causal(), "got ndarray"),
        (lambda: masks.build_block_mask(mask_mod, 9, 9), "as_mask_spec"),
        (lambda: masks.build_block_mask(masks.causal(), 10, 10, 12), "multiples of 8"),
        (lambda: masks.build_block_mask(masks.causal(), -1, 10), "negative"),
        (
            lambda: masks.build_block_mask(masks.per_head([masks.causal()] * 3), 9, 9, heads=2),
            "3 head planes",
        ),
        (
            lambda: masks.build_block_mask(masks.document(torch.zeros(9).int()), 9, 12),
            "cover 9 positions",
        ),
        (
            lambda: masks.build_block_mask(masks.from_tensor(torch.ones(9, 9).bool()), 9, 12),
            "give a rule",
        ),
        (lambda: masks.causal(lower_right=True).keep(*[torch.zeros(1).long()] * 4), "bind"),
        (lambda: MaskSpec.from_json('{"rule": "nonsense"}'), "unknown mask rule"),
        (lambda: MaskSpec.from_json('{"rule": "document", "ids": {"tensor": 0}}'), "tensor 0"),
        (lambda: MaskSpec.from_json('{"rule": "band", "low": 1}'), "no field"),
        (lambda: MaskSpec.from_json("{"), "not the JSON"),
        (lambda: masks.as_mask_spec(3), "int"),
    ],
)
def test_errors_say_what_to_do(make, match):
    with pytest.raises(StofMaskError, match=match):
        make()


TABLE = torch.arange(2 * 2 * 9).reshape(2, 2, 9) // 5
ROW = TABLE[0, 0]


@pytest.mark.parametrize(
    ("function", "sizes", "match"),
    [
        (lambda b, h, q, k: ROW[q] == 1, (12, 9), "the query .* 9 positions, .* 11 is"),
        (lambda b, h, q, k: TABLE[b, h, k] == 1, (9, 10), "the key .* a table of 10 or more"),
        (lambda b, h, q, k: TABLE[b][h][k] == 1, (9, 10), "the key .* a table of 10 or more"),
        (lambda b, h, q, k: TABLE[b, 0, k] == 1, (9, 9, 3), "batch row .* of 2, the problem has 3"),
        (lambda b, h, q, k: TABLE[b][h, k] == 1, (9, 9, 2, 4), "the head .* of 2, the problem has"),
        (lambda b, h, q, k: ROW[q + 1] == 1, (9, 9), "index 9 is out of bounds"),
    ],
)
def test_tables_of_a_function_that_are_too_short(function, sizes, match):
    q_len, k_len, batch, heads = (*sizes, 2, 2)[:4]
    for spec in (masks.rule(function), masks.causal() & ~masks.rule(function)):
        with pytest.raises(StofMaskError, match=match):
            masks.build_block_mask(spec, q_len, k_len, 8, batch=batch, heads=heads)


def test_tables_of_a_function_that_are_long_enough():
    clamped = masks.rule(lambda b, h, q, k: ROW[q.clamp(max=8)] == 1)
    assert torch.equal(dense(clamped, 12, 9)[:9, 0], TABLE[0, 0] == 1)
    longer = masks.rule(lambda b, h, q, k: TABLE[b, h, k] == 1)
    found = masks.build_block_mask(longer, 5, 9, 8).to_dense()
    assert torch.equal(found[0, 0, 0], TABLE[0, 0] == 1)


@pytest.mark.parametrize(
    "ask",
    [
        bool,
        lambda rule: not rule,
        lambda rule: rule and masks.dense(),
        lambda rule: rule or masks.dense(),
        lambda rule: 1 if rule else 0,
        lambda rule: all([rule, rule]),
    ],
    ids=["bool", "not", "and", "or", "if", "all"],
)
def test_a_rule_has_no_truth_value(ask):
    for rule in (masks.causal(), ~masks.bigbird(4, 4, 0.1), masks.rule(mask_mod)):
        with pytest.raises(TypeError, match=r"combine rules by &, \| and ~"):
            ask(rule)


BANDS = {
    "causal": (masks.causal(), BandRule(hi=0)),
    "dense": (masks.dense(), BandRule()),
    "window": (masks.sliding_window(9), BandRule(-9, 9)),
    "window and causal": (masks.sliding_window(9) & masks.causal(), BandRule(-9, 0)),
    "longformer": (masks.longformer(9, 5), BandRule(-9, 9, 5, 5)),
    "bigbird": (masks.bigbird(9, 5, 0.1), BandRule(-9, 9, 5, 5)),
    "causal bigbird": (masks.bigbird(9, 5, 0.1) & masks.causal(), BandRule(-9, 9, 5, 5, 0)),
    "random only": (masks.random_blocks(0.1), None),
    "prefix": (masks.prefix_lm(9), BandRule(-FAR, 0, 0, 9)),
    "future": (~masks.causal(), BandRule(lo=1)),
    "aligned segments": (masks.block_diagonal(64) & masks.causal(), BandRule(hi=0)),
    "odd segments": (masks.block_diagonal(48) & masks.causal(), None),
    "strided": (masks.strided(9), None),
    "two bands apart": (masks.sliding_window(3) | ~masks.causal(), BandRule(lo=-3)),
    "hole": (~masks.sliding_window(3), None),
}


@pytest.mark.parametrize("name", BANDS)
def test_band_rule(name):
    spec, expected = BANDS[name]
    assert spec.band_rule(64, 64) == expected


def test_band_needs_aligned_random_tiles():
    assert masks.bigbird(9, 5, 0.1, random_block=48).band_rule(64, 64) is None
    assert masks.bigbird(9, 5, 0.1).band_rule(64, 64, 7) is None
    assert masks.bigbird(9, 5, 0.1).band_rule(32, 64, 32) == BandRule(-9, 9, 5, 5)


def test_equality_ignores_names_and_order():
    named = masks.longformer(9, 5)
    spelled = masks.global_tokens(5) | masks.sliding_window(9) | masks.global_tokens(5)
    assert named == spelled and hash(named) == hash(spelled)
    assert named != masks.longformer(9, 6) and named != "longformer"
    assert ~~named is named
    assert masks.document([0, 0, 1]) != masks.document([0, 1, 1])


SCRIPT = """
import torch
from stof_compile import masks
table = torch.arange(50) // 7
rule = masks.rule(lambda b, h, q, k: (table[q] == table[k]) | (q - k < 3))
spec = masks.bigbird(9, 5, 0.1) & rule
print(spec.key, masks.build_block_mask(spec, 50, 50, 16).key)
"""


def test_keys_are_stable_across_processes(capsys):
    there = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    ).stdout
    exec(SCRIPT, {"__name__": "__main__"})
    assert capsys.readouterr().out == there and len(there.split()[0]) == 32


def test_pickle_keeps_identity():
    spec = masks.per_head([masks.bigbird(3, 4, 0.5), masks.document([0, 0, 1]) & masks.causal()])
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert {spec: 1}[pickle.loads(pickle.dumps(spec))] == 1


def test_a_tensor_rule_does_not_follow_its_tensor():
    kept = torch.ones(8, 8, dtype=torch.bool)
    spec = masks.from_tensor(kept)
    kept[:, 4:] = False
    assert masks.build_block_mask(spec, 8, 8, 8).to_dense().all()
    assert spec == masks.from_tensor(torch.ones(8, 8, dtype=torch.bool))


def test_a_function_rule_does_not_follow_its_tensors():
    ids = torch.arange(S) // 10
    rule, other = masks.rule(lambda b, h, q, k: ids[q] == ids[k]), ids.clone()
    before = dense(rule)
    ids.copy_(torch.arange(S) // 3)
    assert torch.equal(dense(rule), before)
    assert torch.equal(dense(rule, 64, 64), before[:64, :64])
    assert rule == masks.rule(lambda b, h, q, k: other[q] == other[k])


def test_patterns_that_move_with_the_length_are_known():
    moving = masks.longformer_ae(4, 4)
    assert moving.moves_with_length and (masks.causal() & ~moving).moves_with_length
    assert masks.bigbird_ae(4, 4, 0.3).moves_with_length
    assert not masks.longformer(4, 4).moves_with_length
    assert not torch.equal(dense(moving, 96, 96), dense(moving)[:96, :96])


def test_a_single_rule_per_head_serves_all_heads():
    nested = masks.per_head([masks.dense(), masks.per_head([masks.causal()])])
    found = masks.build_block_mask(nested, S, S, 32, heads=2).to_dense()
    assert found[0, 0].all() and torch.equal(found[0, 1], D >= 0)


def test_numbers_of_numpy_are_numbers():
    whole, half = np.int64, np.float32(0.5)
    found = masks.bigbird(whole(4), np.int32(2), half, seed=whole(3), random_block=np.uint8(16))
    assert found.key == masks.bigbird(4, 2, 0.5, seed=3, random_block=16).key
    assert masks.sliding_window(whole(3)).to_json() == masks.sliding_window(3).to_json()


@pytest.mark.parametrize(
    "rule",
    [
        masks.bigbird(window=8, global_tokens=8, random_fill=0.2),
        masks.bigbird(window=8, global_tokens=8, random_fill=0.2) & masks.causal(),
        masks.random_blocks(0.3),
        ~masks.random_blocks(0.3) | masks.sliding_window(4),
    ],
    ids=str,
)
def test_a_rule_bound_to_lengths_is_shown_as_it_was_written(rule):
    bound = rule.bind(256, 256)
    assert str(bound) == str(rule) and bound.key != rule.key
    assert "limits" not in str(bound.bind(256, 256))
