"""Long tile rows as several programs: the memory of their pieces, and the launch that merges them.

A row of a mask is one program's work. With few heads a row that sees every key (global tokens)
takes longer than all others together; so it is cut into pieces of as many tiles each, which write
averages of values, and what they are averages over.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .merge_kernel import merge_rows_kernel
from .problem import TileMask, broadcast_strides, launchable, next_power_of_two

_STEP = 16  # rows of a merging program


class Pieces(NamedTuple):
    """Results of the pieces of long rows, by batch and head, row, piece and query of the row."""

    values: Tensor  # fp32 [planes, heavy_rows, pieces, block_q, width]
    stats: Tensor  # fp32 [planes, heavy_rows, pieces, 2, block_q]: maximum, sum of weights


def new_pieces(
    q: Tensor, planes: int, heavy_rows: int, pieces: int, block_q: int, width: int
) -> Pieces:
    """Memory for the pieces of the heavy rows of all planes (batch times heads).

    Args:
        width: of the values, padding included.
    """
    shape = (planes, heavy_rows, pieces)
    values = q.new_empty((*shape, block_q, width), dtype=torch.float32)
    return Pieces(values, q.new_empty((*shape, 2, block_q), dtype=torch.float32))


def merge_rows(pieces: Pieces, arrays: TileMask, out: Tensor, lse: Tensor) -> None:
    """Write the rows that were computed in pieces.

    Args:
        pieces: of all heavy rows. arrays: of the mask; its ``row_order`` names the rows.
        out: [batch, q_len, heads, value_dim] memory. lse: [batch, heads, q_len], or [0].
    """
    planes, heavy_rows, count, block_q, width = pieces.values.shape
    _, q_len, heads, value_dim = out.shape
    rows = -(-q_len // block_q)
    step = min(_STEP, block_q)
    launchable(merge_rows_kernel, out)[(planes * heavy_rows * (block_q // step),)](
        pieces.values, pieces.stats,
        arrays.plane_map, *broadcast_strides(arrays.plane_map), arrays.row_order,
        out, lse if lse.numel() else pieces.stats,
        heads, q_len, rows, heavy_rows, count,
        VALUE_DIM=value_dim,
        WIDTH=width,
        BLOCK_E=next_power_of_two(value_dim),
        BLOCK_M=block_q,
        STEP=step,
        RETURN_LSE=lse.numel() > 0,
        SINGLE_PLANE=arrays.row_order.numel() == rows,
        num_warps=4,
    )  # fmt: skip
