"""Attention over gathered tiles on the CPU: a line of queries with its keys as one batch entry.

Lines with about as many tiles share a call (a bucket), padded with masked tiles, so that one heavy
line does not lengthen the others. A line that keeps nearly everything reads K and V in place, and
so do lines whose tiles are runs at equal distances (a window): a view with overlapping strides
shows them without a copy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from stof_compile.kernels.attention_cpu_dense import capped_attention, fused_attention
from stof_compile.kernels.attention_cpu_strips import Strip, plane_plan
from torch import Tensor


class Unit(NamedTuple):
    """Heads of a batch entry with one plane: some kv heads and their groups, or part of a group."""

    batch: int
    kv_first: int
    kv_count: int
    group_first: int
    group_count: int


def gather_forward(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    block: tuple[int, int],
) -> None:
    """Fill ``out`` and ``lse`` strip by strip; memory O(strip) beside one padded copy at ragged
    lengths.

    Args:
        out: [batch, heads, q_len, value_dim], any contents. lse: -inf, fp32 [batch, heads, q_len],
            or [0].
        q, k, v, mask, key_keep, scale, softcap, block: as in
            ``attention_cpu.attention_cpu_forward``.
        bias: with four dimensions, or None.
    """
    plane_map, *arrays, _ = mask
    block_q, block_k = block
    q_len, k_len = q.shape[2], k.shape[2]
    rows, cols = -(-q_len // block_q), -(-k_len // block_k)
    units = _units(plane_map, q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
    tile_bytes = block_k * k.shape[1] * max(k.shape[3], v.shape[3]) * k.element_size()
    plans = {p: plane_plan(tuple(arrays), p, rows, cols, block, q.dtype, tile_bytes) for p in units}
    queries, keys, values = (
        _whole_tiles(q, block_q),
        _whole_tiles(k, block_k),
        _whole_tiles(v, block_k),
    )
    ragged = queries is not q
    target = torch.empty_like(_whole_tiles(out, block_q)) if ragged else out
    if not all(plan.complete for plan in plans.values()):
        target.zero_()
    sums = F.pad(lse, (0, rows * block_q - q_len)) if ragged and lse.numel() else lse
    kept_keys = None
    if key_keep is not None:
        padded = F.pad(key_keep, (0, cols * block_k - k_len))
        kept_keys = padded.reshape(-1, cols, block_k)
    workspace = (k.new_empty(0), v.new_empty(0))
    for plane, heads_of_plane in units.items():
        for strip in plans[plane].strips:
            static = strip.mask(block_k, q.dtype)
            for unit in heads_of_plane:
                heads = slice(unit.kv_first, unit.kv_first + unit.kv_count)
                tile_q = _query_tiles(queries, strip, unit, k.shape[1])
                workspace = _grown(workspace, keys, values, strip, unit, block_k)
                tile_k = _key_tiles(keys[unit.batch, heads], strip, block_k, workspace[0])
                tile_v = _key_tiles(values[unit.batch, heads], strip, block_k, workspace[1])
                extra = _additive(static, strip, unit, q, k, bias, kept_keys, block_k)
                if softcap > 0:
                    part = capped_attention(tile_q, tile_k, tile_v, extra, scale, softcap)
                else:
                    part = fused_attention(tile_q, tile_k, tile_v, extra, scale, bool(lse.numel()))
                _store(target, part[0], strip, unit, k.shape[1])
                if lse.numel():
                    _store(sums.unsqueeze(-1), part[1].unsqueeze(-1), strip, unit, k.shape[1])
    if ragged:
        out.copy_(target[:, :, :q_len])
        if lse.numel():
            lse.copy_(sums[:, :, :q_len])


def _units(plane_map: Tensor, batch: int, kv_heads: int, group: int) -> dict[int, list[Unit]]:
    """Heads of every plane, joined as far as one call can take them."""
    planes = plane_map.tolist()
    found: dict[int, list[Unit]] = {}
    for b in range(batch):
        line = planes[min(b, len(planes) - 1)]
        if len(set(line)) == 1:
            found.setdefault(line[0], []).append(Unit(b, 0, kv_heads, 0, group))
            continue
        for kv in range(kv_heads):
            own = line[kv * group : (kv + 1) * group]
            start = 0
            for end in range(1, group + 1):
                if end == group or own[end] != own[start]:
                    found.setdefault(own[start], []).append(Unit(b, kv, 1, start, end - start))
                    start = end
    return found


def _whole_tiles(t: Tensor, block: int) -> Tensor:
    """Pad the length (dimension 2) to whole tiles; unchanged when it fits."""
    missing = -t.shape[2] % block
    if missing == 0:
        return t
    batch, heads, length, dim = t.shape
    # not by F.pad: of one token it makes channels-last memory, where the library reads a dense row
    padded = t.new_zeros(batch, length + missing, heads, dim).transpose(1, 2)
    padded[:, :, :length] = t
    return padded


def _query_tiles(q: Tensor, strip: Strip, unit: Unit, kv_heads: int) -> Tensor:
    """Queries of a strip, [r, kv heads, group * height, D]: a group shares its tile's K and V."""
    tiles = _unit_tiles(q, unit, kv_heads, strip.height)
    if strip.first >= 0:
        tiles = tiles[:, :, strip.first : strip.first + strip.rows.shape[0]]
    else:
        tiles = tiles.index_select(2, strip.rows)
    return tiles.permute(2, 0, 1, 3, 4).flatten(2, 3)


