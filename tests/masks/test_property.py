"""Random rules through the algebra: the stored block mask equals the rule evaluated element by
element.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stof_compile import masks
from stof_compile.masks import MaskSpec
from stof_compile.masks.spec import EMPTY, FULL, MIXED

SETTINGS = settings(max_examples=150, deadline=None)

BATCH, HEADS = 2, 3
LONGEST = 160


def shifted(b, h, q, k):
    return (q + 3 * h >= k) | (b * 40 > k)


def tabled(b, h, q, k):
    return TABLE[q] <= TABLE[k]


TABLE = torch.arange(2 * LONGEST) % 37
IDS = torch.randint(0, 9, (BATCH, 2 * LONGEST), generator=torch.Generator().manual_seed(1))

numbers = st.integers(0, 70)
sizes = st.integers(1, 50)

leaves = st.one_of(
    st.just(masks.dense()),
    st.builds(masks.causal, st.booleans()),
    st.builds(masks.sliding_window, sizes, st.booleans()),
    st.builds(masks.longformer, numbers, numbers),
    st.builds(
        masks.bigbird,
        numbers,
        numbers,
        st.floats(0, 1),
        st.integers(0, 5),
        st.sampled_from([8, 16, 24, 64]),
        st.just(2 * LONGEST),
        st.sampled_from([1, HEADS]),
    ),
    st.builds(
        masks.random_blocks,
        st.floats(0, 1),
        st.sampled_from([16, 40]),
        st.integers(0, 5),
        st.just(2 * LONGEST),
    ),
    st.builds(masks.longformer_ae, numbers, sizes),
    st.builds(masks.bigbird_ae, sizes, sizes, st.just(0.1)),
    st.builds(masks.global_tokens, numbers),
    st.builds(masks.dilated, numbers, sizes, st.booleans()),
    st.builds(masks.strided, sizes),
    st.integers(1, 50).flatmap(
        lambda stride: st.builds(masks.fixed, st.just(stride), st.integers(1, stride))
    ),
    st.builds(masks.block_diagonal, sizes),
    st.builds(masks.prefix_lm, numbers),
    st.just(masks.batch_prefix_lm([11, 90])),
    st.just(masks.document(IDS)),
    st.just(masks.document(IDS[0].sort().values)),
    st.just(masks.rule(shifted)),
    st.just(masks.rule(tabled)),
)

specs: st.SearchStrategy[MaskSpec] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda spec: ~spec),
        st.lists(inner, min_size=HEADS, max_size=HEADS).map(masks.per_head),
    ),
    max_leaves=4,
)
lengths = st.integers(1, LONGEST)
blocks = st.sampled_from([(8, 8), (16, 16), (64, 32), (32, 64), (64, 64), (128, 16)])


def dense_of(spec: MaskSpec, q_len: int, k_len: int, offset: int) -> torch.Tensor:
    """The rule on every element: bool [BATCH, HEADS, q_len, k_len]."""
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    q, k = torch.arange(offset, offset + q_len)[:, None], torch.arange(k_len)
    keep = spec.bind(q_len, k_len, offset).keep(b, h, q, k)
    assert keep.dtype == torch.bool
    return keep.expand(BATCH, HEADS, q_len, k_len)


@SETTINGS
@given(specs, lengths, lengths, blocks, st.sampled_from([0, 0, 7, 64]))
def test_block_mask_equals_rule(spec, q_len, k_len, block, offset):
    mask = masks.build_block_mask(
        spec, q_len, k_len, block, q_offset=offset, batch=BATCH, heads=HEADS
    )
    expected = dense_of(spec, q_len, k_len, offset)
    assert torch.equal(mask.to_dense().expand_as(expected), expected)
    check_storage(mask)


def check_storage(mask):
    rows = mask.planes * mask.rows
    assert mask.row_ptr.shape == (rows + 1,) and mask.full_start.shape == (rows,)
    assert int(mask.row_ptr[-1]) == mask.col_idx.shape[0] == mask.bitmap_id.shape[0]
    assert bool((mask.full_start >= mask.row_ptr[:-1]).all())
    assert bool((mask.full_start <= mask.row_ptr[1:]).all())
    order = mask.row_order.reshape(mask.planes, mask.rows)
    assert torch.equal(order.sort(1).values, torch.arange(mask.rows).expand_as(order).int())
    weight = mask.row_ptr.diff().reshape(mask.planes, mask.rows).gather(1, order.long())
    assert bool((weight.diff(dim=1) <= 0).all())
    assert mask.bitmap.unique(dim=0).shape[0] == mask.bitmap.shape[0]
    tiles = mask.to_dense()
    for plane in range(mask.planes):
        places = (mask.plane_map == plane).nonzero()
        assert places.shape[0], "every stored plane is used"
        b, h = places[0].tolist()
        for row in range(mask.rows):
            number = plane * mask.rows + row
            start, middle, stop = (
                int(t[i])
                for t, i in (
                    (mask.row_ptr, number),
                    (mask.full_start, number),
                    (mask.row_ptr, number + 1),
                )
            )
            for kind, columns in (
                ("part", mask.col_idx[start:middle]),
                ("full", mask.col_idx[middle:stop]),
            ):
                assert bool((columns.diff() > 0).all())
                for col in columns.tolist():
                    tile = cut(tiles[b, h], mask, row, col)
                    assert tile.any()
                    if kind == "full":
                        assert tile.all() and tile.shape == (mask.block_q, mask.block_k)
                    else:
                        assert not tile.all() or tile.shape != (mask.block_q, mask.block_k)
                        check_band(mask, tile, row, col)


def cut(dense, mask, row, col):
    return dense[
        row * mask.block_q : (row + 1) * mask.block_q, col * mask.block_k : (col + 1) * mask.block_k
    ]


def check_band(mask, tile, row, col):
    if mask.band is None:
        return
    q = torch.arange(tile.shape[0])[:, None] + row * mask.block_q + mask.q_offset
    k = torch.arange(tile.shape[1]) + col * mask.block_k
    assert torch.equal(mask.band.keep(q, k), tile)


banded = st.recursive(
    st.one_of(
        st.builds(masks.causal),
        st.builds(masks.sliding_window, sizes, st.booleans()),
        st.builds(masks.longformer, numbers, numbers),
        st.builds(masks.global_tokens, numbers),
        st.builds(masks.prefix_lm, numbers),
        st.builds(
            masks.bigbird,
            numbers,
            numbers,
            st.just(0.4),
            st.integers(0, 9),
            st.sampled_from([32, 64]),
        ),
        st.builds(masks.block_diagonal, st.sampled_from([32, 64, 48])),
        st.builds(masks.random_blocks, st.just(0.3), st.sampled_from([32, 64])),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda spec: ~spec),
    ),
    max_leaves=3,
)


@SETTINGS
@given(banded, lengths, lengths, st.sampled_from([(16, 16), (32, 32), (32, 16)]))
def test_band_agrees_on_part_tiles(spec, q_len, k_len, block):
    mask = masks.build_block_mask(spec, q_len, k_len, block)
    dense = mask.to_dense()[0, 0]
    assert torch.equal(dense, dense_of(spec, q_len, k_len, 0)[0, 0])
    for row in range(mask.rows):
        for col in mask.col_idx[mask.row_ptr[row] : mask.full_start[row]].tolist():
            check_band(mask, cut(dense, mask, row, col), row, col)


@SETTINGS
@given(specs, lengths, lengths, blocks)
def test_classes_never_lie(spec, q_len, k_len, block):
    bound = spec.bind(q_len, k_len)
    dense = dense_of(spec, q_len, k_len, 0)
    q_lo, k_lo = torch.arange(0, q_len, block[0])[:, None], torch.arange(0, k_len, block[1])
    q_hi, k_hi = (q_lo + block[0]).clamp(max=q_len) - 1, (k_lo + block[1]).clamp(max=k_len) - 1
    b, h = torch.tensor(BATCH - 1), torch.tensor(HEADS - 1)
    kinds = bound.classify(q_lo, q_hi, k_lo, k_hi, b, h)
    assert kinds.dtype == torch.int8 and kinds.shape == (q_lo.shape[0], k_lo.shape[0])
    for row in range(kinds.shape[0]):
        for col in range(kinds.shape[1]):
            tile = dense[-1, -1, q_lo[row] : q_hi[row] + 1, k_lo[col] : k_hi[col] + 1]
            kind = int(kinds[row, col])
            assert kind in (EMPTY, FULL, MIXED)
            assert not (kind == EMPTY and tile.any()) and not (kind == FULL and not tile.all())


@SETTINGS
@given(specs)
def test_serialisation_round_trip(spec):
    again = MaskSpec.from_json(spec.to_json(), spec.tensors())
    assert again == spec and again.key == spec.key and again.to_json() == spec.to_json()
    assert repr(again) == repr(spec)
