"""Which masks the CPU evaluates for another device, and what it is asked about them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from stof_compile.masks.random_tiles import RandomTiles
from stof_compile.masks.spec import MaskSpec

if TYPE_CHECKING:
    from stof_compile.masks.block_mask import BlockMask

Found = TypeVar("Found")

HOST = "_host"
"""Attribute of a mask that was made on the CPU for another device: the one there."""

MOST_ELEMENTS = 2**24
"""Elements of all planes, 4,096 squared."""


def bound_for_host(
    spec: MaskSpec, q_len: int, k_len: int, q_offset: int, tiles: int, block: tuple[int, int]
) -> MaskSpec | None:
    """The rule bound to its lengths where the CPU had better evaluate it, else None.

    A GPU takes 0.2 s for a process's first mask, as each kernel is loaded when first used, and
    milliseconds afterwards. The CPU takes 2 to 20 ms for the usual rules, which repeat the contents
    of a few tiles. It does not where random tiles are smaller than a tile, and never gets a rule
    with tensors or code of the user.

    Args:
        q_len, k_len, q_offset: as for `build_block_mask`.
        tiles: of all planes. block: tile edges in tokens.
    """
    if tiles * block[0] * block[1] > MOST_ELEMENTS or not spec.is_plain:
        return None
    bound = spec.bind(q_len, k_len, q_offset)
    drawn = (rule for rule in bound.walk() if isinstance(rule, RandomTiles))
    if not bound.is_plain or any(rule.block < max(block) for rule in drawn):
        return None
    return bound


def of_contents(find: Callable[[BlockMask], Found]) -> cached_property[Found]:
    """A property of what a mask keeps, asked of the CPU's mask where there is one."""

    def ask(mask: BlockMask) -> Found:
        host = vars(mask).get(HOST)
        found: Found = find(mask) if host is None else getattr(host, find.__name__)
        return found

    ask.__doc__ = find.__doc__
    return cached_property(ask)
