"""The operators that attend under a block mask: schema, fake, gradient and the way to the kernels.

A block mask travels as its seven arrays (see ``masks/block_mask.py``), every decision as an
argument. Kernels, and with them Triton, are imported when an operator first meets a device that
needs them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import stof_compile.ops_hopper_attention  # noqa: F401  # registers stof::attention_hopper
from stof_compile.config_fields import (
    HEADS_FAST,
    HEAVY_ROWS,
    HOPPER,
    STAGES,
    has_shifted_tiles,
    hopper_programs,
    multiplies_in_tf32,
    row_pieces_of,
)
from stof_compile.launchers import load_launcher
from stof_compile.masks.fragments import from_fragments
from stof_compile.masks.hopper_arrays import numbers_alone
from stof_compile.masks.key_lists import key_lists
from stof_compile.ops_fakes import fake_attention, fake_gradients

# Positions of arguments of the operators, for the gradient.
_Q, _K, _V, _BITMAP_ID, _BITMAP, _BIAS = 0, 1, 2, 7, 8, 11
_RETURN_LSE, _KEY_PTR = 17, 18
_PLAIN_BITMAP, _FRAGMENTS = 20, 21  # of attention_block
_SMALLEST_SCALE = 2.0**-60  # of the Hopper gradients: a log-sum-exp over it is a finite number


@torch.library.triton_op("stof::attention_block", mutates_args=())
def attention_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plane_map: Tensor,
    row_ptr: Tensor,
    full_start: Tensor,
    col_idx: Tensor,
    bitmap_id: Tensor,
    bitmap: Tensor,
    row_order: Tensor,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    config: Sequence[int],
    return_lse: bool,
    key_ptr: Tensor | None = None,
    key_tiles: Tensor | None = None,
    plain_bitmap: Tensor | None = None,
    gradient_fragments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with the block-wise kernel; see ``attention_block_forward`` in kernels/.

    ``key_ptr`` and ``key_tiles`` are ``BlockMask.key_lists``: given with ``return_lse``, gradients
    come from the kernels that walk them, else from the reference formula. A config with ``hopper``
    set runs ``attention_hopper``; ``bitmap`` then holds the mask's fragments, from which gradients
    without a band make the bitmap at every call, unless it is given as ``plain_bitmap``. With
    ``BlockMask.gradient_fragments`` they come from the Hopper kernels, which read no bitmap.
    """
    mask = (plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order)
    if hopper_programs(config):
        how = (key_keep, bias, scale, softcap, config, return_lse)
        return attend_on_hopper(q, k, v, mask, *how)
    return _launcher("stof::attention_block")(
        q, k, v, mask, key_keep, bias, scale, softcap, q_offset, band, config, return_lse
    )


def attend_on_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    config: Sequence[int],
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend by the Hopper kernel, without a gradient, as a config that has ``hopper`` set says."""
    if key_keep is not None or bias is not None or softcap != 0:
        raise ValueError("the Hopper kernel takes no padding, bias or softcap")
    from stof_compile.kernels.hopper_forms import tile_of

    tile, words = (config[0], config[1]), mask[5].shape[-1]
    taken = tile_of(words, q.shape[-1], hopper_programs(config)) or tile
    if words * 32 != tile[0] * tile[1] or taken != tile:
        raise ValueError(
            f"the config has tiles of {tile[0]}x{tile[1]}, and with {words} mask words a tile, "
            f"heads of {q.shape[-1]} and {hopper_programs(config)} programs the Hopper kernel has "
            f"{taken[0]}x{taken[1]}; take a form of hopper_forms.py, and BlockMask.hopper_tensors "
            "in its tiles"
        )
    pieces, shifted = row_pieces_of(config), has_shifted_tiles(config)
    out, lse = torch.ops.stof.attention_hopper(
        q, k, v, *mask, scale, config[HOPPER], config[STAGES], config[HEAVY_ROWS], pieces,
        return_lse, bool(config[HEADS_FAST]), shifted,
    )  # fmt: skip
    return out, lse


@torch.library.triton_op("stof::attention_row", mutates_args=())
def attention_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plane_map: Tensor,
    row_ptr: Tensor,
    full_start: Tensor,
    col_idx: Tensor,
    bitmap_id: Tensor,
    bitmap: Tensor,
    row_order: Tensor,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    config: Sequence[int],
    return_lse: bool,
    key_ptr: Tensor | None = None,
    key_tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with the row-wise kernel; see ``attention_row_forward`` in kernels/.

    ``key_ptr`` and ``key_tiles`` as in ``attention_block``.
    """
    mask = (plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order)
    return _launcher("stof::attention_row")(
        q, k, v, mask, key_keep, bias, scale, softcap, q_offset, band, config, return_lse
    )


