"""Calls of attention kernels: one plain function per kernel, used for timing (tensors) and
rewriting (fx proxies)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import stof_compile.ops_block  # noqa: F401  # registers SPARSE_OPERATORS
from stof_compile.attention.problem import AttentionProblem
from stof_compile.config_fields import has_shifted_tiles, hopper_programs, with_heavy_rows
from stof_compile.errors import StofUnsupportedError
from stof_compile.masks.block_mask import BlockMask
from stof_compile.masks.dense_tensor import dense_bytes
from stof_compile.masks.hopper_arrays import kinds_refusal
from stof_compile.masks.shifted_tiles import SHIFTED_SHARE
from stof_compile.ops_fp8 import attend_rounded, round_operands
from stof_compile.ops_hopper_attention import gradient_fragments

MASK_FIELDS = ("plane_map", "row_ptr", "full_start", "col_idx", "bitmap_id", "bitmap", "row_order")

SPARSE_OPERATORS = {
    "block": torch.ops.stof.attention_block.default,
    "row": torch.ops.stof.attention_row.default,
    "gather": torch.ops.stof.attention_gather.default,
}
"""Of the kernels for CUDA that walk a block mask."""

CUDNN = (1,)  # config of kernel "sdpa": the cuDNN kernel; () is whatever SDPA itself takes
DENSE_MASK_LIMIT = 2**31  # bytes; a larger bool mask is refused rather than built

Attend = Callable[[Any, Any, Any, Any, Any, dict[str, Any]], Any]


def _as_given(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    return q, k, v


@dataclass(frozen=True)
class KernelCall:
    """A kernel bound to a problem; all of it accepts tensors or ``torch.fx.Proxy``.

    Args:
        buffers: tensors the call reads beside its inputs, by a name that is equal for equal
            contents.
        attend: ``attend(q, k, v, key_keep, bias, buffers) -> out [B, Hq, Q, Dv]``, of operands that
            were prepared.
        prepare: ``prepare(q, k, v)`` gives the kernel's operands; what a compiler joins with the
            operations before, and so is no part of a candidate's time.
        heads_first: the same as ``attend``, but the result lies in memory as [B, Hq, Q, Dv] and not
            as [B, Q, Hq, Dv]; None where the kernel can't.
    """

    buffers: dict[str, torch.Tensor]
    attend: Attend
    prepare: Callable[[Any, Any, Any], tuple[Any, Any, Any]] = _as_given
    heads_first: Attend | None = None

    def run(self, q: Any, k: Any, v: Any, key_keep: Any, bias: Any, buffers: dict[str, Any]) -> Any:
        """Prepare the operands and attend."""
        return self.attend(*self.prepare(q, k, v), key_keep, bias, buffers)


def bind_kernel(problem: AttentionProblem, kernel: str, config: tuple[int, ...]) -> KernelCall:
    """Bind a kernel and its config to a problem.

    Raises:
        StofUnsupportedError: unknown kernel name for this device, or one without an e4m3 form
            for a problem in fp8.
    """
    if problem.fp8 and (kernel != "block" or hopper_programs(config)):
        raise StofUnsupportedError(f"attention kernel {kernel!r} {list(config)} has no e4m3 form")
    if kernel == "sdpa":
        return _bind_cudnn(problem) if config == CUDNN else _bind_sdpa(problem)
    if kernel in ("block", "row") or (kernel == "gather" and problem.device.type == "cuda"):
        return _bind_sparse(problem, kernel, config)
    if kernel in ("flex", "gather"):
        return _bind_cpu(problem, kernel, config)
    raise StofUnsupportedError(f"no attention kernel is called {kernel!r}")


def honest_config(block_mask: BlockMask, config: tuple[int, ...], planes: int) -> tuple[int, ...]:
    """Return a block-wise config that fits the mask: its loop form promises nothing the mask does
    not keep, and the heavy rows and the pieces they are cut into are this mask's.

    Args:
        planes: batch times heads.
    """
    from stof_compile.kernels.attention_blockwise import BlockConfig, honest_loops

    whole = BlockConfig(*config)  # older choices have fewer fields
    how = BlockConfig(*with_heavy_rows(whole, block_mask, planes))
    if how.hopper:
        return tuple(how._replace(loops=3))
    # the facts are made from the mask when first asked for: only those that matter
    loops = honest_loops(
        how.loops,
        has_part=how.loops != 2 or block_mask.has_part,
        has_full=how.loops != 1 or block_mask.has_full,
        is_band=how.loops < 6 or (how.pieces == 1 and block_mask.is_band),
    )
    return tuple(how._replace(loops=loops))


def with_shifted_tiles(
    block_mask: BlockMask, config: tuple[int, ...], head_dim: int
) -> tuple[int, ...]:
    """A block-wise config with shifted tiles where these save enough; for calls without
    gradients. As it is while a CUDA stream is capturing and these tiles are not there yet."""
    from stof_compile.kernels.attention_blockwise import BlockConfig
    from stof_compile.kernels.hopper_forms import SHIFTED_DIMS

    if not hopper_programs(config) or head_dim > SHIFTED_DIMS:
        return config
    made = "shifted_tensors" in vars(block_mask)
    if not made and block_mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return config
    if block_mask.shifted_share > SHIFTED_SHARE:
        return config
    return tuple(BlockConfig(*config)._replace(shifted=1))


def mask_arrays(block_mask: BlockMask, config: Sequence[int]) -> dict[str, torch.Tensor]:
    """The arrays an attention operator takes with a config, by name: the Hopper kernel reads the
    mask's fragments in place of its bitmap, those of shifted tiles where it is told to."""
    tensors = block_mask.hopper_tensors if hopper_programs(config) else block_mask.tensors
    if has_shifted_tiles(config):
        tensors = block_mask.shifted_tensors
    return dict(zip(MASK_FIELDS, tensors, strict=True))


