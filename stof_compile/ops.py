"""The operators of the ``stof`` namespace, and here those that take a rule for a mask.

Where lengths are known only at run time, the rule travels as JSON and captured tensors, and the
block mask of each length is built once and remembered. Importing this module defines every operator
that needs no CPU kernel; ``ops_cpu`` defines those.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stof_compile.config_fields import hopper_programs, multiplies_in_tf32, with_heavy_rows
from stof_compile.errors import StofUnsupportedError
from stof_compile.masks import BlockMask, MaskSpec, cached_block_mask
from stof_compile.ops_block import (
    attention_gradient,
    save_attention,
    upstream,
)
from stof_compile.ops_fakes import fake_attention, fake_gradients
from stof_compile.ops_first_config import first_gpu_config
from stof_compile.ops_fp8 import attend_rounded, refusal_on, round_operands
from stof_compile.ops_hopper_attention import gradient_fragments

__all__ = [
    "attention_gradient",
    "attention_rule",
    "dense_mask",
    "dense_mask_of_lengths",
    "save_attention",
]

_SPARSE = ("block", "row", "gather")  # kernels on a GPU, each with an operator attention_<kernel>
# The host builds and keeps the block mask of what the rule's tensors hold at the call: a CUDA graph
# would replay the mask it was captured with, and its memory pool may not keep the new one.
_OUTSIDE_GRAPHS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("stof::attention_rule", mutates_args=(), tags=_OUTSIDE_GRAPHS)
def attention_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule_tensors: Sequence[Tensor],
    rule: str,
    key_keep: Tensor | None,
    bias: Tensor | None,
    q_positions: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    kernel: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend under a mask rule; the block mask of each length is built once and remembered.

    ``q_positions`` (int, [Q] or [B, Q]) replaces ``q_offset`` where the position is known only on
    the device, as with a preallocated cache: keys past the last position are masked, and a dense
    mask is used, because a block mask would need the value on the host. ``kernel`` is one of the
    option ``attention``, or fp8 for the block-wise one on e4m3 operands. Given ``return_lse``,
    gradients come from kernels where those serve, else from the reference formula.
    """
    spec = _spec(rule, tuple(rule_tensors))
    batch, heads, q_len, _ = q.shape
    k_len = k.shape[2]
    if q_positions is not None or kernel == "sdpa":
        positions = _positions(q, q_offset, q_positions)
        keep = _dense_rows(spec, positions, q_len, k_len, batch, heads)(0, q_len)
        if q_positions is not None:
            last = positions.amax(-1, keepdim=True)[:, None, :, None]
            keep = keep & (torch.arange(k_len, device=q.device) <= last)
        return _attend_dense(q, k, v, keep, key_keep, bias, scale, softcap, return_lse)

    if kernel == "fp8":
        refusal = refusal_on(q.device, q.dtype, q.shape[3], v.shape[3])
        if refusal:
            raise StofUnsupportedError(f"sparse_attention: fp8 cannot be used: {refusal}")
    plain = key_keep is None and bias is None and softcap == 0 and scale > 0
    name, config, block_mask = _unmeasured(kernel, spec, q, k, v, q_offset, plain)
    arrays = block_mask.hopper_tensors if hopper_programs(config) else block_mask.tensors
    if name in ("block", "fp8"):
        config = with_heavy_rows(config, block_mask, batch * heads)
    band = [] if block_mask.band is None else block_mask.band.as_ints()
    if name == "fp8":
        out, lse = attend_rounded(
            *round_operands(q, k, v), *arrays, key_keep, bias, scale, softcap, q_offset, band,
            config, return_lse, q.dtype,
        )  # fmt: skip
        return out, lse
    more: list[Any] = []
    if name == "gather":
        more = [None, None, *block_mask.packed]
    elif name == "cpu":
        more = [_cpu_choice(kernel, q.dtype, block_mask, softcap, return_lse)]
    out, lse = getattr(torch.ops.stof, f"attention_{name}")(
        q, k, v, *arrays, key_keep, bias, scale, softcap, q_offset, band, config,
        return_lse, *more,
    )  # fmt: skip
    return out, lse


@attention_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return fake_attention(q, v, rest[-1])


