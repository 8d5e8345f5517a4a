"""Which form of the Hopper kernel a call by hand takes: the one that compiled code lists first.

Nothing is measured there, so it is the tiles of the mask that decide, as in ``decision_table.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from stof_compile.attention.call import with_shifted_tiles
from stof_compile.attention.decision_table import PAIR_TILE, PAIRS_FIRST
from stof_compile.config_fields import hopper_programs
from stof_compile.masks.block_mask import BlockMask
from stof_compile.masks.hopper_arrays import kinds_refusal
from stof_compile.masks.long_rows import row_pieces


def suited(
    block_mask: BlockMask,
    config: tuple[int, ...],
    head_dim: int,
    planes: int,
    other: Callable[[tuple[int, int]], BlockMask],
) -> tuple[BlockMask, tuple[int, ...]]:
    """The form of the Hopper kernel that suits a mask: for calls without log-sum-exp or gradients.

    As they are where the config is not the Hopper kernel's, and while a CUDA stream is capturing
    where what another form reads is not there yet.

    Args:
        block_mask: in tiles of 64 x 64. config: fields of a BlockConfig for it.
        planes: batch times heads.
        other: (rows, keys) of a tile -> the mask in such tiles.

    Returns:
        The mask and the config of the call.
    """
    if not hopper_programs(config) or not block_mask.col_idx.numel():
        return block_mask, config
    for tile, most_scores, found in _larger(head_dim):
        if hopper_programs(found) > 1 and block_mask.heavy_rows:
            continue  # one consumer's work in a row of two: 4 to 5 % slower under Longformer
        larger = _retiled(block_mask, tile, most_scores, other)
        if larger is None:
            continue
        # long rows are not cut in these forms: with few heads all else would wait for them
        if row_pieces(larger, planes, hopper_programs(found), queued=True) == 1:
            return larger, found
    return block_mask, with_shifted_tiles(block_mask, config, head_dim)


def scores_share(block_mask: BlockMask, tile: tuple[int, int]) -> float:
    """Scores that tiles of a multiple of the mask's size hold, over those that its own hold."""
    rows, keys = tile[0] // block_mask.block_q, tile[1] // block_mask.block_k
    row = block_mask.row_of_tile()
    plane, row = row // block_mask.rows, row % block_mask.rows // rows
    place = plane * block_mask.rows + row
    place = place * block_mask.cols + block_mask.col_idx // keys
    found: int = place.unique().numel()
    return found * rows * keys / max(1, place.numel())


@cache
def _larger(head_dim: int) -> tuple[tuple[tuple[int, int], float, tuple[int, ...]], ...]:
    """(tile, most scores it may hold, config) of forms with larger tiles, the likely best first."""
    from stof_compile.kernels.attention_blockwise import BlockConfig
    from stof_compile.kernels.hopper_forms import hopper_forms, offered_form

    form = offered_form(head_dim)
    most_scores = {PAIR_TILE: PAIRS_FIRST}
    if form is not None:
        most_scores[form.rows, 64] = form.most_scores
    return tuple(
        ((rows, keys), most_scores[rows, keys], tuple(BlockConfig(rows, keys, 4, stages, hopper=n)))
        for rows, keys, n, stages in hopper_forms(head_dim, pairs=True, shared=True)
        if (rows, keys) in most_scores
    )


def _retiled(
    block_mask: BlockMask,
    tile: tuple[int, int],
    most_scores: float,
    other: Callable[[tuple[int, int]], BlockMask],
) -> BlockMask | None:
    """The mask in larger tiles, None where they hold too much: found once for each mask."""
    known: dict[tuple[int, int], BlockMask | None]
    known = vars(block_mask).setdefault("_larger_tiles", {})
    if tile not in known:
        if block_mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        larger = other(tile) if scores_share(block_mask, tile) <= most_scores else None
        if larger is not None and tile[0] > 64 and kinds_refusal(larger.bitmap.shape[0]):
            larger = None
        known[tile] = larger
    return known[tile]