def _store(target: Tensor, part: Tensor, strip: Strip, unit: Unit, kv_heads: int) -> None:
    """Write [r, kv heads, group * height, E] into the strip's rows of ``target`` [B, H, Q, E]."""
    tiles = _unit_tiles(target, unit, kv_heads, strip.height)
    split = (*part.shape[:2], unit.group_count, strip.height, part.shape[3])
    source = part.reshape(split).permute(1, 2, 0, 3, 4)
    if strip.first >= 0:
        tiles[:, :, strip.first : strip.first + strip.rows.shape[0]].copy_(source)
    else:
        tiles.index_copy_(2, strip.rows, source.to(target.dtype))


def _unit_tiles(t: Tensor, unit: Unit, kv_heads: int, height: int) -> Tensor:
    """View a unit's heads of [B, H, Q, E] as [kv heads, group, lines, height, E]."""
    one = t[unit.batch]
    # views of any strides, as the result is written through them
    tiles = one.view(kv_heads, -1, one.shape[1] // height, height, one.shape[2])
    heads = slice(unit.kv_first, unit.kv_first + unit.kv_count)
    return tiles[heads, unit.group_first : unit.group_first + unit.group_count]


def _grown(
    workspace: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    strip: Strip,
    unit: Unit,
    block_k: int,
) -> tuple[Tensor, Tensor]:
    """Make the workspace large enough; kept between strips, as fresh memory costs page faults."""
    in_place = strip.whole or strip.run is not None
    count = 0 if in_place else strip.cols.numel() * block_k * unit.kv_count
    sizes = (count * keys.shape[3], count * values.shape[3])
    first, second = (
        t if t.numel() >= size else t.new_empty(size)
        for t, size in zip(workspace, sizes, strict=True)
    )
    return first, second


def _key_tiles(t: Tensor, strip: Strip, block_k: int, workspace: Tensor) -> Tensor:
    """Keys or values [h, S, D] of a strip side by side, [r, h, n * block_k, D]."""
    heads, length, dim = t.shape
    r, n = strip.cols.shape
    if strip.whole:
        return t.expand(r, heads, length, dim)
    if strip.run is not None:
        at, token = strip.run[0] * block_k, t.stride(1)
        strides = (strip.run[1] * block_k * token, t.stride(0), token, t.stride(2))
        offset = t.storage_offset() + at * token
        return t.as_strided((r, heads, n * block_k, dim), strides, offset)
    index = strip.gathered
    space = workspace[: r * n * block_k * heads * dim]
    if t.stride(0) == dim and t.stride(2) == 1 and t.stride(1) == heads * dim:
        # token-major: a tile is one piece of memory
        flat = t.transpose(0, 1).reshape(length // block_k, block_k * heads * dim)
        torch.index_select(flat, 0, index, out=space.view(r * n, -1))
        return space.view(r, n * block_k, heads, dim).transpose(1, 2)
    tiles = t.reshape(heads, length // block_k, block_k * dim)
    torch.index_select(tiles, 1, index, out=space.view(heads, r * n, -1))
    return space.view(heads, r, n * block_k, dim).transpose(0, 1)


def _additive(
    extra: Tensor | None,
    strip: Strip,
    unit: Unit,
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    kept_keys: Tensor | None,
    block_k: int,
) -> Tensor | None:
    """Join ``extra`` and all else that is added to a strip's scores.

    Returns:
        [r or 1, kv heads or 1, group * height, n * block_k], or None.
    """
    r, n = strip.cols.shape
    if kept_keys is not None:
        padding = kept_keys[min(unit.batch, kept_keys.shape[0] - 1)]
        unseen = ~padding.index_select(0, strip.gathered).view(r, 1, 1, n * block_k)
        if extra is None:
            extra = torch.zeros(1, 1, strip.height, n * block_k, dtype=q.dtype)
        extra = extra.masked_fill(unseen, -torch.inf)
    if bias is not None:
        values = _bias_tiles(strip, unit, q, k, bias, block_k)
        if extra is not None:
            values = values + extra.unsqueeze(2)
        return values.expand(-1, -1, unit.group_count, -1, -1).flatten(2, 3)
    if extra is None or unit.group_count == 1:
        return extra
    return extra.repeat(1, 1, unit.group_count, 1)


def _bias_tiles(
    strip: Strip, unit: Unit, q: Tensor, k: Tensor, bias: Tensor, block_k: int
) -> Tensor:
    """Bias of a strip, fp32 or fp64 [r, kv heads or 1, group or 1, height, n * block_k]."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    plane = bias[min(unit.batch, bias.shape[0] - 1)]
    if plane.shape[0] > 1:
        group = slice(unit.group_first, unit.group_first + unit.group_count)
        heads = slice(unit.kv_first, unit.kv_first + unit.kv_count)
        plane = plane.view(k.shape[1], -1, *plane.shape[1:])[heads, group]
    else:
        plane = plane.unsqueeze(0)
    q_pos = strip.rows[:, None] * strip.height + torch.arange(strip.height)
    k_pos = (strip.cols[:, :, None] * block_k + torch.arange(block_k)).flatten(1)
    q_pos = q_pos.clamp(max=plane.shape[2] - 1)
    k_pos = k_pos.clamp(max=plane.shape[3] - 1)
    picked = plane[:, :, q_pos[:, :, None], k_pos[:, None, :]]
    return picked.to(dtype).permute(2, 0, 1, 3, 4)
