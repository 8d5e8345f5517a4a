"""Recipes of linear layers with rotary embeddings that the tests of their template share."""

from math import prod

import torch
from linear_recipes import Writer
from norm_recipes import DEVICE, HALF


def rope_recipe(
    rows=(2, 33), heads=(2, 1), kept=1, dim=32, k=72, period=None, dtype=HALF, bias=False, kn=False,
    strided=False, device=DEVICE,
):  # fmt: skip
    """Projections of some heads, the first of them rotated, and its operands.

    Args:
        heads: of each value that is rotated. kept: heads behind them that stay as they are.
        period: rows of the tables; None: the last of ``rows``.
    """
    w = Writer(dtype, device)
    x = w.operand(*rows, k, strided=strided)
    value = w.linear(x, (sum(heads) + kept) * dim, k, kn=kn, bias=bias)
    length = rows[-1] if period is None else period
    cos, sin = (w.operand(length, dim) for _ in range(2))
    w.step("rope", value, cos, sin, head_dim=dim, heads=tuple(heads))
    return w.done()


def sized(rows, heads, kept, dim, k, dtype=HALF, period=None):
    """The same without memory."""
    w = Writer(dtype, "cpu")
    n, length = (sum(heads) + kept) * dim, period or prod(rows)
    with torch.device("meta"):
        shapes = ((*rows, k), (n, k), (length, dim), (length, dim))
        w.operands += [torch.empty(shape, dtype=dtype) for shape in shapes]
    value = w.step("linear", ("o", 0), ("o", 1))
    w.step("rope", value, ("o", 2), ("o", 3), head_dim=dim, heads=tuple(heads))
    return w.done()[0]
