"""FlexAttention on the CPU over the tile lists of a block mask.

The compiled callable is made once per form (which pieces of the mask exist, dtype, layout) and
shared by all layers and lengths, but for the first length, which has one of its own; Inductor's
disk cache keeps them between processes.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.exc import InductorError

# Entries of the tile table (tile rows x tile columns) that a mask may have: int32, twice.
TABLE_LIMIT = 1 << 22
# Attempts to compile a form for all sizes that may fail; each takes seconds.
MOST_FAILURES = 3


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


def flex_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor],
    key_keep: Tensor | None,
    scale: float,
    softcap: float,
    q_offset: int,
    band: Sequence[int],
    block: tuple[int, int],
) -> Tensor:
    """Run FlexAttention; arguments as in ``attention_cpu.attention_cpu_forward``.

    Returns:
        out [batch, heads, q_len, head_dim] in the layout FlexAttention chooses.
    """
    plane_map, row_ptr, full_start, col_idx, bitmap_id, bitmap, _ = mask
    rows, cols = -(-q.shape[2] // block[0]), -(-k.shape[2] // block[1])
    arrays = [t.numpy().tobytes() for t in (row_ptr, full_start, col_idx, bitmap_id)]
    tables = _tables(*arrays, rows, cols)
    lists = [t[plane_map.long()] for t in tables[:4]]
    octets = bitmap.view(torch.uint8).reshape(-1, block[1] // 8, block[0]).int()
    if octets.shape[0] == 0:
        octets = octets.new_zeros(1, block[1] // 8, block[0])
    numbers = torch.tensor([*(band or (0, 0, 0, 0, 0)), q_offset])
    planes = plane_map.expand(q.shape[0], q.shape[1]).contiguous()
    kept = None if key_keep is None else key_keep.expand(q.shape[0], -1).contiguous()
    form = Form(
        dtype=q.dtype,
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        token_major=q.stride(1) < q.stride(2),
        band=bool(band),
        padded=kept is not None,
        capped=softcap > 0,
        scale=scale,
        planes=(plane_map.shape[0], plane_map.shape[1]),
    )
    cap = torch.tensor(softcap) if softcap > 0 else None
    arguments = (
        q.detach(), k.detach(), v.detach(), lists, numbers, tables[4], planes, octets, kept,
        cap, repr(scale), block, bool(band),
    )  # fmt: skip
    with torch.no_grad():
        result: Tensor = _compiled(form)(*arguments)
    return result


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

    def in_band(q_idx: Tensor, k_idx: Tensor) -> Tensor:
        position = q_idx + numbers[5]
        d = k_idx - position
        near = (d >= numbers[0]) & (d <= numbers[1])
        return (near | (position < numbers[2]) | (k_idx < numbers[3])) & (d <= numbers[4])

    def in_bitmap(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        tile = tile_id[planes[b, h], q_idx // block[0], k_idx // block[1]]
        octet = octets[tile, (k_idx % block[1]) // 8, q_idx % block[0]]
        return ((octet >> (k_idx % 8)) & 1) != 0

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return in_band(q_idx, k_idx) if banded else in_bitmap(b, h, q_idx, k_idx)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if kept is not None:
            score = torch.where(kept[b, k_idx], score, -float("inf"))
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

    For all sizes takes longer to trace (0.41 against 0.25 s), and most programs have only one.
    """

    def __init__(self) -> None:
        self._own: set[tuple[torch.Size, ...]] = set()  # sizes that are compiled for alone
        self._failed = 0
        self._alone: Callable[..., Tensor] = torch.compile(_copied(), dynamic=False)
        self._all: Callable[..., Tensor] = torch.compile(_copied(), dynamic=True)

    def __call__(self, *arguments: Any) -> Tensor:
        """Run the form; arguments as for ``_flex_call``."""
        every = [x for a in arguments for x in (a if isinstance(a, list) else [a])]
        sizes = tuple(x.shape for x in every if isinstance(x, Tensor))
        if not self._own:
            self._own.add(sizes)
        if self._failed < MOST_FAILURES and sizes not in self._own:
            try:
                return self._all(*arguments)
            except InductorError:
                # Inductor's CPU template renames symbols as text (s7 inside s75); which symbols
                # there are depends on what sizes happen to be equal
                self._failed += 1
                self._own.add(sizes)
        return self._alone(*arguments)


def _copied() -> FunctionType:
    """The traced body anew: Dynamo gives up after a few recompilations of one code object."""
    return FunctionType(_flex_call.__code__.replace(), _flex_call.__globals__)


@cache
def _compiled(form: Form) -> _Callables:
    """The callables of a form."""
    return _Callables()


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
        else torch.zeros(0, dtype=torch.int64)
        for a in (row_ptr, full_start, col_idx, bitmap_id)
    )
    lines = fulls.shape[0]
    row = torch.repeat_interleave(torch.arange(lines), starts.diff())
    entry = torch.arange(columns.shape[0])
    tile_id = torch.zeros(lines, cols, dtype=torch.int32)
    tile_id[row, columns] = numbers.int()
    shape = (lines // rows, rows)
    found: list[Tensor] = []
    for begin, end in ((starts[:-1], fulls), (fulls, starts[1:])):
        inside = (entry >= begin[row]) & (entry < end[row])
        index = torch.zeros(lines, cols, dtype=torch.int32)
        index[row[inside], (entry - begin[row])[inside]] = columns[inside].int()
        found += [(end - begin).int().view(shape), index.view(*shape, cols)]
    return (*found, tile_id.view(*shape, cols))
