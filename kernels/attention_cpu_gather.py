"""Gather kernel of the CPU: kept keys of a few tile rows side by side, then dense attention.

A tile row becomes a batch entry of a fused dense attention whose keys are copies of its kept tiles.
Rows with about as many tiles share a call (a bucket), padded with masked tiles, so that one heavy
row does not lengthen the others; a row that keeps nearly everything reads K and V in place.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from stof_compile.kernels.attention_cpu_buckets import (
    Bucket,
    additive_mask,
    bitmap_octets,
    bucket_rows,
)
from torch import Tensor

# Elements of K gathered at once, all heads together: a strip's K, V and mask stay in the caches.
STRIP_ELEMENTS = 1 << 20


class Unit(NamedTuple):
    """Heads of a batch entry with one plane: some kv heads and their groups, or part of a group."""

    batch: int
    kv_first: int
    kv_count: int
    group_first: int
    group_count: int


class Strip(NamedTuple):
    """Tile rows handled by one call of the inner attention."""

    rows: Tensor  # int64 [r]
    cols: Tensor  # int64 [r, n]
    first: int  # first row if the rows are contiguous, else -1
    whole: bool
    extra: Tensor | None  # 0 or -inf, [r, 1, block_q, n * block_k], None when every tile is full


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
        out: zeros [batch, heads, q_len, value_dim]. lse: -inf, fp32 [batch, heads, q_len], or [0].
        q, k, v, mask, key_keep, scale, softcap, block: as in
            ``attention_cpu.attention_cpu_forward``.
        bias: with four dimensions, or None.
    """
    plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, _ = mask
    block_q, block_k = block
    q_len, k_len = q.shape[2], k.shape[2]
    rows, cols = -(-q_len // block_q), -(-k_len // block_k)
    arrays = [t.numpy().tobytes() for t in (row_ptr, full_start, col_idx, bitmap_id, bitmap)]
    queries, keys, values = (
        _whole_tiles(q, block_q),
        _whole_tiles(k, block_k),
        _whole_tiles(v, block_k),
    )
    ragged = queries is not q
    target = torch.zeros_like(_whole_tiles(out, block_q)) if ragged else out
    sums = F.pad(lse, (0, rows * block_q - q_len)) if ragged and lse.numel() else lse
    kept_keys = None
    if key_keep is not None:
        padded = F.pad(key_keep, (0, cols * block_k - k_len))
        kept_keys = padded.reshape(-1, cols, block_k)
    octets = bitmap_octets(bitmap, block)
    workspace = (k.new_empty(0), v.new_empty(0))
    for plane, units in _units(plane_map, q.shape[0], k.shape[1], q.shape[1] // k.shape[1]).items():
        for bucket in bucket_rows(*arrays, plane, rows, cols, block, q.dtype):
            width = k.shape[1] * max(k.shape[3], v.shape[3])
            for strip in _strips(bucket, octets, block, q.dtype, width):
                for unit in units:
                    heads = slice(unit.kv_first, unit.kv_first + unit.kv_count)
                    tile_q = _query_tiles(queries, strip, unit, k.shape[1], block_q)
                    workspace = _grown(workspace, keys, values, strip, unit, block_k)
                    tile_k = _key_tiles(keys[unit.batch, heads], strip, block_k, workspace[0])
                    tile_v = _key_tiles(values[unit.batch, heads], strip, block_k, workspace[1])
                    extra = _additive(strip, unit, q, k, bias, kept_keys, block)
                    if softcap > 0:
                        part = capped_attention(tile_q, tile_k, tile_v, extra, scale, softcap)
                    else:
                        part = fused_attention(
                            tile_q, tile_k, tile_v, extra, scale, bool(lse.numel())
                        )
                    _store(target, part[0], strip, unit, k.shape[1], block_q)
                    if lse.numel():
                        _store(
                            sums.unsqueeze(-1),
                            part[1].unsqueeze(-1),
                            strip,
                            unit,
                            k.shape[1],
                            block_q,
                        )
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


def _strips(
    bucket: Bucket,
    octets: Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    elements_per_key: int,
) -> Iterator[Strip]:
    """Cut a bucket into strips of bounded size and expand their masks."""
    keys = bucket.cols.shape[1] * block[1]
    step = max(1, STRIP_ELEMENTS // max(1, keys * elements_per_key))
    for start in range(0, bucket.rows.shape[0], step):
        here = slice(start, start + step)
        extra = None if bucket.extra is None else bucket.extra[here]
        if extra is None and bucket.masked:
            extra = additive_mask(bucket.ids[here], octets, block, dtype)
        first = -1 if bucket.first < 0 else bucket.first + start
        yield Strip(bucket.rows[here], bucket.cols[here], first, bucket.whole, extra)


def _whole_tiles(t: Tensor, block: int) -> Tensor:
    """Pad the length (dimension 2) to whole tiles; unchanged when it fits."""
    missing = -t.shape[2] % block
    if missing == 0:
        return t
    return F.pad(t.transpose(1, 2), (0, 0, 0, 0, 0, missing)).transpose(1, 2)


def _query_tiles(q: Tensor, strip: Strip, unit: Unit, kv_heads: int, block_q: int) -> Tensor:
    """Queries of a strip, [r, kv heads, group * block_q, D]: a group shares its tile's K and V."""
    tiles = _unit_tiles(q, unit, kv_heads, block_q)
    if strip.first >= 0:
        tiles = tiles[:, :, strip.first : strip.first + strip.rows.shape[0]]
    else:
        tiles = tiles.index_select(2, strip.rows)
    return tiles.permute(2, 0, 1, 3, 4).flatten(2, 3)


def _store(
    target: Tensor, part: Tensor, strip: Strip, unit: Unit, kv_heads: int, block_q: int
) -> None:
    """Write [r, kv heads, group * block_q, E] into the strip's rows of ``target`` [B, H, Q, E]."""
    tiles = _unit_tiles(target, unit, kv_heads, block_q)
    split = (*part.shape[:2], unit.group_count, block_q, part.shape[3])
    source = part.reshape(split).permute(1, 2, 0, 3, 4)
    if strip.first >= 0:
        tiles[:, :, strip.first : strip.first + strip.rows.shape[0]].copy_(source)
    else:
        tiles.index_copy_(2, strip.rows, source.to(target.dtype))


def _unit_tiles(t: Tensor, unit: Unit, kv_heads: int, block_q: int) -> Tensor:
    """View a unit's heads of [B, H, Q, E] as [kv heads, group, tile rows, block_q, E]."""
    one = t[unit.batch]
    # views of any strides, as the result is written through them
    tiles = one.view(kv_heads, -1, one.shape[1] // block_q, block_q, one.shape[2])
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
    count = 0 if strip.whole else strip.cols.numel() * block_k * unit.kv_count
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
    index = strip.cols.reshape(-1)
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
    strip: Strip,
    unit: Unit,
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    kept_keys: Tensor | None,
    block: tuple[int, int],
) -> Tensor | None:
    """All that joins a strip's scores, [r, kv or 1, group * block_q, n * block_k], or None."""
    extra = strip.extra
    r, n = strip.cols.shape
    if kept_keys is not None:
        padding = kept_keys[min(unit.batch, kept_keys.shape[0] - 1)]
        unseen = ~padding.index_select(0, strip.cols.reshape(-1)).view(r, 1, 1, n * block[1])
        if extra is None:
            extra = torch.zeros(r, 1, block[0], n * block[1], dtype=q.dtype)
        extra = extra.masked_fill(unseen, -torch.inf)
    if bias is not None:
        values = _bias_tiles(strip, unit, q, k, bias, block)
        if extra is not None:
            values = values + extra.unsqueeze(2)
        return values.expand(-1, -1, unit.group_count, -1, -1).flatten(2, 3)
    if extra is None or unit.group_count == 1:
        return extra
    return extra.repeat(1, 1, unit.group_count, 1)


def _bias_tiles(
    strip: Strip, unit: Unit, q: Tensor, k: Tensor, bias: Tensor, block: tuple[int, int]
) -> Tensor:
    """Bias of a strip, fp32 or fp64 [r, kv heads or 1, group or 1, block_q, n * block_k]."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    plane = bias[min(unit.batch, bias.shape[0] - 1)]
    if plane.shape[0] > 1:
        group = slice(unit.group_first, unit.group_first + unit.group_count)
        heads = slice(unit.kv_first, unit.kv_first + unit.kv_count)
        plane = plane.view(k.shape[1], -1, *plane.shape[1:])[heads, group]
    else:
        plane = plane.unsqueeze(0)
    q_pos = strip.rows[:, None] * block[0] + torch.arange(block[0])
    k_pos = (strip.cols[:, :, None] * block[1] + torch.arange(block[1])).flatten(1)
    q_pos = q_pos.clamp(max=plane.shape[2] - 1)
    k_pos = k_pos.clamp(max=plane.shape[3] - 1)
    picked = plane[:, :, q_pos[:, :, None], k_pos[:, None, :]]
    return picked.to(dtype).permute(2, 0, 1, 3, 4)


# -- dense attention over gathered tiles ----------------------------------------------------------


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Run the library's fused CPU attention.

    Args:
        q: [N, H, M, D]; k: [N, H, K, D]; v: [N, H, K, E].
        extra: added to the scores, [N or 1, H or 1, M, K], dtype of q or fp32, or None.

    Returns:
        out [N, H, M, E], 0 on rows of -inf; lse fp32 [N, H, M], -inf on such rows if it is wanted.
    """
    head_dim, value_dim = q.shape[3], v.shape[3]
    # the fused kernel wants equal head dims: zeros change neither the scores nor the wanted values
    if value_dim < head_dim:
        v = F.pad(v, (0, head_dim - value_dim))
    elif head_dim < value_dim:
        q, k = (F.pad(t, (0, value_dim - head_dim)) for t in (q, k))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=extra, scale=scale
    )
    if return_lse and extra is not None:
        # the library leaves a row of -inf undefined here
        lse = lse.masked_fill(extra.amax(-1) == -torch.inf, -torch.inf)
    return out[..., :value_dim], lse


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Same as ``fused_attention`` with softcap * tanh(score / softcap), in separate steps and fp32
    or fp64.

    Half types are widened: a score rounded to 8 bits before the softmax would cost the accuracy
    that the fused kernels have.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    x = (q.to(dtype) @ k.to(dtype).mT).mul_(scale / softcap).tanh_().mul_(softcap)
    if extra is not None:
        x = x.add_(extra)
    lse = torch.logsumexp(x, -1)
    p = torch.softmax(x, -1).masked_fill_((lse == -torch.inf).unsqueeze(-1), 0.0)
    return p @ v.to(dtype), lse.float()
