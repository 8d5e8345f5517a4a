"""What every attention kernel computes, in plain tensor operations on any device.

    out[q] = sum over kept k of softmax_k(x[q, k]) * v[k],   x = cap(scale * <q, k>) + bias

Rows without keys give 0 and a log-sum-exp of -inf. Half types are computed in fp32, fp64 in fp64.
The backward pass works in strips of query rows, so that its memory is strip x k_len, never q_len x
k_len.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Score elements of one strip of the backward pass, all heads together (fp32: 128 MiB a temporary).
STRIP_ELEMENTS = 1 << 25

KeepRows = Callable[[int, int], Tensor | None]


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    key_keep: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute masked attention as one dense softmax.

    Args:
        q: [batch, heads, q_len, head_dim].
        k: [batch, kv_heads, k_len, head_dim]; heads is a multiple of kv_heads.
        v: [batch, kv_heads, k_len, value_dim].
        keep: bool, broadcastable to [batch, heads, q_len, k_len], True where a key is seen.
        key_keep: bool [batch, k_len], True where a key may be seen at all.
        bias: added to the scores, broadcastable like ``keep``; -inf masks exactly.
        scale: factor of the dot products, head_dim ** -0.5 if None.
        softcap: c > 0 replaces a scaled score x by c * tanh(x / c).
        return_lse: also return the log-sum-exp of the masked scores.

    Returns:
        out [batch, heads, q_len, value_dim] in q's dtype, with lse [batch, heads, q_len] in the
        computing dtype if asked.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = _computing_dtype(q)
    with without_autocast(q):
        x, _ = _scores(q.to(dtype), k.to(dtype), keep, key_keep, bias, factor, softcap)
        p, lse = _safe_softmax(x)
        out = _per_group(p, v) @ v.to(dtype).unsqueeze(2)
    out = out.flatten(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


def rounded_to_e4m3(x: Tensor) -> Tensor:
    """What ``fp8=True`` makes of q, k or v: each head as multiples of its scale, in fp64.

    The scale of a head is 1 / 448 of its largest finite value and 2 ** -60 at least; a multiple has
    three bits behind the leading one and is no finer than 2 ** -9. Infinities become NaN.

    Args:
        x: [batch, heads, length, dim].
    """
    wide = x.float()
    finite = wide.isfinite()
    sizes = torch.where(finite, wide.abs(), 0.0).flatten(2)
    largest = sizes.amax(2) if sizes.shape[2] else sizes.sum(2)
    scale = (largest / 448.0).clamp(min=2.0**-60)[:, :, None, None]
    multiple = (wide / scale).double()  # of fp32: halves between two numbers are exact there
    # between 2 ** n and 2 ** (n + 1) numbers are 2 ** (n - 3) apart
    step = torch.exp2(multiple.abs().clamp(min=2.0**-6).log2().floor() - 3)
    rounded = (multiple / step).round() * step
    return torch.where(finite, rounded * scale.double(), float("nan"))


def attention_backward_reference(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep_rows: KeepRows,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    *,
    strip: int,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of attention_reference, recomputing the scores strip by strip.

    Args:
        grad_out: [batch, heads, q_len, value_dim].
        grad_lse: [batch, heads, q_len], or None.
        q, k, v, key_keep, bias, scale, softcap: as in the forward pass.
        keep_rows: ``keep_rows(first, last)`` gives the mask of query rows first..last-1, bool
            broadcastable to [batch, heads, last - first, k_len], or None for all kept.
        strip: query rows taken at once.
        bias_grad: whether the gradient of the bias is wanted.

    Returns:
        (dq, dk, dv, dbias) in the dtypes of their tensors; dbias is empty unless wanted.
    """
    dtype = _computing_dtype(q)
    keys, values = k.to(dtype), v.to(dtype)
    # contiguous whatever the strides of k and v: what the operators' fakes promise
    dk, dv = (torch.zeros(t.shape, dtype=dtype, device=q.device) for t in (keys, values))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    full_bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    dbias = None
    if bias_grad and full_bias is not None:
        dbias = torch.zeros(full_bias.shape, dtype=dtype, device=q.device)
    with without_autocast(q):
        for first in range(0, q.shape[2], strip):
            last = min(first + strip, q.shape[2])
            rows = slice(first, last)
            row_bias = _rows_of(full_bias, rows)
            queries = q[:, :, rows].to(dtype)
            x, slope = _scores(
                queries, keys, keep_rows(first, last), key_keep, row_bias, scale, softcap
            )
            p, _ = _safe_softmax(x)
            grad = grad_out[:, :, rows].to(dtype)

            # -- values: out = p v ----
            dv += (_per_group(p, v).mT @ _per_group(grad, v)).sum(2)
            dp = (_per_group(grad, v) @ values.unsqueeze(2).mT).flatten(1, 2)

            # -- softmax and lse: d lse / d x = p ----
            correction = (p * dp).sum(-1, keepdim=True)
            if grad_lse is not None:
                correction = correction - grad_lse[:, :, rows].to(dtype).unsqueeze(-1)
            dx = p * (dp - correction)
            if dbias is not None:
                _add_broadcast(dbias, dx, rows)

            # -- scores: x = cap(scale q k) + bias ----
            ds = (dx if slope is None else dx * slope) * scale
            dq[:, :, rows] = (_per_group(ds, k) @ keys.unsqueeze(2)).flatten(1, 2).to(q.dtype)
            dk += (_per_group(ds, k).mT @ _per_group(queries, k)).sum(2)
    if bias is None or dbias is None:
        result_bias = q.new_empty(0)
    else:
        result_bias = dbias.reshape(bias.shape).to(bias.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), result_bias