def _stem(block_mask: BlockMask) -> str:
    """How the names of a mask's buffers begin."""
    return f"mask_{block_mask.key[:12]}_{block_mask.block_q}x{block_mask.block_k}"


def _mask_buffers(block_mask: BlockMask, config: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    stem = _stem(block_mask)
    if hopper_programs(config):
        stem += "_shifted" if has_shifted_tiles(config) else "_fragments"
    return {f"{stem}_{name}": array for name, array in mask_arrays(block_mask, config).items()}


def gradient_arrays(
    block_mask: BlockMask, kernel: str, config: Sequence[int], fragments: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """What an attention operator keeps of a mask for gradients from kernels, by name and in its
    order: the tile lists by column, the bitmap where it reads fragments and no rule says what is
    kept, or what the Hopper kernels of the gradient read.

    Args:
        fragments: ``ops_hopper_attention.gradient_fragments``.
    """
    names = ("key_ptr", "key_tiles")
    arrays: dict[str, torch.Tensor | None] = dict(zip(names, block_mask.key_lists, strict=True))
    if kernel != "block":
        return arrays
    if fragments is not None:
        return arrays | {"bitmap": None, "gradient_fragments": fragments}
    if hopper_programs(config) and block_mask.band is None:
        arrays["bitmap"] = block_mask.bitmap
    return arrays


def _pack_buffers(block_mask: BlockMask) -> dict[str, torch.Tensor]:
    """The packed columns, by name, for a call that gathers them."""
    stem = _stem(block_mask)
    return {f"{stem}_{name}": part for name, part in block_mask.packed._asdict().items()}


def _band(block_mask: BlockMask) -> list[int]:
    rule = block_mask.band
    return [] if rule is None else [rule.lo, rule.hi, rule.global_q, rule.global_k, rule.cap]


def _bind_sparse(problem: AttentionProblem, kernel: str, config: tuple[int, ...]) -> KernelCall:
    op = SPARSE_OPERATORS[kernel]
    if kernel == "block" and hopper_programs(config):
        _refuse_hopper(problem, config)
    block_mask = problem.block_mask((config[0], config[1]))
    if kernel == "block":
        # a choice from the store or a plan was made for a mask of equal statistics, not this one
        config = honest_config(block_mask, config, problem.batch * problem.heads)
    buffers = _mask_buffers(block_mask, config if kernel == "block" else ())
    names, band = tuple(buffers), _band(block_mask)
    # the reference formula gives the gradient of a bias and needs neither lists nor log-sum-exp
    kernels_backward = problem.training and not problem.bias_grad
    kept = {}
    if kernels_backward:
        facts = problem.q.shape, problem.v.shape, problem.q.dtype, problem.device, problem.plain
        fragments = gradient_fragments(block_mask, *facts)
        kept = gradient_arrays(block_mask, kernel, config, fragments)
    lists = {f"{_stem(block_mask)}_{name}": array for name, array in kept.items()}
    packed = _pack_buffers(block_mask) if kernel == "gather" else {}
    buffers |= {name: array for name, array in lists.items() if array is not None} | packed
    no_lists = (None, None) if packed and not lists else ()

    def run_rounded(q: Any, k: Any, v: Any, key_keep: Any, bias: Any, held: dict[str, Any]) -> Any:
        mask = [held[name] for name in names]
        numbers = (problem.scale, problem.softcap, problem.q_offset, band, list(config))
        rest = (*mask, key_keep, bias, *numbers, False, problem.q.dtype)
        return attend_rounded(q, k, v, *rest)[0]

    if problem.fp8:
        return KernelCall(buffers, run_rounded, round_operands)

    def run(q: Any, k: Any, v: Any, key_keep: Any, bias: Any, held: dict[str, Any]) -> Any:
        mask = [held[name] for name in names]
        return op(
            q,
            k,
            v,
            *mask,
            key_keep,
            bias,
            problem.scale,
            problem.softcap,
            problem.q_offset,
            band,
            list(config),
            kernels_backward,
            *no_lists,
            *(None if array is None else held[name] for name, array in (lists | packed).items()),
        )[0]

    def run_heads_first(
        q: Any, k: Any, v: Any, key_keep: Any, bias: Any, held: dict[str, Any]
    ) -> Any:
        q, k, v = (t.flatten(0, 1).unsqueeze(1) for t in (q, k, v))
        out = run(q, k, v, key_keep, bias, held)
        return out.squeeze(1).unflatten(0, (-1, problem.heads))

    as_batches = kernel != "row" and block_mask.planes == 1 and _heads_can_be_batches(problem)
    return KernelCall(buffers, run, heads_first=run_heads_first if as_batches else None)


def _heads_can_be_batches(problem: AttentionProblem) -> bool:
    """Whether a kernel may take each head for a batch entry of its own, without a copy."""
    operands = problem.q, problem.k, problem.v
    alike = len({t.shape[1] for t in operands}) == 1
    views = all(t.shape[0] == 1 or t.stride[0] == t.shape[1] * t.stride[1] for t in operands)
    return alike and views and not problem.padding and problem.bias is None


def _refuse_hopper(problem: AttentionProblem, config: Sequence[int]) -> None:
    """Check a choice that may have been made elsewhere.

    Raises:
        StofUnsupportedError: the Hopper kernel cannot run this problem here, or has no such form.
    """
    from stof_compile.kernels.attention_blockwise import BlockConfig
    from stof_compile.kernels.attention_hopper import hopper_refusal
    from stof_compile.kernels.hopper_forms import form_refusal

    on_gpu = problem.device.type == "cuda"
    refusal = hopper_refusal(
        problem.head_dim,
        problem.v.shape[3],
        problem.q.dtype,
        torch.cuda.get_device_capability(problem.device) if on_gpu else (0, 0),
        problem.batch * problem.heads * -(-problem.q_len // 64),
        plain=problem.plain,
    )
    how = BlockConfig(*config)
    tile = how.block_q, how.block_k
    shifted = has_shifted_tiles(config)
    numbers = how.hopper, how.num_stages, problem.head_dim
    refusal = refusal or form_refusal(tile, *numbers, shifted=shifted)
    if refusal is None and shifted and problem.training:
        refusal = "shifted tiles are for calls without gradients"
    if refusal is None and how.block_q > 64:
        refusal = "rows that share keys are for calls without gradients"
        if not problem.training:
            refusal = kinds_refusal(problem.block_mask(tile).bitmap.shape[0])
    if refusal is not None:
        raise StofUnsupportedError(f"the Hopper attention kernel cannot run here: {refusal}")


def _bind_cpu(problem: AttentionProblem, kernel: str, config: tuple[int, ...]) -> KernelCall:
    op = torch.ops.stof.attention_cpu.default
    block_mask = problem.block_mask((config[0], config[1]))
    buffers = _mask_buffers(block_mask)
    names, band = tuple(buffers), _band(block_mask)

    def run(q: Any, k: Any, v: Any, key_keep: Any, bias: Any, held: dict[str, Any]) -> Any:
        mask = [held[name] for name in names]
        return op(
            q,
            k,
            v,
            *mask,
            key_keep,
            bias,
            problem.scale,
            problem.softcap,
            problem.q_offset,
            band,
            list(config),
            False,
            kernel,
        )[0]

    return KernelCall(buffers, run)


def _bind_cudnn(problem: AttentionProblem) -> KernelCall:
    """SDPA's cuDNN kernel by name: SDPA itself takes the first backend of its own order."""

    def run(q: Any, k: Any, v: Any, key_keep: Any, bias: Any, held: dict[str, Any]) -> Any:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        causal = problem.spec is not None
        return op(q, k, v, None, False, 0.0, causal, False, scale=problem.scale)[0]

    return KernelCall({}, run)


def _bind_sdpa(problem: AttentionProblem) -> KernelCall:
    from stof_compile.kernels.biased_sdpa import bias_dtype, operand_dtype

    if problem.softcap > 0:
        raise StofUnsupportedError("SDPA has no softcap")
    gqa = problem.k.shape[1] != problem.heads
    causal = problem.causal_only and not problem.padding and problem.bias is None
    causal = causal and problem.scale > 0  # torch's CPU kernel scales the scores it has masked
    buffers: dict[str, torch.Tensor] = {}
    name = ""
    if problem.spec is not None and not causal:
        block_mask = problem.block_mask((64, 64))
        size = dense_bytes(block_mask)
        if size > DENSE_MASK_LIMIT:
            raise StofUnsupportedError(
                f"the dense mask SDPA needs would take {size / 2**30:.1f} GiB"
            )
        name = f"mask_{block_mask.key[:12]}_dense"
        buffers[name] = block_mask.to_dense()
    dtype = problem.q.dtype
    added = dtype if problem.bias is None else bias_dtype(dtype, problem.bias.dtype)
    computed = operand_dtype(dtype, added, problem.device.type)
    by_name = added != dtype and _fused_on_cpu(problem)
    bias_dims = 0 if problem.bias is None else len(problem.bias.shape)

    def run(q: Any, k: Any, v: Any, key_keep: Any, bias: Any, held: dict[str, Any]) -> Any:
        mask = held[name] if name else None
        if key_keep is not None:
            padding = key_keep.unsqueeze(1).unsqueeze(1)
            mask = padding if mask is None else mask & padding
        if bias is not None:
            mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
            mask = mask.to(added)
        if by_name:
            assert mask is not None, "it has the bias in it"
            op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            for _ in range(0 if name or key_keep is not None else 4 - bias_dims):
                mask = mask.unsqueeze(0)
            return op(q, k, v, 0.0, False, attn_mask=mask, scale=problem.scale)[0]
        if computed != dtype:
            q, k, v = q.to(computed), k.to(computed), v.to(computed)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=causal,
            scale=problem.scale,
            enable_gqa=gqa,
        )
        return out if computed == dtype else out.to(dtype)

    return KernelCall(buffers, run)


def _fused_on_cpu(problem: AttentionProblem) -> bool:
    """Whether SDPA's fused CPU kernel takes a problem with a bias: called by name it is not met by
    autocast, which rounds the bias that SDPA is given."""
    q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
    return (
        problem.device.type == "cpu"
        and bias is not None
        and not problem.bias_grad
        and (q.shape[1], q.shape[3]) == (k.shape[1], v.shape[3])
        and all(meta.stride[3] == 1 and 0 not in meta.shape for meta in (q, k, v))
        and bias.shape[-1:] == (problem.k_len,)
    )
