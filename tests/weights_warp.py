"""One warp of the Hopper kernel's online softmax in PTX, and float64 beside it."""

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from ptx_warp import LANES, bits, floats, run, unpacked
from stof_compile.kernels import hopper_weights, softmax

ROWS, TILES = 16, 6  # of a warp, one after another
KEYS = 64  # of a tile, or of a half of one: what a lane's mask word is for
MULT = 0.125 * softmax.LOG2E.value
NO_OFFSET = np.float32(hopper_weights.NO_OFFSET.value)
INF, NAN = np.inf, np.nan
UNIT = {"f16x2": 2.0**-11, "bf16x2": 2.0**-8}  # error of a narrow number by rounding

# -- what a warp holds ----------------------------------------------------------------------------


def places(count):
    """(row, column) of each register of each lane, [count, lanes]."""
    i, lane = np.arange(count)[:, None], np.arange(LANES)[None, :]
    return lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def held(tile):
    """[16, columns] as registers [columns / 2, lanes]."""
    return tile[places(tile.shape[1] // 2)]


def whole(registers):
    """Inverse of ``held``."""
    tile = np.empty((ROWS, 2 * len(registers)), registers.dtype)
    tile[places(len(registers))] = registers
    return tile


def by_row(halves):
    """What lanes have of their two rows, [2, lanes], as [16, 4]."""
    return np.concatenate([half.reshape(8, 4) for half in halves])


# -- the assembly ---------------------------------------------------------------------------------


class Form(NamedTuple):
    """An assembly that weighs a tile.

    Args:
        keys: columns of a tile. part: columns whose largest scores are sought together.
        scaled: results of 64 columns that it scales; without any others do, one of 128.
    """

    keys: int
    part: int
    scaled: int

    @property
    def columns(self):
        """Of the result."""
        return 64 * self.scaled or 128

    @property
    def operands(self):
        """Constraints of the assembly."""
        if self.keys > KEYS:
            return hopper_weights.WIDE_OPERANDS.value
        if self.keys < KEYS:
            return hopper_weights.SHORT_OPERANDS.value
        return hopper_weights.weights_operands(self.scaled)


FORMS = {
    "scaled": Form(64, 32, 1),
    "both halves scaled": Form(64, 32, 2),
    "not scaled": Form(64, 32, 0),
    "two rows at a time": Form(128, 128, 0),
    "short": Form(32, 32, 0),
}


@cache
def weights_text(mult, narrow, form):
    from stof_compile.kernels.hopper_registers import weights_code, wide_weights_code
    from triton.experimental.gluon import language as gl

    dtype = gl.float16 if narrow == "f16x2" else gl.bfloat16
    if form.keys > KEYS:
        return str(wide_weights_code(mult, dtype))
    return str(weights_code(mult, dtype, form.scaled, form.keys))


@dataclass
class Warp:
    """Sixteen rows on their way through the tiles, as the kernel's consumer takes them."""

    narrow: str
    form: Form
    mult: float = MULT
    offset: np.ndarray = field(default_factory=lambda: np.full((2, LANES), NO_OFFSET))
    total: np.ndarray = field(default_factory=lambda: np.zeros((2, LANES), np.float32))
    acc: np.ndarray | None = None
    steps: list = field(default_factory=list)  # (weights, offsets [16, 4], factor, instructions)

    def attend(self, s, v):
        """One tile: scores [16, keys] and values [keys, columns]."""
        if self.acc is None:
            self.acc = np.zeros((v.shape[1] // 2, LANES), np.float32)
        count = min(32, s.shape[1] // 2)  # registers of what is told
        rows = [i // 2 % 2 for i in range(count)]
        inputs = [*held(s), *self.offset[rows], *self.total[rows]]
        inputs += [*self.acc] if self.form.scaled else []
        text = weights_text(self.mult, self.narrow, self.form)
        results, ran = run(text, self.form.operands, bits(inputs))
        packed = results[: s.shape[1] // 4]
        pairs = [unpacked(register, self.narrow) for register in packed]
        weights = whole(np.stack([number for pair in pairs for number in pair]))
        told = floats(np.stack(results[-count:]))
        self.total, self.offset = told[[0, 2]], told[[1, 3]]
        factor = told[[-4, -2]]
        np.testing.assert_array_equal(told[4:], factor[rows[4:]])
        if self.form.scaled:
            self.acc = floats(np.stack(results[16:-32]))
        else:
            self.acc = rescaled(self.acc, factor)[0]
        with np.errstate(invalid="ignore"):
            self.acc = self.acc + held(weights @ v)
        self.steps.append((weights, by_row(self.offset), by_row(factor), ran))

    def result(self):
        """(result [16, columns], log-sum-exp [16]) as the kernel finishes them."""
        total = by_row(self.total).astype(np.float64).sum(1)
        filled = np.where(total == 0, 1, total)
        offset = by_row(self.offset).max(1).astype(np.float64)
        lse = np.where(total == 0, -INF, np.log(filled) - offset * softmax.LN2.value)
        return whole(self.acc) / filled[:, None], lse


def rescaled(acc, factor):
    """``rescale_code``: (``acc`` [registers, lanes] times factors [2, lanes], instructions)."""
    count = len(acc)
    inputs = [*acc, *(factor[i // 2 % 2] for i in range(count))]
    code, constraints = softmax.rescale_code(count), softmax.rescale_operands(count)
    results, ran = run(code, constraints, bits(inputs))
    return floats(np.stack(results)), ran


def kept_scores(s, words):
    """``keep_code``: scores [16, 64], or of the first columns, -inf where a lane's word has no bit
    for them."""
    octets = s.shape[1] // 8
    inputs = [*bits(held(s)), *[words] * (4 * octets)]
    code, operands = hopper_weights.keep_code(octets), hopper_weights.keep_operands(octets)
    results, _ = run(code, operands, inputs)
    return whole(floats(np.stack(results)))


def kept_bits(words):
    """The scores [16, 64] that the words of the lanes keep."""
    row, column = places(32)
    bit = row // 8 * 16 + column // 8 * 2 + column % 2
    return whole((words >> bit.astype(np.uint32) & 1).astype(bool))


def through(scores, narrow, form, seed=7, mult=MULT):
    """(warp that has seen all tiles of ``scores`` [16, keys], values [keys, columns])."""
    v = np.random.default_rng(seed).standard_normal((scores.shape[1], form.columns))
    v = v.astype(np.float32)
    warp = Warp(narrow, form, mult)
    for at in range(0, scores.shape[1], form.keys):
        warp.attend(scores[:, at : at + form.keys], v[at : at + form.keys])
    return warp, v


def assert_right(warp, scores, v, rows=slice(None)):
    """Within the rounding of the weights; sums are of weights before that."""
    exponents = scores[rows].astype(np.float64) * np.float32(warp.mult) * softmax.LN2.value
    top = exponents.max(1, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    p = np.exp(exponents - top)
    total = p.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        expected_lse = np.log(total[:, 0]) + top[:, 0]
    p = p / np.where(total == 0, 1, total)
    out, lse = warp.result()
    # fp16 numbers below 2 ** -14 are rounded to multiples of 2 ** -24, and then scaled
    allowed = UNIT[warp.narrow] * (p @ np.abs(v)) + 1e-4 * np.abs(v).max()
    assert (np.abs(out[rows] - p @ v) <= allowed).all()
    np.testing.assert_allclose(lse[rows], expected_lse, rtol=0, atol=1e-5)


def assert_broken(warp, scores, v, rows):
    """NaN in these rows, and the others right."""
    out, lse = warp.result()
    assert np.isnan(by_row(warp.total)[rows].sum(1)).all()
    assert np.isnan(out[rows]).all() and np.isnan(lse[rows]).all()
    assert_right(warp, scores, v, [i for i in range(ROWS) if i not in rows])
    for step in warp.steps:
        assert (step[1] == step[1][:, :1]).all()
