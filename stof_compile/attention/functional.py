"""What users call: sparse attention as a function, and the context that forces a kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import stof_compile.ops
import stof_compile.ops_cpu  # noqa: F401 (both register operators)
from stof_compile import masks
from stof_compile.attention.call import (
    SPARSE_OPERATORS,
    gradient_arrays,
    honest_config,
    mask_arrays,
    with_shifted_tiles,
)
from stof_compile.attention.fp8 import attend_fp8, refuse_fp8
from stof_compile.attention.operands import (
    autocast_operands,
    check_numbers,
    check_operands,
    check_tensor_mask,
)
from stof_compile.attention.recorded import is_recorded, wants_kernel_gradients
from stof_compile.attention.suited_tiles import suited
from stof_compile.attention.trace_rule import exporting, trace_rule
from stof_compile.attention.unmeasured import (
    TRITON_MAX_HEAD_DIM,
    default_kernel,
    kernels_take,
    sdpa_takes_causal,
)
from stof_compile.config_fields import hopper_programs
from stof_compile.errors import StofMaskError, StofOptionError, StofUnsupportedError
from stof_compile.masks import BlockMask, MaskSpec, as_mask_spec, cached_block_mask
from stof_compile.masks.dense_tensor import dense_bytes, dense_mask
from stof_compile.ops_by_hand import attend_without_gradient
from stof_compile.ops_first_config import first_gpu_config
from stof_compile.ops_hopper_attention import gradient_fragments

KERNELS = ("row", "block", "gather", "flex", "sdpa")
KERNELS_OF = {"cpu": ("gather", "flex", "sdpa"), "cuda": ("block", "row", "gather", "sdpa")}

_CAUSAL = masks.causal().key
_DENSE = masks.dense().key

_OVERRIDE: ContextVar[str | None] = ContextVar("stof_attention_kernel", default=None)

MaskLike = MaskSpec | Tensor | Callable[..., Any] | None


@contextlib.contextmanager
def attention_kernel(kernel: str) -> Iterator[None]:
    """Force one kernel for attention that starts inside the context.

    Holds for `sparse_attention` called eagerly and for functions compiled with ``backend="stof"``,
    which read it at every call and keep one compiled variant per kernel. Nesting restores the outer
    choice; threads and tasks have their own.

    Args:
        kernel: "row", "block" (CUDA), "flex" (CPU), "gather" or "sdpa" (both).

    Raises:
        StofOptionError: no kernel has this name.
    """
    if kernel not in KERNELS:
        raise StofOptionError(
            f"no attention kernel is called {kernel!r}; valid: {', '.join(KERNELS)}"
        )
    token = _OVERRIDE.set(kernel)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


def current_override() -> str | None:
    """Return the kernel forced by the innermost `attention_kernel`, or None."""
    return _OVERRIDE.get()


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike = None,
    *,
    key_keep: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = 0.0,
    enable_gqa: bool = False,
    return_lse: bool = False,
    fp8: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to the keys a mask keeps: softmax(cap(scale * q k^T) + bias) v, differentiable.

    Works eagerly and inside ``torch.compile`` of any backend without a graph break;
    ``backend="stof"`` treats the call as an attention site. Eagerly the kernel is chosen by the
    dtype and the part of the mask's tiles that are touched: on CUDA block-wise for half types and
    fp32 (head dims above 128: up to 80 %; with gradients up to 90, 50 and 16 % by head dims up to
    64, up to 128 and above); on the CPU gather up to 60 % (half types: 45 %); else SDPA, and for
    most causal masks on CUDA where no gradient is wanted. `attention_kernel`
    overrides that. Behind a sparse kernel on CUDA the gradients of q, k and v come from sparse
    kernels; that of a bias, and any on the CPU, from a formula in strips of query rows.

    Args:
        q: [batch, heads, q_len, head_dim], any strides.
        k: [batch, kv_heads, k_len, head_dim]; kv_heads is heads, or a divisor of it with
            ``enable_gqa``.
        v: [batch, kv_heads, k_len, value_dim].
        mask: a rule of `stof_compile.masks`, a mask_mod(b, h, q_idx, kv_idx), a bool tensor
            [q_len, k_len], [batch, q_len, k_len] or [batch, heads, q_len, k_len] with True =
            attend, a FlexAttention BlockMask, or None. Positions of queries and keys count from 0,
            as in FlexAttention, also where q_len != k_len; ``causal(lower_right=True)`` aligns the
            ends instead.
        key_keep: bool [batch or 1, k_len], True where a key is real and not padding.
        bias: float, broadcastable to [batch, heads, q_len, k_len], added to the scores; -inf masks
            exactly.
        scale: factor of the dot products; None = head_dim ** -0.5.
        softcap: c > 0 replaces a scaled score x by c * tanh(x / c); 0 or None = no cap.
        enable_gqa: allow fewer key/value heads than query heads.
        return_lse: also return the log-sum-exp of the masked scores.
        fp8: round q, k and v to e4m3 (8 bits) with one scale for each batch row and head, and run
            the block-wise kernel whatever the mask: on NVIDIA GPUs of capability 8.9 and newer,
            fp16 and bf16, head dims up to 128, without gradients. Results differ by some percent.

    Returns:
        out [batch, heads, q_len, value_dim] in the dtype of q (under autocast: in autocast's, to
        which q, k and v are cast as for SDPA); 0 on rows that keep no key. With
        ``return_lse`` also lse, fp32 [batch, heads, q_len], -inf on such rows.

    Raises:
        StofError: q, k, v, key_keep or bias do not fit together, scale or softcap is no number.
        StofMaskError: the mask is no mask, or was made for other lengths, batch or heads.
        StofUnsupportedError: the forced kernel, or fp8, does not exist on this device or cannot do
            what is asked; an operand has a forward-mode derivative.
    """
    q, k, v = autocast_operands(q, k, v)
    check_operands(q, k, v, key_keep, bias, enable_gqa)
    check_numbers(scale, softcap)
    softcap = 0.0 if softcap is None else softcap
    if fp8:
        refuse_fp8(q, k, v, bias, None if torch.compiler.is_compiling() else current_override())
    if isinstance(mask, Tensor):
        check_tensor_mask(mask, q, k)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dense_only = softcap <= 0 and not return_lse and not fp8
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        if dense_only and (mask is None or isinstance(mask, Tensor)):
            if mask is not None and mask.dim() == 3:  # of each batch row, SDPA takes it for heads
                mask = mask[:, None]
            return _sdpa(q, k, v, mask, key_keep, bias, factor)
        tensors: list[Tensor] = []
        text = trace_rule(masks.dense() if mask is None else mask, tensors)
        if not tensors and exporting():
            tensors = [q.new_empty(0)]  # AOTInductor hands an empty list over as None
        # a compiled graph never waits for FlexAttention to compile: on the CPU it takes the gather
        # kernel
        kernel = "gather" if q.device.type == "cpu" else "fp8" if fp8 else "auto"
        kept = return_lse or wants_kernel_gradients(q, k, v, bias)
        out, lse = torch.ops.stof.attention_rule(
            q, k, v, tensors, text, key_keep, bias, None, factor, softcap, 0, kernel, kept
        )
    else:
        _refuse_tangents(q, k, v, bias)
        forced = current_override()
        spec = masks.dense() if mask is None else as_mask_spec(mask)
        if spec.key == _DENSE and dense_only and forced in (None, "sdpa"):
            return _sdpa(q, k, v, None, key_keep, bias, factor)
        if fp8:
            out, lse = attend_fp8(q, k, v, spec, key_keep, bias, factor, softcap, return_lse)
            return (out, lse) if return_lse else out
        out, lse = _attend(q, k, v, spec, key_keep, bias, factor, softcap, return_lse, forced)
    return (out, lse) if return_lse else out


