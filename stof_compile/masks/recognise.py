"""From a dense mask back to the simplest rule that produces exactly it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stof_compile.masks.constructors import (
    causal,
    dense,
    document,
    from_tensor,
    longformer,
    per_head,
    prefix_lm,
)
from stof_compile.masks.rules import Band, BlockDiagonal
from stof_compile.masks.spec import MaskSpec

_STRIP = 2**22
"""Elements compared at once."""


def recognise(mask: Tensor) -> MaskSpec:
    """Find the simplest rule equal to a dense mask.

    Candidates are read off a few rows and columns, then compared with every element, so the answer
    is exact for this mask. Rules hold at other lengths as well, a dense mask does not.

    Args:
        mask: bool [Q, K], [B, Q, K] or [B, H, Q, K].
    Returns:
        dense, causal, windows, longformer, prefix, segments or documents; per head if the heads
        differ; else the mask itself.
    """
    fallback = from_tensor(mask)
    planes = (
        mask.detach().reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        if mask.dim() != 3
        else mask[:, None]
    )
    if planes.numel() == 0:
        return fallback
    if bool((planes != planes[:1]).any()):
        return fallback
    found: list[MaskSpec] = []
    for plane in planes[0]:
        same = next((spec for spec in found if _equals(spec, plane)), None)
        spec = same or next((one for one in _candidates(plane) if _equals(one, plane)), None)
        if spec is None:
            return fallback
        found.append(spec)
    return found[0] if all(spec == found[0] for spec in found) else per_head(found)


def _candidates(plane: Tensor) -> Iterator[MaskSpec]:
    """Rules worth comparing with bool [Q, K], simplest first."""
    q_len, k_len = plane.shape
    yield dense()
    yield ~dense()
    yield causal()
    if k_len > q_len:
        yield causal(lower_right=True)
    yield from _bands(plane)
    yield prefix_lm(_leading(plane[0]))
    yield from _with_globals(plane)
    size = _leading(plane[:, 0])
    if size:
        yield BlockDiagonal(size)
        yield causal() & BlockDiagonal(size)
    if q_len == k_len:
        yield from _documents(plane)


def _bands(plane: Tensor) -> Iterator[MaskSpec]:
    """The band read off a few rows; a side that is never seen to end inside the mask is open."""
    q_len, k_len = plane.shape
    lows, highs = [], []
    for row in {q_len // 2, min(q_len, k_len) // 2, q_len - 1, 0}:
        kept = torch.nonzero(plane[row]).squeeze(1)
        if kept.numel():
            first, last = int(kept[0]), int(kept[-1])
            lows += [first - row] if first > 0 else []
            highs += [last - row] if last < k_len - 1 else []
    if lows or highs:
        yield Band(min(lows, default=None), max(highs, default=None))


def _with_globals(plane: Tensor) -> Iterator[MaskSpec]:
    """Longformer, plain and causal: the last row shows the global tokens at its left, the window at
    its right.
    """
    count = _leading(plane[-1])
    window = _leading(plane[-1].flip(0)) - 1 - max(plane.shape[1] - plane.shape[0], 0)
    if 0 < count < plane.shape[1] and window >= 0:
        yield longformer(window, count)
        yield longformer(window, count) & causal()


def _documents(plane: Tensor) -> Iterator[MaskSpec]:
    """Neighbours that don't see each other are in different documents."""
    if not bool(plane.diagonal().all()):
        return
    borders = ~plane.diagonal(-1)
    ids = torch.cat([borders.new_zeros(1, dtype=torch.int64), borders.to(torch.int64).cumsum(0)])
    yield document(ids)
    yield document(ids) & causal()


def _leading(line: Tensor) -> int:
    """Number of True values before the first False of bool [N]."""
    return int(line.int().cumprod(0).sum())


def _equals(spec: MaskSpec, plane: Tensor) -> bool:
    """Compare a rule with bool [Q, K], a strip of rows at a time."""
    q_len, k_len = plane.shape
    bound = spec.bind(q_len, k_len, 0, plane.device)
    zero = torch.zeros((), dtype=torch.int64, device=plane.device)
    k = torch.arange(k_len, device=plane.device)[None, :]
    # most wrong candidates already fail in the last rows, so the comparison goes upwards
    step = max(1, _STRIP // k_len)
    for stop in range(q_len, 0, -step):
        start = max(0, stop - step)
        q = torch.arange(start, stop, device=plane.device)[:, None]
        if not torch.equal(
            bound.keep(zero, zero, q, k).expand(stop - start, k_len), plane[start:stop]
        ):
            return False
    return True
