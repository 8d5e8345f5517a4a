"""In which order kernels take tile rows: by pairs of neighbours, and whether rows are uneven."""

import pytest
import torch

from stof_compile import masks
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.row_order import pair_order, slot_lengths


def row_ptr_of(tiles):
    """Of rows with so many tiles, [planes, rows]."""
    return torch.cat([torch.zeros(1, dtype=torch.int32), tiles.flatten().cumsum(0).int()])


def order_of(*planes):
    tiles = torch.tensor(planes)
    return pair_order(row_ptr_of(tiles), *tiles.shape).reshape(tiles.shape).tolist()


def test_neighbours_stay_together_and_the_heaviest_come_first():
    assert order_of([1, 1, 0, 5, 2, 2]) == [[2, 3, 4, 5, 0, 1]]
    assert order_of([3, 0]) == [[0, 1]] and order_of([7]) == [[0]]
    assert order_of([2, 2, 1, 3, 4, 0]) == [[0, 1, 2, 3, 4, 5]]  # equal ones in their own order


def test_a_last_row_without_a_neighbour_comes_first():
    assert order_of([9, 9, 1, 1, 0]) == [[4, 0, 1, 2, 3]]
    assert order_of([1, 1, 9, 9, 5]) == [[4, 2, 3, 0, 1]]


def test_planes_have_orders_of_their_own():
    assert order_of([1, 1, 5, 5], [5, 5, 1, 1]) == [[2, 3, 0, 1], [0, 1, 2, 3]]
    assert order_of([1, 1, 5, 5, 0], [5, 5, 1, 1, 9]) == [[4, 2, 3, 0, 1], [4, 0, 1, 2, 3]]


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 33])
def test_any_rows(rows, planes):
    tiles = torch.randint(0, 6, (planes, rows), generator=torch.Generator().manual_seed(rows))
    order = pair_order(row_ptr_of(tiles), planes, rows)
    assert order.dtype == torch.int32 and order.shape == (planes * rows,)
    for own, row in zip(tiles, order.reshape(planes, rows).long(), strict=True):
        assert sorted(row.tolist()) == list(range(rows))
        alone = rows % 2
        assert row[:alone].tolist() == [rows - 1] * alone
        pairs = row[alone:].reshape(-1, 2)
        assert (pairs[:, 0] % 2 == 0).all() and (pairs[:, 1] == pairs[:, 0] + 1).all()
        weight = own[pairs].sum(1)
        assert (weight.diff() <= 0).all()


def test_no_rows():
    empty = torch.zeros(1, dtype=torch.int32)
    assert pair_order(empty, 1, 0).shape == (0,) and pair_order(empty, 0, 4).shape == (0,)


def test_slot_lengths_are_means_of_planes():
    row_ptr = row_ptr_of(torch.tensor([[1, 2, 3], [6, 5, 4]]))
    order = torch.tensor([2, 1, 0, 0, 1, 2], dtype=torch.int32)
    assert slot_lengths(row_ptr, order, 2, 3).tolist() == [4.5, 3.5, 2.5]


@pytest.mark.parametrize("tile", [(64, 64), (64, 128)], ids=str)
def test_uneven(tile):
    def uneven(rule, q_len=1024, k_len=1024):
        return build_block_mask(rule, q_len, k_len, tile).uneven

    assert uneven(masks.causal()) and uneven(masks.causal(), 1000, 1000)
    assert not uneven(masks.dense()) and not uneven(masks.dense(), 1000, 1000)
    assert not uneven(masks.sliding_window(192))
    assert not uneven(
        masks.longformer(192, 64), 4096, 4096
    )  # its heavy row has an order of its own
    keep = torch.zeros(1, 1, 1024, 1024, dtype=torch.bool)
    assert not uneven(masks.from_tensor(keep))
    assert not uneven(masks.dense(), 0, 1024) and not uneven(masks.dense(), 1024, 0)


def test_hopper_kernels_take_rows_by_pairs_where_tiles_are_wide():
    narrow = build_block_mask(masks.causal(), 600, 600, 64)
    assert narrow.hopper_tensors[-1] is narrow.row_order
    assert narrow.row_order.tolist() == list(range(9, -1, -1))
    wide = build_block_mask(masks.causal(), 600, 600, (64, 128))
    assert wide.hopper_tensors[-1].tolist() == [8, 9, 6, 7, 4, 5, 2, 3, 0, 1]
    assert wide.hopper_tensors[-1] is wide.hopper_tensors[-1]
    for mask in (narrow, wide):
        assert mask.hopper_tensors[:5] == mask.tensors[:5]
        assert mask.hopper_tensors[5] is mask.fragments
    with torch.inference_mode():
        made = build_block_mask(masks.causal(), 128, 128, (64, 128))
        assert not any(t.is_inference() for t in made.hopper_tensors)
