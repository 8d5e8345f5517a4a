"""Block-wise attention on Hopper GPUs: when it can run, and how ``hopper_kernel.py`` is launched.

The same function, mask storage and operator as ``attention_blockwise.py``; a ``BlockConfig`` with
``hopper`` set chooses it. It takes tiles of 64 x 64, of 64 x 128 two tile rows at a time
(``hopper_pair_kernel.py``), or of 192 or 128 queries that share 64 keys
(``hopper_shared_kernel.py``), and reads the mask of part tiles as fragments
(``BlockMask.fragments``) in place of the bitmap.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bound_launch import Descriptor, Repeat, launch, layout
from .hopper_forms import (
    PAIR_CONSUMER,
    PAIR_KEYS,
    PAIR_REGISTERS,
    SHORT,
    TILE,
    form_refusal,
    query_slots,
    registers_of,
    ring,
    shared_form,
    tile_of,
    widths,
    without_spills,
)
from .hopper_operands import (
    WORDS,
    for_tma,
    last_heads_together,
    no_fragments,
    shared_layout,
    tiles_of,
)
from .l2_sides import l2_sides
from .long_rows import WARPS, Pieces, merged, merging, new_pieces
from .memo import remember
from .merge_kernel import merge_rows_kernel
from .problem import (
    LOG2E,
    TileMask,
    broadcast_strides,
    check_problem,
    empty_result,
    next_power_of_two,
    on_device,
)
from .work_queue import new_queue

HALF_TYPES = (torch.float16, torch.bfloat16)
_MAX_UNITS = 2**31 - 2**20  # unit numbers are 32-bit; every worker asks for one past the end


class _Known(NamedTuple):
    """A launch that was checked and has run."""

    repeat: Repeat
    head_dim: int
    has_part: bool
    has_tail: bool
    shifted: bool
    whole: bool  # rows are never cut: a kernel without arguments for it
    pieces: tuple[int, ...]  # arguments of new_pieces behind q; empty where no row is cut
    merge: Repeat | None  # of their results


_known: dict[tuple[Any, ...], _Known] = {}  # by all that was checked: layouts, numbers, device


@cache
def _kernel_is_there() -> bool:
    """Whether this Triton has the dialect the kernel is written in."""
    try:
        from . import hopper_kernel
    except (ImportError, AttributeError):
        return False
    return hasattr(hopper_kernel, "attention_hopper_kernel")


def hopper_refusal(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    units: int,
    *,
    plain: bool,
    most_dims: int = 256,
) -> str | None:
    """Why the Hopper kernel cannot run a problem, None where it can.

    Args:
        head_dim, value_dim: of q and k, and of v.
        dtype: of q, k and v.
        capability: (major, minor) of the device.
        units: batch * heads * tile rows.
        plain: no padding, no bias, no softcap and a positive scale.
        most_dims: of a head; the gradients' kernels take fewer.
    """
    if capability[0] != 9 or torch.version.hip is not None:
        return "it needs a Hopper GPU"
    if dtype not in HALF_TYPES:
        return f"it takes fp16 and bf16, not {dtype}"
    if head_dim != value_dim or not 32 < head_dim <= most_dims or head_dim % 8:
        taken = f"equal head dims of 40 to {most_dims} in steps of 8"
        return f"it takes {taken}, not {head_dim}, {value_dim}"
    if not plain:
        return "it takes no padding, bias or softcap and a positive scale"
    if not 0 < units < _MAX_UNITS:
        return f"it takes up to {_MAX_UNITS} units, not {units}"
    return None if _kernel_is_there() else "this Triton lacks the dialect it is written in"


def attention_hopper_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    scale: float,
    programs: int,
    stages: int,
    heavy_rows: int,
    pieces: int,
    uneven: bool,
    return_lse: bool,
    shifted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launch the Hopper kernel.

    Args:
        q: [batch, heads, q_len, head_dim], fp16 or bf16; copied if its strides or address do not
            suit TMA (16 bytes).
        k: [batch, kv_heads, k_len, head_dim]; heads is a multiple of kv_heads.
        v: like k.
        mask: ``BlockMask.hopper_tensors``, with fragments, int32 [tiles, rows * keys / 32], in
            place of the bitmap: tiles of 64 x 64, of 64 x 128 with rows ordered by pairs, or of 192
            or 128 x 64 with kinds in their numbers.
        scale: factor of the dot products, positive.
        programs: per multiprocessor, 1 to 4, to 2 for heads of over 128 dims; with other tiles than
            64 x 64 what their form has (``hopper_forms.py``, which also tells tiles by the words of
            the mask, the head dim and the programs: the caller sees that they are the mask's).
        stages: pairs of key and value tiles in flight; 1: a pair and the next keys, over 192 dims
            without these. With tiles of 128 keys 2, or 4 up to head dim 64; with those of over 64
            rows the key tiles of their form.
        heavy_rows: so many of the heaviest tile rows of every head come first.
        pieces: units of work that each of them is cut into, 1 for none.
        uneven: the other rows have unequal numbers of tiles.
        return_lse: also return the log-sum-exp of the masked scores.
        shifted: the mask is ``BlockMask.shifted_tensors``; tiles of 64 x 64.

    Returns:
        out: logical [batch, heads, q_len, head_dim] in [batch, q_len, heads, head_dim] memory.
        lse: fp32 [batch, heads, q_len], natural logarithm, -inf on rows without keys; [0] if not
            asked.

    Raises:
        ValueError: a size or array that the kernel does not take.
    """
    arrays = TileMask(*mask)
    numbers = scale, programs, stages, heavy_rows, pieces, uneven, return_lse, shifted
    asked = (*map(layout, (q, k, v, *arrays)), *numbers)
    known = _known.get(asked)
    if known is not None and known.repeat.here:
        out, lse = empty_result(q, known.head_dim, return_lse)
        _repeat(known, q, k, v, out, lse, arrays)
        return out.transpose(1, 2), lse
    from .hopper_kernel import attention_hopper_kernel
    from .hopper_pair_kernel import attention_hopper_pair_kernel
    from .hopper_shared_kernel import attention_hopper_shared_kernel

    tile = tile_of(arrays.bitmap.shape[-1], q.shape[-1], programs) or (TILE, TILE)
    keys = tile[1]
    pairs = keys == PAIR_KEYS  # tile rows two at a time
    shared = shared_form(tile[0], q.shape[-1])
    p = check_problem(q, k, v, arrays, None, None, *tile, fragments=True)
    head_dim = p.head_dim
    heavy_rows = max(0, min(heavy_rows, p.rows))
    split = pieces > 1 and heavy_rows > 0 and tile == (TILE, TILE)
    planes = p.batch * p.heads
    slots = -(-p.rows // 2) if pairs else p.rows  # units of a head
    # an odd row is alone in the first pair; heavy ones are in a pair each at worst
    heavy = min(slots, heavy_rows + p.rows % 2) if pairs and heavy_rows else heavy_rows
    units = planes * (slots + (heavy_rows * (pieces - 1) if split else 0))
    if tile == (TILE, TILE):
        programs, stages = without_spills(programs, stages, split, return_lse)
    if not q.is_cuda:
        raise ValueError(f"Hopper attention kernel: it runs on a GPU, not on {q.device}")
    refusal = hopper_refusal(
        head_dim,
        p.value_dim,
        q.dtype,
        torch.cuda.get_device_capability(q.device),
        max(units, 1),
        plain=scale > 0,
    )
    refusal = refusal or form_refusal(tile, programs, stages, head_dim, shifted=shifted)
    if refusal is not None:
        raise ValueError(f"Hopper attention kernel: {refusal}")
    out, lse = empty_result(q, head_dim, return_lse)
    if out.numel() == 0:
        return out.transpose(1, 2), lse
    if p.k_len == 0:
        return out.zero_().transpose(1, 2), lse.fill_(-torch.inf)
    whole = pairs or shared is not None
    block_d, tail_d = (next_power_of_two(head_dim), 0) if whole else widths(head_dim, programs)
    held = [for_tma(t) for t in (p.q, p.k, p.v)]
    tiled = (*held, out.transpose(1, 2))
    has_part = arrays.bitmap.shape[0] > 0
    fragments = arrays.bitmap if has_part else no_fragments(arrays)
    heights = (TILE, keys, keys, TILE)
    operands: list[Any] = [tiles_of(t, h, block_d) for t, h in zip(tiled, heights, strict=True)]
    of_words = fragments.shape, (fragments.shape[1], 1), (1, WORDS), shared_layout(0, 32, 2)
    operands.append(Descriptor(fragments, *of_words))
    if not whole:
        operands += [tiles_of(t, TILE, tail_d) if tail_d else 0 for t in tiled]
        for width in (block_d, tail_d):
            there = shifted and width > 0
            operands += [tiles_of(t, SHORT, width) if there else 0 for t in held[1:]]
    workers = torch.cuda.get_device_properties(q.device).multi_processor_count * programs
    last_heads = last_heads_together(p, slots, workers) if uneven else 1
    with on_device(q):
        queue = new_queue(q.device)
        cut = (planes, heavy_rows, pieces, TILE, block_d + tail_d) if split else ()
        parts = new_pieces(q, *cut) if cut else None
        arguments = [
            *operands, lse if return_lse else queue, queue,
            l2_sides(q.device), arrays.plane_map, *broadcast_strides(arrays.plane_map),
            arrays.row_ptr, arrays.full_start, arrays.col_idx, arrays.bitmap_id, arrays.row_order,
            planes, p.heads, p.q_len, p.rows, heavy, last_heads,
        ]  # fmt: skip
        first: dict[str, Any] = {"MULT": float(scale) * LOG2E, "BLOCK_D": block_d}
        of_mask = {
            "GROUP": p.group,
            "SINGLE_PLANE": p.single_plane,
            "HAS_PART": has_part,
            "RETURN_LSE": return_lse,
        }
        if pairs:
            registers = PAIR_REGISTERS
            constants = {**first, "STAGES": stages, **of_mask, "REGISTERS": PAIR_CONSUMER}
            kernel = attention_hopper_pair_kernel
        elif shared is not None:
            registers = shared.registers
            of_threads = {"CONSUMER": shared.consumer, "PRODUCER": shared.producer}
            constants = {**first, **shared.constants(), **of_mask, **of_threads}
            kernel = attention_hopper_shared_kernel
        else:
            registers = registers_of(programs, block_d + tail_d)
            arguments += [pieces if split else 1, *(parts or (queue, queue))]
            slots = query_slots(block_d + tail_d, programs)
            narrow = {"TAIL_D": tail_d, "RING": ring(stages, block_d + tail_d), "Q_SLOTS": slots}
            constants = {**first, **narrow, **of_mask, "SPLIT": split, "SHIFTED": shifted}
            kernel = attention_hopper_kernel
        options = {"num_warps": 4, "maxnreg": registers, "launch_pdl": True}
        repeat = launch(kernel, min(workers, units), arguments, constants, options)
        merge = None if parts is None else _merge(parts, arrays, out, lse)
    copied = any(a.data_ptr() != b.data_ptr() for a, b in zip((q, k, v), held, strict=True))
    if repeat is not None and not copied and (parts is None or merge is not None):
        remember(
            _known,
            asked,
            _Known(repeat, head_dim, has_part, tail_d > 0, shifted, whole, cut, merge),
        )
    return out.transpose(1, 2), lse


def _repeat(
    known: _Known, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask
) -> None:
    """Run a known launch on tensors with the same layouts, in the kernel's order of arguments."""
    fragments = mask.bitmap if known.has_part else no_fragments(mask)
    queue = new_queue(q.device)
    tails: tuple[Tensor, ...] = (q, k, v, out) if known.has_tail else ()
    if known.shifted:
        tails += (k, v, k, v) if known.has_tail else (k, v)
    parts = new_pieces(q, *known.pieces) if known.pieces else None
    known.repeat(
        q, k, v, out, fragments, *tails, lse if lse.numel() else queue, queue,
        l2_sides(q.device),
        mask.plane_map, mask.row_ptr, mask.full_start, mask.col_idx, mask.bitmap_id,
        mask.row_order, *(parts or (() if known.whole else (queue, queue))),
    )  # fmt: skip
    if parts is not None and known.merge is not None:
        known.merge(*merged(parts, mask, out, lse))


def _merge(parts: Pieces, mask: TileMask, out: Tensor, lse: Tensor) -> Repeat | None:
    """Merge the pieces of long rows; the launch again, None the first time."""
    programs, arguments, constants = merging(parts, mask, out, lse)
    options = {"num_warps": WARPS, "launch_pdl": True}
    return launch(merge_rows_kernel, programs, arguments, {**constants, "PDL": True}, options)
