"""FlexAttention on the CPU over the tile lists of a block mask.

The compiled callable is made once per form (which pieces of the mask exist, dtype, layout) and
shared by all layers and lengths, but for the first length, which has one of its own, that can be
begun ahead of the first call; Inductor's disk cache keeps them between processes.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from stof_compile.kernels.attention_cpu_flex_graph import (
    FlexOperands,
    can_be_written,
    capped,
    compiled_flex,
    in_band,
    in_bitmap,
    only_kept,
)
from stof_compile.kernels.build_later import can_build_later, kernels_built_later
from torch import Tensor
from torch._inductor.exc import InductorError

# Entries of the tile table (tile rows x tile columns) that a mask may have: int32, twice.
TABLE_LIMIT = 1 << 22
# Attempts to compile a form for all sizes that may fail; each takes seconds.
MOST_FAILURES = 3
# Compiled codes for one size that a form holds; an older one comes back from Inductor's disk cache.
MOST_SIZES = 64


class FlexCall(NamedTuple):
    """What the operator takes; as in ``attention_cpu.attention_cpu_forward``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Sequence[Tensor]
    key_keep: Tensor | None
    scale: float
    softcap: float
    q_offset: int
    band: Sequence[int]
    block: tuple[int, int]


class Form(NamedTuple):
    """What one compiled callable is made for."""

    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    token_major: bool
    band: bool
    padded: bool
    capped: bool
    scale: float
    planes: tuple[int, int]


def flex_refusal(
    dtype: torch.dtype,
    q_len: int,
    k_len: int,
    head_dim: int,
    value_dim: int,
    block: tuple[int, int],
    has_bias: bool,
    return_lse: bool,
) -> str | None:
    """Return why FlexAttention can't run a problem on the CPU, or None."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"FlexAttention on the CPU has no kernel for {dtype}"
    if return_lse:
        return "FlexAttention on the CPU returns no log-sum-exp"
    if has_bias:
        return "a bias would be read element by element"
    if head_dim != value_dim:
        return f"head dims differ ({head_dim} and {value_dim})"
    table = -(-q_len // block[0]) * -(-k_len // block[1])
    if table > TABLE_LIMIT:
        return f"its table of {table} tiles would not be small"
    return None


def flex_forward(call: FlexCall) -> Tensor:
    """Run FlexAttention.

    Returns:
        out [batch, heads, q_len, head_dim] in the layout FlexAttention chooses.
    """
    form, operands = _told(call)
    # FlexAttention would round the operands as an autocast region around the caller says
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _compiled(form)(operands)


def flex_ahead(call: FlexCall) -> None:
    """Begin to compile what :func:`flex_forward` will run with such a call.

    Nothing runs, and g++ is not waited for. Where that is of no use nothing is compiled.

    Args:
        call: the values of q, k, v and key_keep are not read.
    """
    if can_be_written() and can_build_later():
        form, operands = _told(call)
        with torch.autocast("cpu", enabled=False):  # as in flex_forward
            _compiled(form).begin(operands)


def _told(call: FlexCall) -> tuple[Form, FlexOperands]:
    """What FlexAttention reads, from what the operator takes."""
    q, k, v, mask, key_keep, scale, softcap, q_offset, band, block = call
    plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, _ = mask
    rows, cols = -(-q.shape[2] // block[0]), -(-k.shape[2] // block[1])
    arrays = [t.numpy().tobytes() for t in (row_ptr, full_start, col_idx, bitmap_id)]
    tables = _tables(*arrays, rows, cols)
    octets = bitmap.view(torch.uint8).reshape(-1, block[1] // 8, block[0]).int()
    if octets.shape[0] == 0:
        octets = octets.new_zeros(1, block[1] // 8, block[0])
    operands = FlexOperands(
        q=q.detach(),
        k=k.detach(),
        v=v.detach(),
        lists=[t[plane_map.long()] for t in tables[:4]],
        numbers=torch.tensor([*(band or (0, 0, 0, 0, 0)), q_offset], device="cpu"),
        tile_id=tables[4],
        planes=plane_map.expand(q.shape[0], q.shape[1]).contiguous(),
        octets=octets,
        kept=None if key_keep is None else key_keep.expand(q.shape[0], -1).contiguous(),
        softcap=torch.tensor(softcap, device="cpu") if softcap > 0 else None,
        scale=repr(scale),
        block=block,
        banded=bool(band),
    )
    form = Form(
        dtype=q.dtype,
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        token_major=q.stride(1) < q.stride(2),
        band=operands.banded,
        padded=operands.kept is not None,
        capped=softcap > 0,
        scale=scale,
        planes=(plane_map.shape[0], plane_map.shape[1]),
    )
    return form, operands


def _flex_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: list[Tensor],
    numbers: Tensor,
    tile_id: Tensor,
    planes: Tensor,
    octets: Tensor,
    kept: Tensor | None,
    softcap: Tensor | None,
    scale: str,
    block: tuple[int, int],
    banded: bool,
) -> Tensor:
    """Traced body; numbers that change between masks are tensors, or each would compile anew.

    The scale is text: a number would be traced as a symbol first, and then all over again.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Any:
        if banded:
            return in_band(q_idx, k_idx, numbers)
        return in_bitmap(planes[b, h], q_idx, k_idx, tile_id, octets, block)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Any:
        if softcap is not None:
            score = capped(score, softcap)
        if kept is not None:
            score = only_kept(score, kept[b, k_idx])
        return score

    block_mask = BlockMask.from_kv_blocks(
        lists[0],
        lists[1],
        lists[2],
        lists[3],
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
        seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,
    )
    result: Any = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=float(scale),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(result, Tensor), "without a log-sum-exp FlexAttention returns one tensor"
    return result


