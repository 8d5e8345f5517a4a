"""Masks from and to other forms: FlexAttention block masks, dense tensors recognised as rules."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import noop_mask

from stof_compile.errors import StofMaskError
from stof_compile.masks.block_mask import BlockMask
from stof_compile.masks.constructors import from_tensor, rule
from stof_compile.masks.spec import MaskSpec
from stof_compile.masks.tensor_rules import BlockTable


def as_mask_spec(value: object) -> MaskSpec:
    """Turn what a user may give as a mask into a rule.

    Args:
        value: a rule, a block mask (ours or FlexAttention's), a bool tensor or a mask_mod.
    Raises:
        StofMaskError: something else.
    """
    if isinstance(value, MaskSpec):
        return value
    if isinstance(value, FlexBlockMask):
        return from_block_mask(value)
    if isinstance(value, BlockMask):
        return from_tensor(value.to_dense())
    if isinstance(value, Tensor):
        return from_tensor(value)
    if callable(value):
        return rule(value)
    raise StofMaskError(
        "a mask is a rule (masks.causal() ...), a block mask, a bool tensor [.., Q, "
        "K] or a mask_mod; "
        f"got {type(value).__name__}"
    )


def from_block_mask(block_mask: FlexBlockMask) -> MaskSpec:
    """Wrap a FlexAttention BlockMask: its full blocks, and its mask_mod inside its partial blocks.

    The result holds at the block mask's own lengths only.
    """
    q_len, k_len = (int(length) for length in block_mask.seq_lengths)
    block_q, block_k = (int(edge) for edge in block_mask.BLOCK_SIZE)

    def table(counts: Tensor, columns: Tensor) -> MaskSpec:
        listed = _table(counts, columns, -(-k_len // block_k))
        return BlockTable(listed, block_q, block_k, q_len, k_len)

    partial: MaskSpec = table(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.mask_mod is not None and block_mask.mask_mod is not noop_mask:
        partial = partial & rule(block_mask.mask_mod)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return partial
    return table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices) | partial


def _table(counts: Tensor, columns: Tensor, cols: int) -> Tensor:
    """Bool [B, H, R, C] from counts [B, H, R] and lists [B, H, R, <=C], valid up to the count."""
    listed = torch.arange(columns.shape[-1], device=columns.device) < counts[..., None]
    # entries past the count may be anything; they go to an extra column
    places = torch.where(listed, columns.long(), cols)
    found = torch.zeros((*counts.shape, cols + 1), dtype=torch.bool, device=columns.device)
    return found.scatter_(-1, places, True)[..., :cols]


def to_flex(block_mask: BlockMask, spec: MaskSpec) -> FlexBlockMask:
    """Turn a block mask into FlexAttention's form.

    Args:
        block_mask: the tiles; their edges become the block size.
        spec: the rule it was built from; its element test becomes the mask_mod.
    Returns:
        FlexAttention BlockMask [Bm, Hm] on the block mask's device.
    """
    q_len, k_len, offset = block_mask.q_len, block_mask.k_len, block_mask.q_offset
    bound = spec.bind(q_len, k_len, offset, block_mask.device).to(block_mask.device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bound.keep(b, h, q + offset, k)

    starts, ends = block_mask.row_ptr[:-1].long(), block_mask.row_ptr[1:].long()
    middle = block_mask.full_start.long()
    partial = _listed(block_mask, starts, middle)
    full = _listed(block_mask, middle, ends)
    return FlexBlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=(block_mask.block_q, block_mask.block_k),
        mask_mod=mask_mod,
        seq_lengths=(q_len, k_len),
    )


def _listed(block_mask: BlockMask, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Counts int32 [Bm, Hm, R] and column lists int32 [Bm, Hm, R, C], listed columns first."""
    rows, cols = block_mask.rows, block_mask.cols
    place = start[:, None] + torch.arange(cols, device=start.device)
    inside = place < stop[:, None]
    last = max(block_mask.col_idx.numel() - 1, 0)
    columns = torch.zeros_like(place, dtype=torch.int32)
    if block_mask.col_idx.numel():
        columns = torch.where(inside, block_mask.col_idx[place.clamp(max=last)], 0)
    plane = block_mask.plane_map.long()
    counts = (stop - start).to(torch.int32).reshape(-1, rows)
    return counts[plane], columns.reshape(-1, rows, cols)[plane]
