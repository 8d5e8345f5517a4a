"""Block-wise attention called by hand on a GPU, without a gradient.

Its operator is defined in a library and not as a Triton operator, which would take as long to get
through as the launch; it is in no trace, so that the launch can be one that is known.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stof_compile.config_fields import hopper_programs
from stof_compile.ops_block import attend_on_hopper
from stof_compile.ops_fakes import fake_attention

_LIBRARY = torch.library.Library("stof", "FRAGMENT")
_LIBRARY.define(
    "attention_block_by_hand(Tensor q, Tensor k, Tensor v, Tensor plane_map, Tensor row_ptr, "
    "Tensor full_start, Tensor col_idx, Tensor bitmap_id, Tensor bitmap, Tensor row_order, "
    "Tensor? key_keep, Tensor? bias, float scale, float softcap, int q_offset, int[] band, "
    "int[] config, bool return_lse) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _attention_block_by_hand(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from stof_compile.kernels.blockwise_again import attention_block_again

    return attention_block_again(q, k, v, rest[:7], *rest[7:])


_LIBRARY.impl("attention_block_by_hand", _attention_block_by_hand, "CUDA")


@torch.library.register_fake("stof::attention_block_by_hand")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return fake_attention(q, v, rest[-1])


def attend_without_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    config: Sequence[int],
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend as ``attention_block`` does, by operators that have no gradient and are got through
    sooner: for calls by hand on a GPU.

    Args:
        mask: arrays of the block mask, with fragments in place of the bitmap for a config with
            ``hopper`` set, which takes no padding, bias or softcap.
    """
    if hopper_programs(config):
        how = (key_keep, bias, scale, softcap, config, return_lse)
        return attend_on_hopper(q, k, v, mask, *how)
    out, lse = torch.ops.stof.attention_block_by_hand(
        q, k, v, *mask, key_keep, bias, scale, softcap, q_offset, band, config, return_lse
    )
    return out, lse
