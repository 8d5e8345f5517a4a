"""The operator of the Hopper kernel of block-wise attention, and what its gradients need.

Opaque to torch.compile: its TMA descriptors are made at the call. Defined in a library and not as a
custom operator, which would take as long to get through as the launch. It has no gradient;
``attention_block``, which calls it, has one. An eager call that wants none calls it too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stof_compile.masks.block_mask import BlockMask
from stof_compile.ops_fakes import fake_attention

_RETURN_LSE = 12  # among the arguments behind v

# Code that torch keeps on disk calls this: the schema grows at its end only, with defaults.
_LIBRARY = torch.library.Library("stof", "FRAGMENT")
_LIBRARY.define(
    "attention_hopper(Tensor q, Tensor k, Tensor v, Tensor plane_map, Tensor row_ptr, "
    "Tensor full_start, Tensor col_idx, Tensor bitmap_id, Tensor fragments, Tensor row_order, "
    "float scale, int programs, int stages, int heavy_rows, int pieces, bool return_lse, "
    "bool uneven=False, bool shifted=False) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plane_map: Tensor,
    row_ptr: Tensor,
    full_start: Tensor,
    col_idx: Tensor,
    bitmap_id: Tensor,
    fragments: Tensor,
    row_order: Tensor,
    scale: float,
    programs: int,
    stages: int,
    heavy_rows: int,
    pieces: int,
    return_lse: bool,
    uneven: bool = False,
    shifted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend with the Hopper kernel; see ``attention_hopper_forward`` in kernels/."""
    from stof_compile.kernels.attention_hopper import attention_hopper_forward

    mask = (plane_map, row_ptr, full_start, col_idx, bitmap_id, fragments, row_order)
    return attention_hopper_forward(
        q, k, v, mask, scale, programs, stages, heavy_rows, pieces, uneven, return_lse, shifted
    )


_LIBRARY.impl("attention_hopper", _attention_hopper, "CUDA")


@torch.library.register_fake("stof::attention_hopper")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return fake_attention(q, v, rest[_RETURN_LSE])


def gradient_fragments(
    mask: BlockMask,
    q_shape: Sequence[int],
    v_shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    plain: bool,
) -> Tensor | None:
    """What the Hopper kernels of the gradient read of a mask; None where they cannot run.

    Args:
        q_shape: [batch, heads, q_len, head_dim]. v_shape: [batch, kv_heads, k_len, value_dim].
        dtype: of q, k and v. device: where they are.
        plain: no padding, no bias, no softcap and a positive scale.
    """
    if device.type != "cuda":
        return None
    from stof_compile.kernels.attention_hopper_backward import hopper_gradient_refusal

    batch, heads, _, head_dim = q_shape
    refusal = hopper_gradient_refusal(
        head_dim,
        v_shape[3],
        dtype,
        torch.cuda.get_device_capability(device),
        batch * heads * max(mask.rows, mask.cols),
        plain=plain,
        tile=(mask.block_q, mask.block_k),
        grouped_planes=v_shape[1] != heads and mask.planes > 1,
    )
    return mask.gradient_fragments if refusal is None else None