@torch.library.custom_op("stof::attention_rule_backward", mutates_args=(), tags=_OUTSIDE_GRAPHS)
def attention_rule_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule_tensors: Sequence[Tensor],
    rule: str,
    key_keep: Tensor | None,
    bias: Tensor | None,
    q_positions: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    bias_grad: bool,
    kernel: str = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dbias or [0]) of attention_rule: from kernels given what it returned
    (``out``, ``lse``), else by the reference formula, the rule evaluated strip by strip."""
    spec = _spec(rule, tuple(rule_tensors))
    batch, heads, q_len, _ = q.shape
    if q.is_cuda and out is not None and not bias_grad:
        plain = key_keep is None and bias is None and softcap == 0 and scale > 0
        name, config, mask = _unmeasured(kernel, spec, q, k, v, q_offset, plain)
        band = [] if mask.band is None else mask.band.as_ints()
        fragments = gradient_fragments(mask, q.shape, v.shape, q.dtype, q.device, plain)
        dq, dk, dv, no_bias = torch.ops.stof.attention_backward(
            grad_out, grad_lse, q, k, v, *mask.tensors, key_keep, bias, scale, softcap, q_offset,
            band, *config[:2], False, out, lse, *mask.key_lists, multiplies_in_tf32(name, config),
            fragments,
        )  # fmt: skip
        return dq, dk, dv, no_bias
    from stof_compile.kernels import reference

    positions = _positions(q, q_offset, q_positions)
    dense = _dense_rows(spec, positions, q_len, k.shape[2], batch, heads)

    def keep_rows(first: int, last: int) -> Tensor:
        keep = dense(first, last)
        if q_positions is None:
            return keep
        newest = positions.amax(-1, keepdim=True)[:, None, :, None]
        return keep & (torch.arange(k.shape[2], device=q.device) <= newest)

    return reference.attention_backward_reference(
        grad_out, grad_lse, q, k, v, keep_rows, key_keep, bias, scale, softcap,
        strip=reference.strip_rows(q, k.shape[2], 1), bias_grad=bias_grad,
    )  # fmt: skip


@attention_rule_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, q, k, v = arguments[:5]
    return fake_gradients(q, k, v, arguments[8] if arguments[13] else None)


def _dense_mask(
    rule_tensors: Sequence[Tensor],
    rule: str,
    q_positions: Tensor,
    k_len: int,
    batch: int,
    heads: int,
) -> Tensor:
    """Evaluate a rule as bool [1 or batch, 1 or heads, Q, K] for attention left to PyTorch.

    Two operators do it: ``dense_mask``, and ``dense_mask_of_lengths`` for rules that depend on the
    lengths, which the host reads the first position for.

    Args:
        rule_tensors, rule: tensors and JSON of the rule.
        q_positions: int [Q] or [batch, Q], absolute position of each query.
        k_len: keys.
        batch, heads: sizes of the attention; a dimension on which the rule does not depend stays 1.
    """
    positions = q_positions if q_positions.dim() == 2 else q_positions[None]
    q_len = positions.shape[1]
    spec = _spec(rule, tuple(rule_tensors))
    return _dense_rows(spec, positions, q_len, k_len, batch, heads)(0, q_len).clone()


def _fake_dense_mask(
    rule_tensors: Sequence[Tensor],
    rule: str,
    q_positions: Tensor,
    k_len: int,
    batch: int,
    heads: int,
) -> Tensor:
    rows, columns = MaskSpec.from_json(rule, tuple(rule_tensors)).plane_shape()
    planes = q_positions.shape[0] if q_positions.dim() == 2 else 1
    shape = (
        max(planes, rows or batch),
        heads if columns is None else columns,
        q_positions.shape[-1],
        k_len,
    )
    return q_positions.new_empty(shape, dtype=torch.bool)


dense_mask = torch.library.custom_op("stof::dense_mask", _dense_mask, mutates_args=())
dense_mask_of_lengths = torch.library.custom_op(
    "stof::dense_mask_of_lengths", _dense_mask, mutates_args=(), tags=_OUTSIDE_GRAPHS
)
for _operator in (dense_mask, dense_mask_of_lengths):
    _operator.register_fake(_fake_dense_mask)


def _save_rule(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, rule_tensors, rule, key_keep, bias, q_positions = inputs[:8]
    kernel, return_lse = inputs[11:13]
    bias_grad = bias is not None and ctx.needs_input_grad[6]
    ours = return_lse and q.is_cuda and not bias_grad and q_positions is None
    ours = ours and kernel in ("auto", *_SPARSE)
    results = output if ours else (None, None)
    ctx.save_for_backward(q, k, v, key_keep, bias, q_positions, *results, *rule_tensors)
    ctx.rule, ctx.numbers, ctx.kernel, ctx.return_lse = rule, inputs[8:11], kernel, return_lse
    # else a log-sum-exp that nothing uses has a gradient of zeros, which would be read
    ctx.set_materialize_grads(False)


def _rule_gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, key_keep, bias, q_positions, out, lse, *rule_tensors = ctx.saved_tensors
    no_tensors = [None] * len(rule_tensors)
    grad_out, grad_lse = upstream(ctx, q, v, grad_out, grad_lse)
    if grad_out is None:
        return (None, None, None, no_tensors, *[None] * 9)
    bias_grad = bias is not None and ctx.needs_input_grad[6]
    dq, dk, dv, dbias = torch.ops.stof.attention_rule_backward(
        grad_out, grad_lse, q, k, v, rule_tensors, ctx.rule, key_keep, bias, q_positions,
        *ctx.numbers, bias_grad, ctx.kernel, out, lse,
    )  # fmt: skip
    return (dq, dk, dv, no_tensors, None, None, dbias if bias_grad else None, *[None] * 6)


def _spec(rule: str, tensors: tuple[Tensor, ...]) -> MaskSpec:
    """The rule as an object; without tensors the same one each time, with its key known."""
    return MaskSpec.from_json(rule, tensors) if tensors else _plain_spec(rule)


@lru_cache(maxsize=64)
def _plain_spec(rule: str) -> MaskSpec:
    return MaskSpec.from_json(rule)


def _positions(q: Tensor, q_offset: int, q_positions: Tensor | None) -> Tensor:
    """Absolute positions of the queries, int64 [1 or batch, Q]."""
    if q_positions is None:
        return torch.arange(q_offset, q_offset + q.shape[2], device=q.device)[None]
    return q_positions.long() if q_positions.dim() == 2 else q_positions.long()[None]


def _dense_rows(
    spec: MaskSpec, positions: Tensor, q_len: int, k_len: int, batch: int, heads: int
) -> Callable[[int, int], Tensor]:
    """A function (first, last) that evaluates the rule on query rows first..last-1."""
    device = positions.device
    rows, columns = spec.plane_shape()
    planes = max(positions.shape[0], batch if rows is None else rows)
    # a read from the device only where the rule itself counts from the lengths
    counts = spec.depends_on_lengths and positions.numel() > 0
    spec = spec.bind(q_len, k_len, max(0, int(positions.min())) if counts else 0, device)
    b = torch.arange(planes, device=device)[:, None, None, None]
    h = torch.arange(heads if columns is None else columns, device=device)[:, None, None]
    k_pos = torch.arange(k_len, device=device)

    def keep(first: int, last: int) -> Tensor:
        q_pos = positions[:, None, first:last, None]
        kept = spec.keep(b, h, q_pos, k_pos)
        return kept.expand(b.shape[0], h.shape[0], last - first, k_len)

    return keep


def _attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """SDPA under a dense mask, or the reference where SDPA has no such feature."""
    if softcap > 0 or return_lse:
        from stof_compile.kernels.reference import attention_reference

        out, lse = attention_reference(q, k, v, keep, key_keep, bias, scale, softcap, True)
        lse = lse.float() if return_lse else q.new_empty(0, dtype=torch.float32)
    else:
        from stof_compile.kernels.biased_sdpa import biased_sdpa

        mask = keep if key_keep is None else keep & key_keep[:, None, None, :]
        out = biased_sdpa(q, k, v, mask, bias, scale)
        lse = q.new_empty(0, dtype=torch.float32)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def _cpu_choice(
    kernel: str, dtype: torch.dtype, block_mask: BlockMask, softcap: float, return_lse: bool
) -> str:
    """CPU kernel: the one asked for, else the one the table prefers at this density."""
    if kernel in ("flex", "gather"):
        return kernel
    from stof_compile.kernels.attention_cpu import preferred_cpu_kernel

    tiles = max(1, block_mask.planes * block_mask.rows * block_mask.cols)
    return preferred_cpu_kernel(
        dtype, block_mask.col_idx.numel() / tiles, softcap=softcap, return_lse=return_lse
    )


def _unmeasured(
    kernel: str, spec: MaskSpec, q: Tensor, k: Tensor, v: Tensor, q_offset: int, plain: bool
) -> tuple[str, list[int], BlockMask]:
    """Operator, config and block mask of a call that nothing was measured for."""
    name, config = _device_choice(kernel, q, v.shape[3], plain)
    batch, heads, q_len, _ = q.shape
    tile = (config[0], config[1])
    mask = cached_block_mask(spec, q_len, k.shape[2], tile, q_offset, batch, heads, q.device)
    return name, config, mask


def _device_choice(kernel: str, q: Tensor, value_dim: int, plain: bool) -> tuple[str, list[int]]:
    """Operator (``attention_`` left out) and config for lengths that nothing was measured for."""
    if not q.is_cuda:
        from stof_compile import ops_cpu  # noqa: F401  # registers stof::attention_cpu
        from stof_compile.kernels.attention_cpu import default_block

        block = [32, 32] if kernel == "flex" else list(default_block(q.dtype))
        return "cpu", block
    if kernel == "fp8":
        return "fp8", list(first_gpu_config("block", q, value_dim, False, fp8=True))
    if kernel == "auto":
        kernel = "row" if q.shape[2] == 1 else "block"
    if kernel not in _SPARSE:
        raise StofUnsupportedError(
            f"attention={kernel!r} takes no mask rule on a GPU; use auto, {', '.join(_SPARSE)} or "
            "sdpa"
        )
    return kernel, list(first_gpu_config(kernel, q, value_dim, plain))


attention_rule.register_autograd(_rule_gradient, setup_context=_save_rule)