@torch.library.triton_op("stof::attention_gather", mutates_args=())
def attention_gather(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plane_map: Tensor,
    row_ptr: Tensor,
    full_start: Tensor,
    col_idx: Tensor,
    bitmap_id: Tensor,
    bitmap: Tensor,
    row_order: Tensor,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    config: Sequence[int],
    return_lse: bool,
    key_ptr: Tensor | None,
    key_tiles: Tensor | None,
    pack_ptr: Tensor,
    pack_columns: Tensor,
    pack_id: Tensor,
    pack_bitmap: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend with the gathering kernel; see ``attention_gather_forward`` in kernels/.

    The last four are ``BlockMask.packed``; ``key_ptr`` and ``key_tiles`` as in
    ``attention_block``, whose gradient this is: ``bitmap`` and ``band`` are read there only.
    """
    mask = (plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order)
    packed = (pack_ptr, pack_columns, pack_id, pack_bitmap)
    return _launcher("stof::attention_gather")(
        q, k, v, mask, packed, key_keep, bias, scale, softcap, config, return_lse
    )


@torch.library.custom_op("stof::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plane_map: Tensor,
    row_ptr: Tensor,
    full_start: Tensor,
    col_idx: Tensor,
    bitmap_id: Tensor,
    bitmap: Tensor,
    row_order: Tensor,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    block_q: int,
    block_k: int,
    bias_grad: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    key_ptr: Tensor | None = None,
    key_tiles: Tensor | None = None,
    tf32: bool = False,
    fragments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dbias or [0]) of every attention operator over a block mask.

    On a GPU that of q, k and v by the kernels of ``attention_backward.py``, or with ``fragments``
    (``BlockMask.gradient_fragments``) of ``attention_hopper_backward.py``, given what the forward
    pass returned (``out``, ``lse``); elsewhere, and where the gradient of a bias is wanted, by the
    reference formula in strips of query rows. ``bitmap`` may be the mask's fragments. Opaque: the
    strips read the tile lists, whose values no trace may need.
    """
    serve = _kernels_serve(q, v, block_q, block_k, bias_grad, out, lse)
    if not serve or scale < _SMALLEST_SCALE:
        fragments = None
    if bitmap.dtype == torch.int32 and fragments is None:
        if band:  # nothing reads it
            bitmap = bitmap.new_empty((0, block_q // 8 * (block_k // 8)), dtype=torch.int64)
        else:
            bitmap = from_fragments(bitmap, block_q)
    mask = (plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order)
    if serve:
        assert out is not None and lse is not None, "the kernels serve only what kept both"
        if key_ptr is None or key_tiles is None:
            rows, cols = -(-q.shape[2] // block_q), -(-k.shape[2] // block_k)
            key_ptr, key_tiles = key_lists(row_ptr, full_start, col_idx, bitmap_id, rows, cols)
        given = (grad_out, grad_lse, q, k, v, out, lse, mask, key_ptr, key_tiles)
        if fragments is not None:
            from stof_compile.kernels.attention_hopper_backward import attention_hopper_backward

            if key_keep is not None or bias is not None or softcap != 0:
                raise ValueError("the Hopper gradients take no padding, bias or softcap")
            return *attention_hopper_backward(*given, fragments, scale), q.new_empty(0)
        from stof_compile.kernels.attention_backward import attention_backward_blockwise

        numbers = (scale, softcap, q_offset, band, block_q, block_k, tf32)
        return *attention_backward_blockwise(*given, key_keep, bias, *numbers), q.new_empty(0)
    from stof_compile.kernels import reference

    keep_rows = reference.tile_keep_rows(
        mask, block_q, block_k, q.shape[2], k.shape[2], q_offset, band
    )
    return reference.attention_backward_reference(
        grad_out, grad_lse, q, k, v, keep_rows, key_keep, bias, scale, softcap,
        strip=reference.strip_rows(q, k.shape[2], block_q), bias_grad=bias_grad,
    )  # fmt: skip


@attention_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, q, k, v = arguments[:5]
    bias, bias_grad = arguments[13], arguments[20]
    return fake_gradients(q, k, v, bias if bias_grad else None)


def _kernels_serve(
    q: Tensor,
    v: Tensor,
    block_q: int,
    block_k: int,
    bias_grad: bool,
    out: Tensor | None,
    lse: Tensor | None,
) -> bool:
    """Whether the backward kernels give these gradients."""
    if not q.is_cuda or bias_grad or out is None:
        return False
    from stof_compile.kernels.attention_backward import backward_refusal

    return backward_refusal(q, v, block_q, block_k, lse) is None


def save_attention(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the inputs of an attention operator over a block mask for its gradient."""
    _save(ctx, inputs, (None, None, None, None, None))


def _save_with_results(ctx: Any, inputs: tuple[Any, ...], output: Any, kernel: str) -> None:
    """Keep the results too, and the lists by column: the backward kernels read them.

    Lists are given where gradients are wanted and none of a bias; without them the reference
    formula is used. ``attention_block`` may have the bitmap to keep in place of fragments, and
    those the Hopper kernels read.
    """
    out, lse = output
    fragments = None
    if kernel == "block":
        if has_shifted_tiles(inputs[_BIAS + 5]):
            raise ValueError("shifted tiles have no gradient; set shifted to 0 in the config")
        plain, fragments = (
            inputs[place] if len(inputs) > place else None for place in (_PLAIN_BITMAP, _FRAGMENTS)
        )
        if plain is not None:
            inputs = (*inputs[:_BITMAP], plain, *inputs[_BITMAP + 1 :])
    ours = inputs[_RETURN_LSE] and len(inputs) > _KEY_PTR and inputs[_KEY_PTR] is not None
    results = (out, lse) if ours else (None, None)
    _save(ctx, inputs, (*results, *inputs[_KEY_PTR : _KEY_PTR + 2], fragments))
    ctx.tf32 = multiplies_in_tf32(kernel, ctx.config)


def _save(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor | None, ...]) -> None:
    ctx.save_for_backward(*inputs[: _BIAS + 1], *results)
    ctx.scale, ctx.softcap, ctx.q_offset, ctx.band, ctx.config = inputs[_BIAS + 1 : _BIAS + 6]
    ctx.inputs = len(inputs)
    ctx.return_lse = inputs[_RETURN_LSE]
    ctx.tf32 = False
    # else a result that nothing uses has a gradient of zeros, which would be read
    ctx.set_materialize_grads(False)


def upstream(
    ctx: Any, q: Tensor, v: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of both results as the gradient operators take them: that of an output that
    nothing uses is zeros, or None where nothing uses the log-sum-exp either."""
    if not ctx.return_lse:
        grad_lse = None
    if grad_out is None and grad_lse is not None:
        grad_out = q.new_zeros((*q.shape[:3], v.shape[3]))
    return grad_out, grad_lse


def attention_gradient(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Any, ...]:
    """Gradient of every attention operator over a block mask, for its q, k, v and bias."""
    kept = ctx.saved_tensors  # once: a checkpoint lets each be unpacked a single time
    saved = kept[: _BIAS + 1]
    gradients: list[Tensor | None] = [None] * ctx.inputs
    grad_out, grad_lse = upstream(ctx, saved[_Q], saved[_V], grad_out, grad_lse)
    if grad_out is None:
        return tuple(gradients)
    *results, fragments = kept[_BIAS + 1 :]
    if hopper_programs(ctx.config) and ctx.config[0] > 64:
        plain = numbers_alone(saved[_BITMAP_ID])
        saved = (*saved[:_BITMAP_ID], plain, *saved[_BITMAP_ID + 1 :])
    bias_grad = saved[_BIAS] is not None and ctx.needs_input_grad[_BIAS]
    dq, dk, dv, dbias = torch.ops.stof.attention_backward(
        grad_out, grad_lse, *saved, ctx.scale, ctx.softcap, ctx.q_offset, ctx.band,
        *ctx.config[:2], bias_grad, *results, ctx.tf32, fragments,
    )  # fmt: skip
    gradients[_Q], gradients[_K], gradients[_V] = dq, dk, dv
    gradients[_BIAS] = dbias if bias_grad else None
    return tuple(gradients)


_LAUNCHERS = {
    "stof::attention_block": ("attention_blockwise", "attention_block_forward"),
    "stof::attention_row": ("attention_rowwise", "attention_row_forward"),
    "stof::attention_gather": ("attention_gather", "attention_gather_forward"),
}


def _launcher(operator: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return load_launcher(operator, *_LAUNCHERS[operator])


def _fake(operator: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if q.is_cuda:
            _launcher(operator)
        return fake_attention(q, v, rest[_RETURN_LSE - 3])

    return fake


_OPERATORS = ((attention_block, "block"), (attention_row, "row"), (attention_gather, "gather"))
for _operator, _kernel in _OPERATORS:
    _operator.register_fake(_fake(_operator._qualname))
    _operator.register_autograd(
        attention_gradient, setup_context=partial(_save_with_results, kernel=_kernel)
    )