# -- eager ----------------------------------------------------------------------------------------


def _refuse_tangents(*operands: Tensor | None) -> None:
    """See that no operand has a forward-mode derivative: PyTorch would drop it without a word."""
    if forward_ad._current_level < 0:  # no torch.func.jvp and no dual_level() is open
        return
    for operand in operands:
        if operand is not None and forward_ad.unpack_dual(operand).tangent is not None:
            raise StofUnsupportedError(
                "sparse_attention: forward-mode derivatives (torch.func.jvp, "
                "torch.autograd.forward_ad) are not supported, and an operand has one; take "
                "gradients instead, or scaled_dot_product_attention with the mask as a tensor"
            )


def _refuse_functional_gradients() -> None:
    """See that no torch.func transform wants a gradient of STOF's operators."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() == torch._C._functorch.TransformType.Grad for level in stack):
        raise StofUnsupportedError(
            "sparse_attention: torch.func.grad, vjp and jacrev cannot go through its operators; "
            "take torch.autograd.grad, or scaled_dot_product_attention with the mask as a tensor"
        )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: MaskSpec,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    return_lse: bool,
    forced: str | None,
) -> tuple[Tensor, Tensor]:
    """Choose a kernel, build the block mask (or find it) and run."""
    device = q.device.type
    valid = KERNELS_OF.get(device)
    if valid is None:
        raise StofUnsupportedError(
            f"sparse_attention has no kernel for device {device!r}; valid: cpu, cuda"
        )
    if forced is not None and forced not in valid:
        raise StofUnsupportedError(
            f"attention_kernel({forced!r}) does not exist on {device}; "
            f"valid there: {', '.join(valid)}"
        )
    if forced == "sdpa" and softcap > 0:
        raise StofUnsupportedError(
            "attention_kernel('sdpa'): SDPA has no softcap; take another kernel"
        )
    if forced == "flex":
        _refuse_flex(q, k, v, bias, return_lse)
    plain = key_keep is None and bias is None and softcap == 0 and scale > 0
    by_kernels = wants_kernel_gradients(q, k, v, bias)
    is_causal = device == "cuda" and plain and not return_lse and spec.key == _CAUSAL
    if is_causal and forced in (None, "sdpa"):
        served = kernels_take(q.dtype, max(q.shape[3], v.shape[3]))
        if forced or not served or (not by_kernels and _sdpa_is_causal(q, k, v)):
            return _sdpa(q, k, v, None, None, None, scale, is_causal=True), q.new_empty(0)
    config = _first_config(q, v, forced, plain)
    try:
        block_mask = _block_mask(spec, q, k, (config[0], config[1]))
    except StofMaskError:  # while a CUDA stream is capturing; SDPA needs none
        if not is_causal or forced or by_kernels or not _sdpa_is_causal(q, k, v, False):
            raise
        return _sdpa(q, k, v, None, None, None, scale, is_causal=True), q.new_empty(0)
    kernel = forced
    if kernel is None:
        touched = block_mask.col_idx.numel() / max(
            1, block_mask.planes * block_mask.rows * block_mask.cols
        )
        kernel = default_kernel(
            device,
            touched,
            q.shape[2],
            dtype=q.dtype,
            head_dim=max(q.shape[3], v.shape[3]),
            softcap=softcap,
            return_lse=return_lse,
            grouped=q.shape[1] != k.shape[1],
            dense_bytes=dense_bytes(block_mask),
            training=by_kernels,
        )
    if kernel == "sdpa" and device == "cuda":
        if return_lse or softcap > 0:
            raise StofUnsupportedError(_no_sdpa(q, v, forced))
        if is_causal:
            return _sdpa(q, k, v, None, None, None, scale, is_causal=True), q.new_empty(0)
        return _sdpa(q, k, v, dense_mask(block_mask), key_keep, bias, scale), q.new_empty(0)
    _refuse_functional_gradients()
    by_hand = kernel == "block" and not is_recorded(q, k, v, bias)
    if kernel == "block":
        planes = q.shape[0] * q.shape[1]
        if by_hand and return_lse:
            config = with_shifted_tiles(block_mask, config, q.shape[3])
        elif by_hand:
            other = partial(_block_mask, spec, q, k)
            block_mask, config = suited(block_mask, config, q.shape[3], planes, other)
        config = honest_config(block_mask, config, planes)
    arrays = [*mask_arrays(block_mask, config if kernel == "block" else ()).values()]
    band = [] if block_mask.band is None else block_mask.band.as_ints()
    if by_hand:
        rest = (band, list(config), return_lse)
        return attend_without_gradient(q, k, v, arrays, key_keep, bias, scale, softcap, 0, *rest)
    on_gpu = device == "cuda"
    attend = SPARSE_OPERATORS[kernel] if on_gpu else torch.ops.stof.attention_cpu
    more: list[Any] = [] if on_gpu else [kernel]
    if by_kernels:
        fragments = gradient_fragments(block_mask, q.shape, v.shape, q.dtype, q.device, plain)
        more = [*gradient_arrays(block_mask, kernel, config, fragments).values()]
    elif on_gpu and kernel == "gather":
        more = [None, None]
    if on_gpu and kernel == "gather":
        more += block_mask.packed
    out, lse = attend(
        q,
        k,
        v,
        *arrays,
        key_keep,
        bias,
        scale,
        softcap,
        0,
        band,
        list(config),
        return_lse or by_kernels,
        *more,
    )
    return out, lse


def _sdpa_is_causal(q: Tensor, k: Tensor, v: Tensor, or_hopper: bool = True) -> bool:
    """Whether SDPA's kernels for causal masks are taken, unless Hopper kernels are faster."""
    return sdpa_takes_causal(
        q.shape,
        k.shape,
        v.shape[3],
        q.dtype,
        unit_strides=all(t.stride(3) == 1 for t in (q, k, v)),
        on_hopper=or_hopper and hopper_programs(_first_config(q, v, None, True)) > 0,
    )


