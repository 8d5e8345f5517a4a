"""What the numbers of a kernel's config say, for whoever has it as a list.

Fields by their places, as an operator is given them; ``BlockConfig`` and the other tuples in
kernels/ name them, and importing those imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from stof_compile.masks.block_mask import BlockMask
from stof_compile.masks.long_rows import row_pieces

# Positions of fields of a BlockConfig, and of tf32 in the config of each kernel.
NUM_WARPS, STAGES, HEADS_FAST, HOPPER, HEAVY_ROWS, REGISTERS, PIECES, SHIFTED = (
    2, 3, 5, 9, 10, 11, 12, 13,
)  # fmt: skip
_TF32 = {"block": 8, "row": 6, "gather": 5}
_WARPS = 12  # of the portable kernel on a multiprocessor at a time, about


def multiplies_in_tf32(kernel: str, config: Sequence[int]) -> bool:
    """Whether a config of "block", "row" or "gather" rounds fp32 products to TF32."""
    at = _TF32[kernel]
    return 1 in config[at : at + 1]  # older configs have fewer fields; 2: three products


def hopper_programs(config: Sequence[int]) -> int:
    """Programs per multiprocessor if a BlockConfig asks for the Hopper kernel, else 0."""
    return config[HOPPER] if len(config) > HEAVY_ROWS else 0


def has_shifted_tiles(config: Sequence[int]) -> bool:
    """Whether a BlockConfig asks for the Hopper kernel on ``BlockMask.shifted_tensors``."""
    return len(config) > SHIFTED and config[SHIFTED] > 0 and hopper_programs(config) > 0


def with_heavy_rows(config: Sequence[int], mask: BlockMask, planes: int) -> list[int]:
    """The config with this mask's number of heavy rows, the pieces each is cut into, and on Hopper
    whether the others are uneven; without shifted tiles where these save nothing.

    Args:
        config: fields of a BlockConfig. planes: batch times heads.
    """
    hopper = hopper_programs(config)
    programs = hopper or max(1, _WARPS // config[NUM_WARPS])
    # 64 queries of a tile row are cut only where they are all it has, and its keys for itself
    whole = hopper > 0 and max(mask.block_q, mask.block_k) > 64
    pieces = 1 if whole else row_pieces(mask, planes, programs, queued=hopper > 0)
    heavy_rows = mask.heavy_rows if hopper or pieces > 1 else 0
    registers = config[REGISTERS] if len(config) > REGISTERS else 0
    shifted = has_shifted_tiles(config) and mask.shifted_share < 1
    found = [*config[:HEAVY_ROWS], heavy_rows, registers, pieces, int(shifted)]
    if hopper:
        found[HEADS_FAST] = int(mask.uneven)
    return found


def row_pieces_of(config: Sequence[int]) -> int:
    """Pieces that a BlockConfig cuts each heavy row into."""
    return config[PIECES] if len(config) > PIECES else 1
