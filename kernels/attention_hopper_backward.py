"""The gradient of block-wise attention on Hopper GPUs: when it can run, and how its two kernels are
launched.

What ``attention_backward.py`` computes, for tiles of 64 x 64, with the mask of part tiles as
fragments (``BlockMask.gradient_fragments``).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_hopper import hopper_refusal
from .bound_launch import Descriptor, Repeat, launch, layout
from .hopper_forms import TILE
from .hopper_operands import (
    WORDS,
    for_tma,
    last_heads_together,
    no_fragments,
    shared_layout,
    tiles_of,
)
from .l2_sides import l2_sides
from .memo import remember
from .problem import LOG2E, TileMask, broadcast_strides, check_problem, next_power_of_two, on_device
from .work_queue import new_queue


class Form(NamedTuple):
    """How a kernel is launched."""

    programs: int  # per multiprocessor
    # a thread starts with: those of 256 threads and all programs fill a multiprocessor; the
    # compiler takes them from the producer warp and gives them to the consumers
    registers: int
    slots: int  # units a program holds: with two the next one is there in time
    stages: int  # pairs of tiles in flight


FORMS = {  # of the query and of the key kernel, by the width of a head
    64: (Form(3, 80, 2, 2), Form(2, 120, 2, 4)),
    128: (Form(2, 128, 1, 2), Form(2, 128, 1, 2)),
}


class _Known(NamedTuple):
    """Both launches, checked and run before."""

    query: Repeat
    key: Repeat
    has_part: bool


_MOST_DIMS = 128  # of a head

_known: dict[tuple[Any, ...], _Known] = {}  # by all that was checked: layouts, numbers, device


def hopper_gradient_refusal(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    units: int,
    *,
    plain: bool,
    tile: tuple[int, int],
    grouped_planes: bool,
) -> str | None:
    """Why the Hopper kernels cannot give the gradients of a problem, None where they can.

    Args:
        head_dim, value_dim, dtype, capability, plain: as in ``hopper_refusal``.
        units: batch * heads * tile rows, or tile columns where those are more.
        tile: of the mask.
        grouped_planes: query heads that share a key head have masks of their own.
    """
    if tile != (TILE, TILE):
        return f"tiles have {TILE} x {TILE} elements, not {tile[0]} x {tile[1]}"
    if grouped_planes:
        return "query heads that share a key head must share their mask"
    given = head_dim, value_dim, dtype, capability, units
    return hopper_refusal(*given, plain=plain, most_dims=_MOST_DIMS)


def attention_hopper_backward(
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
    fragments: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch both kernels: gradients of q, k and v.

    Args:
        grad_out: [batch, heads, q_len, head_dim] in the dtype of q, any strides.
        grad_lse: fp32 [batch, heads, q_len], or None.
        q, k, v, mask, scale: as in the forward pass; the bitmap of the mask is not read.
        out: its result, any strides. lse: its log-sum-exp, fp32 [batch, heads, q_len].
        key_ptr: int32 [3, planes * cols + 1], key_tiles: int32 [2, tiles]: the lists by column, see
            ``masks/key_lists.py``.
        fragments: int32 [2, part tiles, 128]: of the part tiles, and of these transposed.

    Returns:
        (dq, dk, dv), contiguous, in the dtype of q; zeros for rows without keys.

    Raises:
        ValueError: an argument does not fit the others, or a size the kernels do not take.
    """
    arrays = TileMask(*mask)._replace(bitmap=fragments[0])
    results = grad_out, grad_lse, q, k, v, out, lse
    asked = (*map(layout, (*results, *arrays, key_ptr, key_tiles, fragments)), scale)
    known = _known.get(asked)
    if known is not None and known.query.here:
        gradients = _new_gradients(q, k, v)
        of_rows = (q, grad_out, out, k, v)
        _repeat(known, of_rows, lse, grad_lse, gradients, arrays, key_ptr, key_tiles, fragments)
        return gradients
    from .hopper_key_gradient import attention_hopper_key_kernel
    from .hopper_query_gradient import attention_hopper_query_kernel

    p = check_problem(q, k, v, arrays, None, None, TILE, TILE, fragments=True)
    cols, planes = -(-p.k_len // TILE), p.batch * p.heads
    if not q.is_cuda:
        raise ValueError(f"Hopper attention gradients: they run on a GPU, not on {q.device}")
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        if tensor.shape != q.shape or tensor.dtype != q.dtype:
            raise ValueError(
                f"Hopper attention gradients: {name} must be {q.dtype} {tuple(q.shape)}; got "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    refusal = hopper_gradient_refusal(
        p.head_dim,
        p.value_dim,
        q.dtype,
        torch.cuda.get_device_capability(q.device),
        max(planes * max(p.rows, cols), 1),
        plain=True,
        tile=(TILE, TILE),
        grouped_planes=p.group > 1 and not p.single_plane,
    )
    if refusal is not None:
        raise ValueError(f"Hopper attention gradients: {refusal}")
    gradients = _new_gradients(q, k, v)
    if p.batch == 0 or p.rows == 0 or cols == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    given = (p.q, p.k, p.v, out, grad_out)
    held = [for_tma(t) for t in given]
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous().float()
    has_part = fragments.shape[1] > 0
    width = next_power_of_two(p.head_dim)
    by_query, by_key = FORMS[width]
    stats = lse.new_empty((planes * p.rows, WORDS))
    of_q, of_k, of_v, of_out, of_grad, of_dq, of_dk, of_dv = (
        tiles_of(t, TILE, width) for t in (*held, *gradients)
    )
    words = [_rows_of(part) for part in (fragments if has_part else [no_fragments(arrays)] * 2)]
    count = torch.cuda.get_device_properties(q.device).multi_processor_count
    numbers = {"SCALE": float(scale), "MULT": float(scale) * LOG2E, "WIDTH": width}
    of_mask = {"GROUP": p.group, "SINGLE_PLANE": p.single_plane, "HAS_PART": has_part}
    kv_heads = p.heads // p.group
    with on_device(q):
        queue, sides = new_queue(q.device), l2_sides(q.device)  # of both, one after the other
        query = launch(
            attention_hopper_query_kernel,
            min(count * by_query.programs, planes * p.rows),
            [
                of_q, of_grad, of_out, of_k, of_v, of_dq, words[0],
                lse, lse if grad_lse is None else grad_lse, stats, queue, sides,
                arrays.plane_map, *broadcast_strides(arrays.plane_map),
                arrays.row_ptr, arrays.full_start, arrays.col_idx, arrays.bitmap_id,
                arrays.row_order,
                planes, p.heads, p.q_len, p.rows, _heavy(p.rows),
                last_heads_together(p, p.rows, count * by_query.programs),
            ],
            {**_constants(by_query, numbers), **of_mask, "HAS_GRAD_LSE": grad_lse is not None},
            {"num_warps": 4, "maxnreg": by_query.registers, "launch_pdl": True},
        )  # fmt: skip
        key = launch(
            attention_hopper_key_kernel,
            min(count * by_key.programs, p.batch * kv_heads * cols),
            [
                of_k, of_v, of_q, of_grad, of_dk, of_dv, words[1], _rows_of(stats), queue,
                sides, arrays.plane_map, *broadcast_strides(arrays.plane_map),
                key_ptr[0], key_ptr[1], key_tiles[0], key_tiles[1], key_ptr[2],
                p.batch * kv_heads, kv_heads, cols, p.rows, _heavy(cols),
                min(p.batch * kv_heads, last_heads_together(p, cols, count * by_key.programs)),
            ],
            {**_constants(by_key, numbers), **of_mask},
            {"num_warps": 4, "maxnreg": by_key.registers, "launch_pdl": True},
        )  # fmt: skip
    plain = all(a.data_ptr() == b.data_ptr() for a, b in zip(given, held, strict=True))
    if query is not None and key is not None and plain:
        remember(_known, asked, _Known(query, key, has_part))
    return gradients


def _repeat(
    known: _Known,
    of_rows: tuple[Tensor, ...],
    lse: Tensor,
    grad_lse: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
    mask: TileMask,
    key_ptr: Tensor,
    key_tiles: Tensor,
    fragments: Tensor,
) -> None:
    """Run known launches on tensors with the same layouts, in the kernels' order of arguments."""
    q, grad_out, out, k, v = of_rows
    dq, dk, dv = gradients
    words = fragments if known.has_part else [no_fragments(mask)] * 2
    lse = lse.contiguous()
    grad_lse = lse if grad_lse is None else grad_lse.contiguous().float()
    stats = lse.new_empty((lse.shape[0] * lse.shape[1] * -(-lse.shape[2] // TILE), WORDS))
    queue, sides = new_queue(q.device), l2_sides(q.device)  # of both, one after the other
    known.query(
        q, grad_out, out, k, v, dq, words[0], lse, grad_lse, stats, queue, sides,
        mask.plane_map, mask.row_ptr, mask.full_start, mask.col_idx, mask.bitmap_id, mask.row_order,
    )  # fmt: skip
    known.key(
        k, v, q, grad_out, dk, dv, words[1], stats, queue, sides, mask.plane_map,
        key_ptr[0], key_ptr[1], key_tiles[0], key_tiles[1], key_ptr[2],
    )  # fmt: skip


def _constants(form: Form, numbers: dict[str, float]) -> dict[str, Any]:
    return {**numbers, "SLOTS": form.slots, "STAGES": form.stages}


def _new_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(t.shape, dtype=q.dtype, device=q.device) for t in (q, k, v))
    return dq, dk, dv


def _rows_of(tensor: Tensor) -> Descriptor:
    """Rows of 128 32-bit words or numbers, one for each tile."""
    shape = tensor.shape[0], WORDS
    return Descriptor(tensor, shape, (WORDS, 1), (1, WORDS), shared_layout(0, 32, 2))


def _heavy(slots: int) -> int:
    """So many of the longest rows or columns come first, so that none is left in the end."""
    return max(1, slots // 32)
