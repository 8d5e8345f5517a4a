"""Attention problem: the sizes, layout and mask that decide which kernel is fastest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from stof_compile.masks.block_mask import BlockMask
from stof_compile.masks.mask_cache import cached_block_mask
from stof_compile.masks.spec import MaskSpec
from stof_compile.node_ops import hint

STATISTICS_BLOCK = {
    "cuda": 64,
    "cpu": 32,
}  # tile edge the mask statistics of a problem are taken on
PACKED_SHARES = {16: 0.35, 32: 0.4, 64: 0.55}
"""Scores in packed tiles of a gathering kernel for GPUs as a share of those in touched tiles of
64 x 64, by their rows (taller ones as 64): up to there it is worth timing. On an H200 a score of
tiles of 16 and 32 rows took 3.1 and 2.6 times what one of the block-wise kernel's 64 x 32 took
(BigBird, 8 x 512). Tiles of 64 rows with 0.27 and 0.15 of the scores took 0.9 and 0.5 of that
kernel's tile floor (a fixed mask, 2,048 and 4,096): some 2 times as much for a score, if it reaches
60 % of the floor. A tenth more than breaks even is timed."""
MOST_TILES = 2**25  # of a mask that is gathered: the kernel numbers packed columns in 31 bits


@dataclass(frozen=True)
class TensorMeta:
    """Shape, strides (elements), dtype of a tensor; no data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMeta:
        """Read the meta of a real or fake tensor; symbolic sizes are taken at their hint."""
        shape, stride = (tuple(hint(n) for n in sizes) for sizes in (tensor.shape, tensor.stride()))
        return TensorMeta(shape, stride, tensor.dtype)

    def random(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        """Return normal values (bool: True) in this layout; broadcast dims (stride 0) share
        storage."""
        if self.dtype == torch.bool:
            return torch.ones(self.shape, dtype=torch.bool, device=device)
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True) if n > 0)
        storage = torch.randn(extent, dtype=torch.float32, device=device, generator=generator)
        return torch.as_strided(storage.to(self.dtype), self.shape, self.stride)


