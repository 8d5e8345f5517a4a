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
WARPS = 4  # of it


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
    """Write the rows that were computed in pieces, from an operator that traces look into.

    Args:
        pieces: of all heavy rows. arrays: of the mask; its ``row_order`` names the rows.
        out: [batch, q_len, heads, value_dim] memory. lse: [batch, heads, q_len], or [0].
    """
    programs, arguments, constants = merging(pieces, arrays, out, lse)
    launchable(merge_rows_kernel, out)[(programs,)](*arguments, **constants, num_warps=WARPS)


def merging(
    pieces: Pieces, arrays: TileMask, out: Tensor, lse: Tensor
) -> tuple[int, list[Tensor | int], dict[str, int]]:
    """The launch that merges: programs, arguments and constants of ``merge_rows_kernel``, but for
    ``PDL``. ``merged`` gives the tensors among the arguments.
    """
    planes, heavy_rows, count, block_q, width = pieces.values.shape
    _, q_len, heads, value_dim = out.shape
    rows = -(-q_len // block_q)
    step = min(_STEP, block_q)
    values, stats, plane_map, row_order, out, lse = merged(pieces, arrays, out, lse)
    arguments: list[Tensor | int] = [
        values, stats, plane_map, *broadcast_strides(plane_map), row_order, out, lse,
        heads, q_len, rows, heavy_rows, count,
    ]  # fmt: skip
    constants = {
        "VALUE_DIM": value_dim,
        "WIDTH": width,
        "BLOCK_E": next_power_of_two(value_dim),
        "BLOCK_M": block_q,
        "STEP": step,
        "RETURN_LSE": lse is not stats,
        "SINGLE_PLANE": row_order.numel() == rows,
    }
    return planes * heavy_rows * (block_q // step), arguments, constants


def merged(pieces: Pieces, arrays: TileMask, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the launch that merges, in the kernel's order."""
    held = lse if lse.numel() else pieces.stats  # where none is asked for, none is written
    return pieces.values, pieces.stats, arrays.plane_map, arrays.row_order, out, held
