"""What an attention's output is held to: fp64 answers, and what is true of every element."""

from __future__ import annotations

from collections.abc import Callable

import timing
import torch
from cases import Cell, keep_rows, mask_spec
from torch import Tensor

from stof_compile.measure import TOLERANCE, ErrorReport, check_close

LIMIT = {"cuda": 2**33, "cpu": 2**27}  # elements of the mask in all planes: a few seconds
STRIP = 2**26  # of them at a time: 512 MiB in fp64
TILE = 64


def choose_rows(cell: Cell, seed: int, device: torch.device) -> Tensor | None:
    """The query positions answered in each plane, int64 ``[B * H, R]``; None: all of them.

    All planes have the :func:`edge_rows`, and at least as many rows that are drawn for each.
    """
    planes = cell.batch * cell.heads
    count = LIMIT[device.type] // (planes * cell.seq)
    if count >= cell.seq:
        return None
    edges = edge_rows(cell, device)
    generator = torch.Generator().manual_seed(seed)
    shape = (planes, max(count - len(edges), len(edges)))
    drawn = torch.randint(cell.seq, shape, generator=generator).to(device)
    return torch.cat([edges.expand(planes, -1), drawn], dim=1)


def edge_rows(cell: Cell, device: torch.device) -> Tensor:
    """Rows at which a kernel does something else than at the row before, int64 ``[R]``.

    Both ends; around powers of two and quarters (tiles of every size, shares of a split), the last
    tile of every size and the mask's widths; of the two heaviest and the two lightest rows of
    tiles the first, the middle and the last.
    """
    from stof_compile.masks.block_mask import build_block_mask

    seq, widths = cell.seq, (cell.window, cell.global_tokens)
    marks = {0, seq // 4, seq // 2, 3 * seq // 4, seq, *widths, *(seq - width for width in widths)}
    marks |= {2**n for n in range(4, seq.bit_length())}
    marks |= {(seq - 1) // block * block for block in (16, 32, 64, 128, 256)}
    rows = {mark + by for mark in marks for by in (-1, 0, 1)}
    mask = build_block_mask(mask_spec(cell), seq, seq, TILE, device=device)
    order = mask.row_order.tolist()  # the heaviest first
    tiles = (*order[:2], *order[-2:])
    rows |= {tile * TILE + at for tile in tiles for at in (0, TILE // 2, TILE - 1)}
    return torch.tensor(sorted(row for row in rows if 0 <= row < seq), device=device)


def answers(
    cell: Cell, inputs: tuple[Tensor, Tensor, Tensor], keep: Tensor | None, rows: Tensor | None
) -> Tensor:
    """Masked attention in fp64, ``[B * H, R, D]``.

    Args:
        keep: the mask bool ``[S, S]``, None where that is too long. rows: see :func:`choose_rows`.
    """
    from stof_compile.kernels.reference import attention_reference

    every = torch.arange(cell.seq, device=inputs[0].device)
    found = []
    for plane in range(cell.batch * cell.heads):
        at = divmod(plane, cell.heads)
        q, k, v = (t[at][None, None] for t in inputs)
        parts = []
        wanted = every if rows is None else rows[plane]
        for some in wanted.split(max(1, STRIP // cell.seq)):
            kept = keep_rows(cell, some) if keep is None else keep[some]
            out = attention_reference(
                q[:, :, some].double(), k.double(), v.double(), keep=kept[None, None]
            )
            assert isinstance(out, Tensor), "no log-sum-exp was asked for"
            parts.append(out[0, 0])
        found.append(torch.cat(parts))
    return torch.stack(found)


def rounded_answers(
    cell: Cell, inputs: tuple[Tensor, Tensor, Tensor], keep: Tensor | None, rows: Tensor | None
) -> Tensor:
    """As :func:`answers`, of q, k and v rounded to e4m3."""
    from stof_compile.kernels.reference import rounded_to_e4m3

    q, k, v = (rounded_to_e4m3(x) for x in inputs)
    return answers(cell, (q, k, v), keep, rows)


def pick(out: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of an output ``[B, H, S, D]`` that there are answers for, ``[B * H, R, D]``."""
    if rows is None:
        return out.flatten(0, 1)
    plane, heads = torch.arange(len(rows), device=rows.device)[:, None], out.shape[1]
    return out[plane // heads, plane % heads, rows]


def check(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    rows: Tensor | None,
    expected: Tensor,
    rounded: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[ErrorReport, str]:
    """Compare an attention with its answers, and see that it wrote every element of its output.

    Args:
        rounded: the answers for operands in e4m3, to which one that rounds them is held.
        keep: the mask bool ``[S, S]``, None where that is too long and every row has a key.

    Returns:
        The distance from ``expected``, and in words what is wrong; "" where nothing is.
    """
    q, k, v = inputs
    attend(q, k, v)  # from the third on a launch may be a repeated one, as those that are timed
    timing.poison(q.shape, q.dtype, q.device)
    out = attend(q, k, v)
    found, wrong = pick(out, rows).double(), []
    distance = check_close(found, expected, q.dtype)
    dtype, held = (q.dtype, expected) if rounded is None else (torch.float8_e4m3fn, rounded)
    report = check_close(found, held, dtype)
    if not report.ok:
        wrong.append(f"max {report.max_rel:.3g} rms {report.rms_rel:.3g} against fp64")
    # the more keys a row has the smaller its average: beside the others its errors would not show
    size = held.square().mean(dim=-1, keepdim=True).sqrt()
    size = torch.where(size > 0, size, 1)  # of rows without keys
    by_row = check_close(found / size, held / size, dtype)
    if report.ok and not by_row.ok:
        largest = f"max {by_row.max_rel:.3g} rms {by_row.rms_rel:.3g}"
        wrong.append(f"{largest} against fp64, each row over its own size")
    if not bool(torch.isfinite(out).all()):
        wrong.append("some elements are not finite or never written")
    filled = torch.ones(q.shape[2], dtype=torch.bool, device=q.device)
    if keep is not None:
        filled = keep.any(dim=1)
    if bool(out[:, :, ~filled].any()):
        wrong.append("rows without keys are not zero")
    del out, found
    # averages of ones are one: in all planes and rows, those without an answer among them
    off = (attend(q, k, torch.ones_like(v)) - filled.to(v.dtype)[:, None]).abs().amax().item()
    if not off <= TOLERANCE[q.dtype][0]:
        wrong.append(f"the average of ones is off by {off:.3g} somewhere")
    return distance, "; ".join(wrong)
