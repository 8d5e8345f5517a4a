"""The gradient of block-wise attention: how its two kernels are configured and launched.

With p = softmax(x), x = cap(scale * q k^T) + bias, out = p v and a gradient dO of out:

    delta[q] = sum_e dO[q, e] out[q, e] - d lse[q]          dv = p^T dO
    dx = p * (dO v^T - delta)                               ds = dx * cap'
    dq = scale * ds k                                       dk = scale * ds^T q
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .backward_key_kernel import attention_backward_key_kernel
from .backward_query_kernel import attention_backward_query_kernel
from .limits import exact_products, multiplies_by_groups
from .problem import (
    DTYPES,
    MAX_HEAD_DIM,
    TileMask,
    band_arguments,
    band_flags,
    broadcast_strides,
    check_problem,
    next_power_of_two,
    on_device,
    outer_strides,
    score_constants,
)
from .settled_keys import settle_key

KERNELS = (attention_backward_query_kernel, attention_backward_key_kernel)
FEW_TILES = 6  # of a row: the next piece is best a small one, which takes less before the first


class Piece(NamedTuple):
    """What a program of the backward kernels takes of a mask tile, and how it is launched."""

    block_q: int  # query rows of a piece, at most those of a tile
    block_k: int  # keys of a piece, at most those of a tile
    num_warps: int
    num_stages: int  # depth of the load pipeline
    registers: int = 0  # of a thread at most, 0: as many as the compiler wants

    @property
    def stats_per_row(self) -> int:
        """Numbers that the key kernel loads of a row at once, see ``backward_tiles.load_stats``."""
        return max(2, min(16, 32 * self.num_warps // self.block_q))

    def options(self) -> dict[str, int]:
        """Arguments of a launch."""
        found = {
            "BLOCK_M": self.block_q,
            "BLOCK_N": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }
        return found | ({"maxnreg": self.registers} if self.registers else {})


def pieces(
    head_dim: int, value_dim: int, dtype: torch.dtype, capability: tuple[int, int], few: bool
) -> tuple[Piece, Piece]:
    """The piece of a tile of the query kernel and of the key kernel.

    Args:
        head_dim: of q and k. value_dim: of v.
        dtype: of q, k and v.
        capability: (major, minor) of the device.
        few: the rows have less than ``FEW_TILES`` tiles on average.

    Those of Hopper for fp16 and bf16 and head dims up to 128 are the fastest measured (see
    docs/kernels.md), and those for fp32 there the fastest that do not spill at the head dims that
    are compiled. The others were not measured: the largest that
    tests/kernels/test_backward_compile.py compiles without spills and within the shared memory.
    """
    width = next_power_of_two(max(head_dim, value_dim))
    hip = torch.version.hip is not None
    by_groups = multiplies_by_groups(capability)
    if dtype.itemsize == 4 and exact_products(width) != "ieee":
        # told that it may have all registers, the assembler does not spill some for more programs
        if width > 64:
            return Piece(16, 32, 4, 2, 255), Piece(16, 16, 4, 2, 255)
        tall = capability[0] == 9 and width > 16
        return Piece(64 if tall else 16, 32, 4, 2, 255), Piece(64 if tall else 32, 16, 4, 1, 255)
    if dtype.itemsize == 4:
        small = Piece(16, 16, 8, 2)
        if width > 64:
            return small, Piece(16, 16, 4, 2) if hip and width > 128 else small
        return Piece(32, 32, 8, 2), small
    if capability == (9, 0) and not hip and width <= 64:
        return Piece(64, 32 if few else 64, 4, 3), Piece(32, 64, 4, 3)
    if capability == (9, 0) and not hip and width <= 128:
        return Piece(64, 32, 4, 2 if few else 3), Piece(32, 64, 4, 3)
    if width <= 64:
        return Piece(64, 64, 4, 2), Piece(64 if by_groups or hip else 32, 64, 4, 2)
    if width <= 128:
        tall = not hip and capability[0] != 10
        return Piece(64, 64, 4, 2), Piece(64, 64, 8, 2) if tall else Piece(32, 64, 4, 2)
    if hip:
        return Piece(16, 32, 8, 2), Piece(16, 32, 8, 2)
    return Piece(64 if by_groups else 32, 32, 8, 2), Piece(32, 32, 8, 2)


def _order(slots: int, planes: int, bytes_in_use: int, device: torch.device) -> tuple[int, int]:
    """Slots, the heaviest first, that all heads begin with, so that none of those comes last; and
    how many heads work at the same time on the others: as many as stay in the L2 cache. Past it
    every tile would come from memory.
    """
    heavy = max(1, slots // 32)
    if device.type != "cuda":
        return heavy, planes
    held = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) // 2
    return heavy, max(1, min(planes, held * planes // max(1, bytes_in_use)))


def backward_refusal(
    q: Tensor, v: Tensor, block_q: int, block_k: int, lse: Tensor | None
) -> str | None:
    """Why the kernels cannot give the gradients of an attention call; None when they can."""
    if q.device.type != "cuda":
        return "Triton kernels run on a GPU"
    if lse is None or lse.numel() != q[..., 0].numel():
        return "the forward pass kept no log-sum-exp"
    if q.dtype not in DTYPES:
        return f"{q.dtype} is not fp16, bf16 or fp32"
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        return f"head dims over {MAX_HEAD_DIM}"
    if any(edge < 16 or edge & (edge - 1) for edge in (block_q, block_k)):
        return f"tiles of {block_q} x {block_k} are no powers of two >= 16"
    return None


def attention_backward_blockwise(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Sequence[Tensor],
    key_ptr: Tensor,
    key_tiles: Tensor,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    block_q: int,
    block_k: int,
    tf32: bool = False,
    piece_sizes: tuple[Piece, Piece] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernels: gradients of q, k and v; that of the bias is not among them.

    Args:
        grad_out: [batch, heads, q_len, value_dim] in the dtype of q, any strides.
        grad_lse: fp32 [batch, heads, q_len], or None.
        q, k, v, mask, key_keep, bias, scale, softcap, q_offset, band: as in the forward pass.
        out: its result, any strides. lse: its log-sum-exp, fp32 [batch, heads, q_len].
        key_ptr: int32 [3, planes * cols + 1], key_tiles: int32 [2, tiles]: the lists by column, see
            ``masks/key_lists.py``.
        block_q, block_k: tile of the mask.
        tf32: fp32 matrix products may use TF32.
        piece_sizes: of the query and the key kernel instead of the usual ones, for tests.

    Returns:
        (dq, dk, dv), contiguous, in the dtype of q; zeros for rows without keys.

    Raises:
        ValueError: an argument does not fit the others.
    """
    arrays = TileMask(*mask)
    p = check_problem(q, k, v, arrays, key_keep, bias, block_q, block_k)
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        wanted = (p.batch, p.heads, p.q_len, p.value_dim)
        if tensor.shape != wanted or tensor.dtype != q.dtype:
            raise ValueError(
                f"attention backward: {name} must be {q.dtype} {wanted}; got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
    grad_out, out = (t if t.stride(3) == 1 else t.contiguous() for t in (grad_out, out))
    cols = -(-p.k_len // block_k)
    dq, dk, dv = (torch.empty(t.shape, dtype=q.dtype, device=q.device) for t in (q, k, v))
    if p.batch == 0 or p.rows == 0 or cols == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    lse = lse.contiguous()
    padded = p.rows * block_q
    grad_lse = None if grad_lse is None else grad_lse.contiguous().float()
    lanes = 16 // q.element_size()
    tensors = (p.q, p.k, p.v, out, grad_out)
    aligned = all(stride % lanes == 0 for t in tensors for stride in outer_strides(t))
    vec = lanes if aligned else 1
    sq, sk, sv, so, sg = ([stride // vec for stride in outer_strides(t)] for t in tensors)
    padding = arrays.row_ptr if p.key_keep is None else p.key_keep
    padding_stride = 0 if p.key_keep is None else broadcast_strides(p.key_keep)[0]
    added = arrays.row_ptr if p.bias is None else p.bias
    added_strides = [0, 0, 0, 0] if p.bias is None else broadcast_strides(p.bias)
    width = next_power_of_two(max(p.head_dim, p.value_dim))
    constants = {
        **score_constants(scale, softcap, p.bias is not None),
        "HEAD_DIM": p.head_dim,
        "VALUE_DIM": p.value_dim,
        "TILE_M": block_q,
        "TILE_N": block_k,
        "BLOCK_D": next_power_of_two(p.head_dim),
        "BLOCK_DV": next_power_of_two(p.value_dim),
        "GROUP": p.group,
        "VEC": vec,
        "PRECISION": "tf32" if tf32 else exact_products(width),
        "EVEN_K": p.k_len % block_k == 0,
        "HAS_PADDING": p.key_keep is not None,
        "HAS_BIAS": p.bias is not None,
        "SINGLE_PLANE": p.single_plane,
        "HAS_PART": bool(band) or arrays.bitmap.shape[0] > 0,
        **band_flags(band),
    }
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
    few = arrays.col_idx.numel() < FEW_TILES * arrays.row_order.numel()
    sizes = piece_sizes or pieces(p.head_dim, p.value_dim, q.dtype, capability, few)
    by_query, by_key = (
        piece._replace(block_q=min(piece.block_q, block_q), block_k=min(piece.block_k, block_k))
        for piece in sizes
    )
    constants["STATS_N"] = by_key.stats_per_row
    stats = lse.new_empty((p.batch, p.heads, padded, by_key.stats_per_row))
    inverse = stats if p.bias is None else lse.new_empty((p.batch, p.heads, padded))
    query_slots = p.rows * (block_q // by_query.block_q)
    key_slots = cols * (block_k // by_key.block_k)
    per_head, kv_heads = p.batch * p.heads, p.heads // p.group
    per_key_head = p.batch * kv_heads
    keys_bytes = (k.numel() + v.numel()) * q.element_size()
    rows_bytes = (q.numel() + grad_out.numel()) * q.element_size()
    for kernel in KERNELS:
        settle_key(kernel)
    with on_device(q):
        attention_backward_query_kernel[(query_slots * per_head,)](
            p.q, *sq, p.k, *sk, p.v, *sv, out, *so, grad_out, *sg,
            lse, stats if grad_lse is None else grad_lse, stats, inverse, dq,
            arrays.plane_map, *broadcast_strides(arrays.plane_map),
            arrays.row_ptr, arrays.full_start, arrays.col_idx, arrays.bitmap_id, arrays.bitmap,
            arrays.row_order, padding, padding_stride, added, *added_strides,
            per_head, p.heads, *_order(query_slots, per_head, keys_bytes, q.device),
            p.q_len, padded, p.k_len, p.rows, q_offset, *band_arguments(band),
            **constants, HAS_GRAD_LSE=grad_lse is not None,
            STATS_M=by_key.block_q, **by_query.options(),
        )  # fmt: skip
        attention_backward_key_kernel[(key_slots * per_key_head,)](
            p.q, *sq, p.k, *sk, p.v, *sv, grad_out, *sg,
            stats, inverse, dk, dv,
            arrays.plane_map, *broadcast_strides(arrays.plane_map),
            key_ptr, key_ptr.stride(0), key_tiles, key_tiles.stride(0), arrays.bitmap,
            padding, padding_stride, added, *added_strides,
            per_key_head, kv_heads, *_order(key_slots, per_key_head, rows_bytes, q.device),
            p.q_len, padded, p.k_len, cols, q_offset, *band_arguments(band),
            **constants, EVEN_Q=p.q_len % block_q == 0,
            **by_key.options(),
        )  # fmt: skip
    return dq, dk, dv
