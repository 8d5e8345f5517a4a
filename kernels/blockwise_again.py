"""Block-wise attention that has run is run again without its checks: for calls by hand.

In compiled code Inductor launches the kernel itself.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .attention_blockwise import attention_block_forward
from .bound_launch import Repeat, layout
from .memo import remember
from .problem import AttentionProblem, TileMask, empty_result

_known: dict[tuple[Any, ...], Repeat] = {}  # by all that was checked: layouts, numbers, device


def attention_block_again(
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
    """Do what ``attention_block_forward`` does, of the same arguments; not for traces."""
    tensors = (q, k, v, *mask, key_keep, bias)
    numbers = (scale, softcap, q_offset, *band)
    asked = (*map(layout, tensors), len(band), *numbers, *config, return_lse)
    repeat = _known.get(asked)
    if repeat is None or not repeat.here:
        from torch._library.triton import set_wrap_triton_enabled

        with set_wrap_triton_enabled(False):  # no trace meets these launches
            return attention_block_forward(
                q, k, v, mask, key_keep, bias, scale, softcap, q_offset, band, config, return_lse,
                launched=partial(_remember, asked, (q, k, v, key_keep, bias)),
            )  # fmt: skip
    arrays = TileMask(*mask)
    out, lse = empty_result(q, v.shape[3], return_lse)
    nothing = arrays.row_ptr  # in the place of what there is none of
    repeat(
        q, k, v, nothing, nothing, nothing, out, lse,
        arrays.plane_map, arrays.row_ptr, arrays.full_start, arrays.col_idx, arrays.bitmap_id,
        arrays.bitmap, arrays.row_order,
        nothing if key_keep is None else key_keep, nothing if bias is None else bias,
        nothing, nothing,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _remember(
    asked: tuple[Any, ...],
    given: tuple[Tensor | None, ...],
    repeat: Repeat,
    problem: AttentionProblem,
) -> None:
    taken = (problem.q, problem.k, problem.v, problem.key_keep, problem.bias)
    addresses = [[0 if t is None else t.data_ptr() for t in held] for held in (given, taken)]
    if addresses[0] == addresses[1]:  # no copies
        remember(_known, asked, repeat)