def _no_sdpa(q: Tensor, v: Tensor, forced: str | None) -> str:
    """Why a call with a log-sum-exp or a softcap has no kernel on CUDA."""
    if forced is not None:
        return "attention_kernel('sdpa'): SDPA returns no log-sum-exp on CUDA"
    return (
        f"sparse_attention: no sparse kernel on CUDA takes {q.dtype} and head dims of {q.shape[3]} "
        f"and {v.shape[3]} (fp16, bf16 or fp32, at most {TRITON_MAX_HEAD_DIM}), and SDPA, which "
        "does, has no log-sum-exp and no softcap; leave those out, or convert"
    )


def _block_mask(spec: MaskSpec, q: Tensor, k: Tensor, tile: tuple[int, int]) -> BlockMask:
    return cached_block_mask(
        spec, q.shape[2], k.shape[2], tile, batch=q.shape[0], heads=q.shape[1], device=q.device
    )


def _first_config(q: Tensor, v: Tensor, forced: str | None, plain: bool) -> tuple[int, ...]:
    """Config of the sparse kernel that is forced or likely; it begins with the tile edges."""
    if q.device.type == "cpu":
        from stof_compile.kernels.attention_cpu import default_block

        return (32, 32) if forced == "flex" else default_block(q.dtype)
    if forced == "sdpa" or not (forced or kernels_take(q.dtype, max(q.shape[3], v.shape[3]))):
        return (64, 64)
    kernel = forced or ("row" if q.shape[2] == 1 else "block")
    return first_gpu_config(kernel, q, v.shape[3], plain)


def _refuse_flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, return_lse: bool) -> None:
    from stof_compile.kernels.attention_cpu_flex import flex_refusal

    reason = flex_refusal(
        q.dtype,
        q.shape[2],
        k.shape[2],
        q.shape[3],
        v.shape[3],
        (32, 32),
        bias is not None,
        return_lse,
    )
    if reason is not None:
        raise StofUnsupportedError(f"attention_kernel('flex'): {reason}; take 'gather'")


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> Tensor:
    """SDPA with everything that restricts the keys joined into its one mask."""
    from stof_compile.kernels.biased_sdpa import biased_sdpa

    if key_keep is not None:
        padding = key_keep[:, None, None, :]
        mask = padding if mask is None else mask & padding
    if is_causal:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    return biased_sdpa(q, k, v, mask, bias, scale)