def strip_rows(q: Tensor, k_len: int, multiple: int) -> int:
    """Query rows of a backward strip: STRIP_ELEMENTS scores, at least ``multiple`` rows."""
    per_row = max(1, q.shape[0] * q.shape[1] * k_len)
    return max(1, STRIP_ELEMENTS // per_row // multiple) * multiple


def tile_keep_rows(
    mask: Sequence[Tensor],
    block_q: int,
    block_k: int,
    q_len: int,
    k_len: int,
    q_offset: int,
    band: Sequence[int],
) -> KeepRows:
    """Expand a block mask row strip by row strip: the definition of the kernels' mask arrays.

    Args:
        mask: plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order; see TileMask.
        block_q, block_k: tile size.
        q_len, k_len: lengths; tiles are padded beyond them.
        q_offset: position of the first query among the keys.
        band: [] or (lo, hi, global_q, global_k, cap), the arithmetic form of the part tiles.

    Returns:
        A function (first, last) -> bool [1 or batch, 1 or heads, last - first, k_len]; ``first``
        must be a multiple of block_q.
    """
    plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, _ = mask
    starts = row_ptr.tolist()
    rows = -(-q_len // block_q)
    planes = full_start.shape[0] // max(1, rows)
    cols = -(-k_len // block_k)
    device = col_idx.device

    def plane_rows(plane: int, first: int, last: int) -> Tensor:
        top, bottom = first // block_q, -(-last // block_q)
        base = plane * rows
        begin, end = starts[base + top], starts[base + bottom]
        entry = torch.arange(begin, end, device=device, dtype=row_ptr.dtype)
        row = torch.searchsorted(row_ptr[base + top : base + bottom + 1], entry, right=True) - 1
        col = col_idx[begin:end].long()
        full = entry >= full_start[base + top : base + bottom][row]
        q_pos = (row + top)[:, None] * block_q + torch.arange(block_q, device=device) + q_offset
        k_pos = col[:, None] * block_k + torch.arange(block_k, device=device)
        if band:
            part = band_keep(q_pos[:, :, None], k_pos[:, None, :], band)
            part &= (k_pos < k_len)[:, None, :]
        elif bitmap.shape[0] == 0:  # full tiles only
            part = torch.zeros(len(entry), block_q, block_k, dtype=torch.bool, device=device)
        else:
            words = bitmap[bitmap_id[begin:end].long().clamp(max=bitmap.shape[0] - 1)]
            part = expand_bitmap(words, block_q, block_k)
        tiles = torch.zeros(bottom - top, cols, block_q, block_k, dtype=torch.bool, device=device)
        tiles[row, col] = part | full[:, None, None]
        dense = tiles.transpose(1, 2).reshape((bottom - top) * block_q, cols * block_k)
        return dense[: last - first, :k_len]

    def keep_rows(first: int, last: int) -> Tensor:
        dense = torch.stack([plane_rows(plane, first, last) for plane in range(planes)])
        return dense[plane_map.long()]

    return keep_rows


def expand_bitmap(words: Tensor, block_q: int, block_k: int) -> Tensor:
    """Bits of tiles, bool [tiles, block_q, block_k], from int64 words [tiles, words].

    Words are column-major in the tile, bits row-major in a word's 8x8, least significant first.
    """
    if words.shape[0] == 0:
        return torch.zeros(0, block_q, block_k, dtype=torch.bool, device=words.device)
    bits = words.unsqueeze(-1) >> torch.arange(64, device=words.device) & 1
    grid = bits.view(-1, block_k // 8, block_q // 8, 8, 8)
    return grid.permute(0, 2, 3, 1, 4).reshape(-1, block_q, block_k).bool()


def band_keep(q_pos: Tensor, k_pos: Tensor, band: Sequence[int]) -> Tensor:
    """Evaluate (lo, hi, global_q, global_k, cap) on positions that broadcast together."""
    lo, hi, global_q, global_k, cap = band
    d = k_pos - q_pos
    return ((d >= lo) & (d <= hi) | (q_pos < global_q) | (k_pos < global_k)) & (d <= cap)


def without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Keep products in the computing dtype, also where autocast is open: it would round them, in
    a backward pass, too, that is begun inside.
    """
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _computing_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _per_group(t: Tensor, kv: Tensor) -> Tensor:
    """View [batch, heads, ...] as [batch, kv_heads, group, ...]: k and v are never repeated."""
    kv_heads = kv.shape[1]
    return t.reshape(t.shape[0], kv_heads, t.shape[1] // kv_heads, *t.shape[2:])


def _scores(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    """Masked scores [batch, heads, rows, k_len] and, under a softcap, its derivative."""
    x = (_per_group(q, k) @ k.unsqueeze(2).mT).flatten(1, 2) * scale
    slope = None
    if softcap > 0:
        tanh = torch.tanh(x / softcap)
        x, slope = softcap * tanh, 1 - tanh * tanh
    if bias is not None:
        x = x + bias.to(x.dtype)
    if keep is not None:
        x = x.masked_fill(~keep, float("-inf"))
    if key_keep is not None:
        x = x.masked_fill(~key_keep[:, None, None, :], float("-inf"))
    return x, slope


def _safe_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and log-sum-exp over the last dimension; rows of -inf give 0 and -inf."""
    if x.shape[-1] == 0:
        return x, x.new_full(x.shape[:-1], float("-inf"))
    lse = torch.logsumexp(x, -1)
    empty = lse == float("-inf")
    # not exp(x - lse): at the lowest finite scores lse rounds to the maximum
    p = torch.softmax(x, -1).masked_fill(empty.unsqueeze(-1), 0.0)
    return p, lse


def _rows_of(bias: Tensor | None, rows: slice) -> Tensor | None:
    if bias is None or bias.shape[2] == 1:
        return bias
    return bias[:, :, rows]


def _add_broadcast(dbias: Tensor, dx: Tensor, rows: slice) -> None:
    """Add dx to the rows of dbias, summed over the dimensions that the bias broadcasts."""
    target = dbias if dbias.shape[2] == 1 else dbias[:, :, rows]
    target += dx.sum_to_size(target.shape)
