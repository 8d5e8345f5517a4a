"""Element-wise evaluation of tiles in chunks of bounded size, compiled where that pays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor
from torch import Tensor
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx

from stof_compile.masks import bitmap
from stof_compile.masks.spec import MaskSpec

if TYPE_CHECKING:
    from stof_compile.masks.tiles import Grid

_CHUNK_CPU = 2**17
_CHUNK_GPU = 2**26
"""Elements evaluated at once; a few int64 temporaries of this size live at the same time."""

_CHUNK_SERIAL = 2**15 - 1
_SERIAL_UP_TO = 2**19
"""Elements of a mask up to which a CPU takes chunks that torch leaves to one thread: fewer than
2**15, which it shares out in sums. Where it has more threads than free cores (containers, compiling
beside it), every operation that is shared out waits for all of them: 25 ms a mask with 32 threads
on 2 cores, 5 with chunks of 2**15. A tile that is larger is a chunk of its own, and shared out."""

_CHUNK_COMPILED = 2**28
"""Elements evaluated at once by a compiled strip, which keeps one byte an element at most."""

_COMPILE_FROM = 2**34
"""Elements (131,072 squared) from which a GPU compiles. On an H200 such a pass takes 1 s eagerly
(64 times the 16 ms at 16,384) and 72 ms compiled; compiling takes 9 s the first time."""

_log = logging.getLogger(__name__)

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TileEvaluator:
    """Evaluates tiles of one rule on one grid.

    Args:
        spec: bound rule, tensors on the grid's device.
        grid: the tile grid.
        compile_from: elements from which a GPU evaluates through torch.compile.
    """

    spec: MaskSpec
    grid: Grid
    compile_from: int = _COMPILE_FROM

    def run(self, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate tiles (row, col), int64 [N].

        Returns:
            kept int64 [N]: elements of each tile; partial int64 [P]: numbers of those neither empty
            nor full; words int64 [P, W]: their contents.
        """
        area = self.grid.block_q * self.grid.block_k
        elements = row.shape[0] * area
        limit = _CHUNK_GPU
        if row.device.type == "cpu":
            limit = _CHUNK_SERIAL if elements <= _SERIAL_UP_TO else _CHUNK_CPU
        evaluate: Evaluate = self.evaluate
        if row.device.type != "cpu" and elements >= self.compile_from:
            compiled = self.compiled(_CHUNK_COMPILED // area)
            if compiled is not None:
                limit, evaluate = _CHUNK_COMPILED, compiled
        step = max(1, limit // area)
        counts: list[Tensor] = []
        numbers: list[Tensor] = []
        contents: list[Tensor] = []
        for start in range(0, row.shape[0], step):
            kept, octets = evaluate(row[start : start + step], col[start : start + step])
            counts.append(kept)
            partial = torch.nonzero((kept > 0) & (kept < area)).squeeze(1)
            numbers.append(partial + start)
            contents.append(bitmap.words_of(octets[partial]))
        if not counts:
            return row, row, row.new_zeros((0, area // 64))
        return torch.cat(counts), torch.cat(numbers), torch.cat(contents)

    def evaluate(self, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
        """Kept elements int64 [n] and packed uint8 [n, W, 8] of one chunk."""
        kept = self.elements(row, col)
        return kept.sum((1, 2)), bitmap.octets(kept)

    def elements(self, row: Tensor, col: Tensor) -> Tensor:
        """Bool [n, block_q, block_k] of one chunk."""
        grid = self.grid
        tiles = grid.tiles(row, col, clipped=False)
        q = tiles.q_lo[:, None, None] + torch.arange(grid.block_q, device=row.device)[None, :, None]
        k = tiles.k_lo[:, None, None] + torch.arange(grid.block_k, device=row.device)[None, None, :]
        q_end, k_end = grid.q_len + grid.q_offset, grid.k_len
        # a rule may look its position up in a table: ask only for positions that exist
        q_asked, k_asked = (
            (q.clamp(max=q_end - 1), k.clamp(max=k_end - 1)) if grid.has_ragged else (q, k)
        )
        keep = self.spec.keep(tiles.b[..., None, None], tiles.h[..., None, None], q_asked, k_asked)
        if grid.has_ragged:
            keep = keep & (q < q_end) & (k < k_end)
        return keep.expand(row.shape[0], grid.block_q, grid.block_k)

    def compiled(self, step: int) -> Evaluate | None:
        """Compile `evaluate` for chunks of ``step`` tiles, all fused; None if it can't be."""
        grid = self.grid
        lengths = (grid.q_len, grid.k_len, grid.block_q, grid.block_k, grid.q_offset)
        planes = (tuple(grid.b.tolist()), tuple(grid.h.tolist()))
        function = _compile(self.spec, lengths, planes, step, str(grid.b.device))
        if function is None:
            return None

        def evaluate(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
            # the last chunk repeats tile 0 up to the compiled size
            count = row.shape[0]
            padded = [torch.nn.functional.pad(one, (0, step - count)) for one in (row, col)]
            kept, octets = function(*padded)
            return kept[:count], octets[:count]

        return evaluate


@lru_cache(maxsize=8)
def _compile(
    spec: MaskSpec,
    lengths: tuple[int, int, int, int, int],
    planes: tuple[tuple[int, ...], tuple[int, ...]],
    step: int,
    device: str,
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Compile the evaluation of ``step`` tiles; remembered, as it takes seconds."""
    from stof_compile.masks.tiles import Grid

    b, h = (torch.tensor(one, dtype=torch.int64, device=device) for one in planes)
    evaluator = TileEvaluator(spec, Grid(*lengths, b, h))
    # two tensors: one passed twice would be traced as one input
    examples: list[Any] = [torch.zeros(step, dtype=torch.int64, device=device) for _ in range(2)]
    try:
        # straight to Inductor: we may be called while Dynamo compiles something, with fake tensors
        # of its own
        with tracing(None):
            trace = make_fx(
                lambda *tiles: evaluator.evaluate(*tiles),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )
            function = torch._inductor.compile(trace(*examples), examples)
            function(*examples)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        _log.warning("mask %r is evaluated without compiling: %s", spec, reason)
        return None
    compiled: Callable[..., tuple[Tensor, Tensor]] = function
    return compiled
