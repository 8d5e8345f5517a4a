"""When a long row of tiles is worth several programs."""

from __future__ import annotations

import math

import torch

from stof_compile.masks.block_mask import BlockMask

LEAST_KEYS = 4096  # of a row: a launch more, which merges the pieces, has to pay
PIECE_KEYS = 512  # of a piece, at least
MOST_PIECES = 64
# Over 262,144 keys averages came out 0.15 % too small on an H200, three units in the last place of
# fp16; most likely tensor cores cut off what does not fit when they add to a sum.
MOST_KEYS_ADDED = 131072
_PROCESSORS = 132  # where the mask is on no GPU


def row_pieces(mask: BlockMask, planes: int, programs: int, *, queued: bool) -> int:
    """Programs that share each of a mask's heavy rows; 1 where a row is one program's work.

    With few heads a row that sees every key (global tokens) takes longer than the GPU's other
    programs together take for all other rows. Only ``BlockMask.heavy_rows`` are cut. The rule is
    fitted to times on an H200 (docs/kernels.md).

    Args:
        mask: in tiles of the kernel. planes: batch times heads.
        programs: of the kernel on a multiprocessor at a time.
        queued: whether programs take heavy rows first, of all heads; else heads follow each other,
            and the heavy rows of the last ones begin late.
    Returns:
        1 to 64; where heads follow each other a power of two.
    """
    longest = mask.max_row_tiles
    keys = longest * mask.block_k
    if keys < LEAST_KEYS or planes == 0:
        return 1
    heavy = mask.heavy_rows
    if heavy == 0:
        return 1
    processors = _PROCESSORS
    if mask.device.type == "cuda":
        processors = torch.cuda.get_device_properties(mask.device).multi_processor_count
    share = mask.col_idx.numel() / mask.planes * planes / (processors * programs)
    shares = longest / share  # of a program's even part of all tiles
    if queued:
        wanted = 1.2 * shares if shares > 1.25 else 1.0
    else:
        wanted = max(4.0, 4 * shares) if shares > 0.25 else 1.0
    wanted = max(min(wanted, keys // PIECE_KEYS, MOST_PIECES), keys / MOST_KEYS_ADDED)
    most = max(1, 2 * mask.rows // heavy)  # they are held in fp32
    if queued:
        return min(math.ceil(wanted), MOST_PIECES, most)
    pieces = 1
    while pieces < min(wanted, MOST_PIECES):
        pieces *= 2
    while pieces > most:
        pieces //= 2
    return pieces
