"""The operators of attention on e4m3 operands: rounding them, and attending under a block mask.

Both are transparent to torch.compile: the rounding is plain tensor operations, which Inductor
joins with what made its operand, the attention a Triton kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stof_compile.config_fields import hopper_programs
from stof_compile.launchers import load_launcher
from stof_compile.ops_fakes import fake_attention

_ATTENTION = "stof::attention_fp8"


@torch.library.triton_op("stof::fp8_heads", mutates_args=())
def fp8_heads(x: Tensor, keys_last: bool) -> tuple[Tensor, Tensor]:
    """Round q, k or (with ``keys_last``) v to e4m3; see ``round_heads`` in kernels/."""
    from stof_compile.kernels.rounding import round_heads

    return round_heads(x, keys_last)


@torch.library.triton_op(_ATTENTION, mutates_args=())
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
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
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Attend with the block-wise kernel to what ``fp8_heads`` made, without gradients.

    See ``attention_fp8_forward`` in kernels/; ``dtype`` is that of the result.
    """
    if hopper_programs(config):
        raise ValueError("the Hopper kernel takes no e4m3 operands; set hopper to 0 in the config")
    mask = (plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, row_order)
    out, lse = load_launcher(_ATTENTION, "attention_fp8", "attention_fp8_forward")(
        q, k, v, (q_scale, k_scale, v_scale), dtype, mask, key_keep, bias, scale, softcap, q_offset,
        band, config, return_lse,
    )  # fmt: skip
    return out, lse


@attention_fp8.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        load_launcher(_ATTENTION, "attention_fp8", "attention_fp8_forward")
    from stof_compile.kernels.rounding import ONES

    return_lse, dtype = rest[-2:]
    return fake_attention(q, v.transpose(2, 3).narrow(3, 0, v.shape[2] - ONES), return_lse, dtype)


def refusal_on(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """Why a device cannot attend to e4m3 operands, empty where it can.

    Args:
        dtype: of q, k and v before they are rounded. head_dim, value_dim: of q and k, and of v.
    """
    from stof_compile.kernels.rounding import fp8_refusal

    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    reason = fp8_refusal(head_dim, value_dim, dtype, capability) or ""
    return reason if on_gpu or not reason else f"{reason}, and the device is {device.type!r}"


def round_operands(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Values and scale of each operand, from tensors or ``torch.fx.Proxy``."""
    round_heads = torch.ops.stof.fp8_heads.default
    return round_heads(q, False), round_heads(k, False), round_heads(v, True)


def attend_rounded(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """``attention_fp8`` of what ``round_operands`` gave; ``rest`` is what follows the scales."""
    operands = (q[0], k[0], v[0], q[1], k[1], v[1])
    return torch.ops.stof.attention_fp8.default(*operands, *rest)