class _Callables:
    """What one form is compiled to: for the sizes of its first call alone, and for all others.

    For all sizes Dynamo has to trace the call (0.4 s), and most programs have only one size.

    Args:
        compile_alone: compiles for one size; None where that has to be traced as well.
    """

    def __init__(
        self, compile_alone: Callable[[FlexOperands], Callable[[FlexOperands], Tensor]] | None
    ) -> None:
        self._own: set[tuple[torch.Size, ...]] = set()  # sizes that are compiled for alone
        self._failed = 0
        self._compile = compile_alone
        self._made: dict[tuple[Any, ...], Callable[[FlexOperands], Tensor]] = {}
        self._traced: Callable[..., Tensor] = torch.compile(_copied(), dynamic=False)
        self._all: Callable[..., Tensor] = torch.compile(_copied(), dynamic=True)

    def __call__(self, operands: FlexOperands) -> Tensor:
        """Run the form."""
        sizes = _sizes(operands)
        if not self._own:
            self._own.add(sizes)
        if self._failed < MOST_FAILURES and sizes not in self._own:
            try:
                return self._all(*operands)
            except InductorError:
                # Inductor's CPU template renames symbols as text (s7 inside s75); which symbols
                # there are depends on what sizes happen to be equal
                self._failed += 1
                self._own.add(sizes)
        return self._alone(operands)(operands)

    def begin(self, operands: FlexOperands) -> None:
        """Begin to compile for the sizes of the first call; sizes that follow wait for theirs."""
        if not self._own:
            with kernels_built_later():
                self._alone(operands)
            self._own.add(_sizes(operands))  # not if it failed: the first call will tell

    def _alone(self, operands: FlexOperands) -> Callable[[FlexOperands], Tensor]:
        if self._compile is None:
            return lambda given: self._traced(*given)
        key = _situation(operands)
        if key not in self._made:
            if len(self._made) >= MOST_SIZES:
                self._made.pop(next(iter(self._made)))
            self._made[key] = self._compile(operands)
        return self._made[key]


def _tensors(operands: FlexOperands) -> list[Tensor]:
    every = [x for a in operands for x in (a if isinstance(a, list) else [a])]
    return [x for x in every if isinstance(x, Tensor)]


def _sizes(operands: FlexOperands) -> tuple[torch.Size, ...]:
    return tuple(t.shape for t in _tensors(operands))


def _situation(operands: FlexOperands) -> tuple[Any, ...]:
    """What code for one size holds for, beyond its form; what Dynamo would guard."""
    return (
        *((t.shape, t.stride()) for t in _tensors(operands)),
        operands.block,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def _copied() -> FunctionType:
    """The traced body anew: Dynamo gives up after a few recompilations of one code object."""
    return FunctionType(_flex_call.__code__.replace(), _flex_call.__globals__)


@cache
def _compiled(form: Form) -> _Callables:
    """The callables of a form."""
    return _Callables(compiled_flex if can_be_written() else None)


@lru_cache(maxsize=64)
def _tables(
    row_ptr: bytes, full_start: bytes, col_idx: bytes, bitmap_id: bytes, rows: int, cols: int
) -> tuple[Tensor, ...]:
    """Lists as FlexAttention reads them; a function of the arrays' contents.

    Returns:
        part counts int32 [planes, rows], part columns [planes, rows, cols], the same of full
        tiles, and the bitmap number of every tile [planes, rows, cols].
    """
    starts, fulls, columns, numbers = (
        torch.frombuffer(bytearray(a), dtype=torch.int32).long()
        if a
        else torch.zeros(0, dtype=torch.int64, device="cpu")
        for a in (row_ptr, full_start, col_idx, bitmap_id)
    )
    lines = fulls.shape[0]
    row = torch.repeat_interleave(torch.arange(lines, device="cpu"), starts.diff())
    entry = torch.arange(columns.shape[0], device="cpu")
    tile_id = torch.zeros(lines, cols, dtype=torch.int32, device="cpu")
    tile_id[row, columns] = numbers.int()
    shape = (lines // rows, rows)
    found: list[Tensor] = []
    for begin, end in ((starts[:-1], fulls), (fulls, starts[1:])):
        inside = (entry >= begin[row]) & (entry < end[row])
        index = torch.zeros(lines, cols, dtype=torch.int32, device="cpu")
        index[row[inside], (entry - begin[row])[inside]] = columns[inside].int()
        found += [(end - begin).int().view(shape), index.view(*shape, cols)]
    return (*found, tile_id.view(*shape, cols))