@dataclass(frozen=True)
class AttentionProblem:
    """One attention to be run, without its data.

    Args:
        q, k, v: meta of ``[B, Hq, Q, D]``, ``[B, Hk, K, D]``, ``[B, Hk, K, Dv]``.
        spec: static mask, None when every key is kept.
        q_offset: position of the first query row for the mask.
        device: where it runs.
        scale: factor on the scores. softcap: 0 for none.
        padding: a ``key_keep [B, K]`` is given at run time.
        bias: meta of the additive bias, None for none.
        training: gradients are wanted, so forward and backward are timed together.
        bias_grad: that of the bias too.
        allow_tf32: fp32 products may use TF32.
        fp8: q, k and v are rounded to e4m3 first; their dtype here is the one they have before.
    """

    q: TensorMeta
    k: TensorMeta
    v: TensorMeta
    spec: MaskSpec | None
    q_offset: int
    device: torch.device
    scale: float
    softcap: float = 0.0
    padding: bool = False
    bias: TensorMeta | None = None
    training: bool = False
    bias_grad: bool = False
    allow_tf32: bool = False
    fp8: bool = False

    @property
    def batch(self) -> int:
        """Batch size."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def q_len(self) -> int:
        """Query length in tokens."""
        return self.q.shape[2]

    @property
    def k_len(self) -> int:
        """Key length in tokens."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Channels of a query head."""
        return self.q.shape[3]

    @property
    def plain(self) -> bool:
        """True when nothing but the mask and a positive scale acts on the scores."""
        return not self.padding and self.bias is None and self.softcap == 0 and self.scale > 0

    @property
    def causal_only(self) -> bool:
        """True when the mask is exactly SDPA's ``is_causal`` (upper left) and nothing else
        restricts the keys."""
        from stof_compile import masks

        return self.spec is not None and self.q_offset == 0 and self.spec.key == masks.causal().key

    def block_mask(self, block: tuple[int, int]) -> BlockMask:
        """Return the static mask on a tile grid (a dense one when there is no mask), shared by
        equal sites."""
        from stof_compile import masks

        return cached_block_mask(
            self.spec if self.spec is not None else masks.dense(),
            self.q_len,
            self.k_len,
            block,
            q_offset=self.q_offset,
            batch=self.batch,
            heads=self.heads,
            device=self.device,
        )

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """Statistics of the mask on the device's standard tile; what selection keys on."""
        edge = STATISTICS_BLOCK.get(self.device.type, 64)
        return self.block_mask((edge, edge)).statistics()

    @property
    def tile_map(self) -> dict[str, Any]:
        """Picture of the mask on the same tile, see :mod:`stof_compile.masks.tile_map`."""
        edge = STATISTICS_BLOCK.get(self.device.type, 64)
        return self.block_mask((edge, edge)).tile_map

    @cached_property
    def touched_scores(self) -> int:
        """Scores of one head in touched tiles of 64 x 64, or of as many rows as there are: about
        what a block-wise kernel for GPUs computes."""
        mask = self.block_mask((64, 64))
        tiles = mask.col_idx.numel() // max(1, mask.planes)
        return tiles * 64 * min(64, max(16, 1 << (self.q_len - 1).bit_length()))

    def may_pack(self, rows: int) -> bool:
        """Whether a gathering kernel for GPUs with tiles of so many rows may have few enough
        scores (``PACKED_SHARES``); only tiles of 64 x 64 are looked at."""
        if self.training or self.fp8 or self.spec is None:
            return False
        mask = self.block_mask((64, 64))
        if mask.is_band or not mask.has_part:  # columns are side by side already
            return False
        if mask.col_idx.numel() * 64 // min(rows, 64) > MOST_TILES:
            return False
        return mask.density * self.q_len * self.k_len <= self.packed_limit(rows)

    def packed_limit(self, rows: int) -> float:
        """Scores of one head in packed tiles of so many rows up to which they are worth timing."""
        share = next((s for edge, s in PACKED_SHARES.items() if rows <= edge), PACKED_SHARES[64])
        return share * self.touched_scores

    @cached_property
    def key(self) -> str:
        """Stable hash of everything that may change which kernel wins, and of nothing else."""
        body = {
            "q": [self.q.shape, self.q.stride],
            "k": [self.k.shape, self.k.stride],
            "v": [self.v.shape, self.v.stride],
            "dtype": str(self.q.dtype),
            "device": self.device.type,
            "softcap": self.softcap > 0,
            "scale": self.scale > 0,
            "padding": self.padding,
            "bias": None
            if self.bias is None
            else [self.bias.shape, self.bias.stride, str(self.bias.dtype)],
            # not True, as before the backward kernels: what was measured then has to be again
            "training": ("bias" if self.bias_grad else "kernels") if self.training else False,
            "tf32": self._fp32_products if self._is_fp32_on_cuda else self.allow_tf32,
            "causal_only": self.causal_only,
            "unmasked": self.spec is None,
            "mask": self.statistics,
        }
        if self.fp8:
            body["fp8"] = True
        if self.device.type == "cuda" and self.may_pack(64):
            # masks with equal statistics may have very different ones; of this size it costs little
            body["packed"] = self.block_mask((64, 64)).packed_tiles
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def _is_fp32_on_cuda(self) -> bool:
        on_cuda = self.device.type == "cuda" and torch.version.hip is None
        return on_cuda and self.q.dtype == torch.float32

    @property
    def _fp32_products(self) -> str:
        """Of TF32 numbers; not a truth value, as before there were three: what was measured then
        has to be again."""
        return "one" if self.allow_tf32 else "three"

    def describe(self) -> str:
        """Return one line for people: shape, dtype, density."""
        density = 1.0 if self.spec is None else self.statistics["density"]
        group = f" (kv heads {self.k.shape[1]})" if self.k.shape[1] != self.heads else ""
        return (
            f"B={self.batch} H={self.heads}{group} Q={self.q_len} K={self.k_len} D={self.head_dim} "
            f"{str(self.q.dtype).removeprefix('torch.')}{' as fp8' if self.fp8 else ''} "
            f"density={density:.4f}"
        )
