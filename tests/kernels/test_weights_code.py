"""The Hopper kernel's online softmax in PTX, run for one warp by ptx_warp.py, against float64."""

from functools import cache

import numpy as np
import pytest
import torch
from ptx_warp import LANES, floats, times
from stof_compile.kernels import hopper_weights, softmax
from weights_warp import (
    INF,
    KEYS,
    NAN,
    NO_OFFSET,
    ROWS,
    TILES,
    UNIT,
    assert_broken,
    assert_right,
    by_row,
    kept_bits,
    kept_scores,
    rescaled,
    through,
    whole,
)

from stof_compile.masks import bitmap
from stof_compile.masks.fragments import to_fragments

pytest.importorskip("triton.experimental.gluon")

both_widths = pytest.mark.parametrize("narrow", UNIT)
both_ways = pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "not scaled"])


# -- scores ---------------------------------------------------------------------------------------


def ordinary(rng):
    return 8 * rng.standard_normal((ROWS, TILES * KEYS))


def rising(amount, rows=slice(None)):
    def scores(rng):
        s = ordinary(rng)
        s[rows] += amount * (np.arange(TILES * KEYS) // KEYS)
        return s

    return scores


def masked(keys, rows=(0, 3, 6, 8, 11, 15)):
    """-inf in these rows where ``keys`` is true of (tile, column)."""

    def scores(rng):
        s = ordinary(rng)
        tile, column = np.divmod(np.arange(TILES * KEYS), KEYS)
        hidden = np.broadcast_to(keys(tile, column), tile.shape)
        s[np.ix_(rows, hidden.nonzero()[0])] = -INF
        return s

    return scores


def spikes(rng):
    """Each in one lane of a row only; the last one later in the row than a higher one."""
    s = ordinary(rng)
    for tile, row, column, score in ((1, 2, 7, 150), (3, 4, 39, 400), (5, 13, 62, 900)):
        s[row, tile * KEYS + column] = score
    s[4, 5 * KEYS] = 300
    return s


def scattered(rng):
    s = 64 * rng.standard_normal((ROWS, TILES * KEYS))
    s[rng.random(s.shape) < 0.9] = -INF
    return s


def second_half_higher(rng):
    """So that packed weights are scaled, by less and by more than they can be."""
    s = rising(100)(rng)
    s += np.arange(ROWS)[:, None] * 12 * (np.arange(TILES * KEYS) % KEYS >= 32)
    return s


ALL = tuple(range(ROWS))
SCORES = {
    "ordinary": ordinary,
    "16 times": lambda rng: 16 * ordinary(rng),
    "16 times, rising": lambda rng: 16 * rising(20)(rng),
    "rising": rising(20),
    "rising fast": rising(160),
    "falling": rising(-20),
    "falling fast": rising(-160),
    "few rows rising": rising(200, [2, 11]),
    "one row falling": rising(-200, [5]),
    "spikes": spikes,
    "scattered": scattered,
    "second half higher": second_half_higher,
    "no key in the first tile": masked(lambda tile, column: tile == 0),
    "no key of any row in the first tile": masked(lambda tile, column: tile == 0, ALL),
    "no key in the first halves": masked(lambda tile, column: column < 32),
    "no key in the second halves": masked(lambda tile, column: column >= 32),
    "no key of any row in the first halves": masked(lambda tile, column: column < 32, ALL),
    "no key in the first half": masked(lambda tile, column: (tile == 0) & (column < 32)),
    "no key in every other tile": masked(lambda tile, column: tile % 2 == 0),
    "the last key only": masked(lambda tile, column: (tile < TILES - 1) | (column < 63)),
    "the first key only": masked(lambda tile, column: (tile > 0) | (column > 0)),
    "no key": masked(lambda tile, column: True),
    "no key of any row": masked(lambda tile, column: True, ALL),
    "hugely negative": lambda rng: ordinary(rng) - 1e4,
    "hugely negative at first": lambda rng: ordinary(rng) - 1e4 * (np.arange(384) < KEYS),
    "hugely negative at last": lambda rng: ordinary(rng) - 1e4 * (np.arange(384) >= 320),
    "huge": lambda rng: ordinary(rng) + 3e4,
    "huge at last": lambda rng: ordinary(rng) + 3e4 * (np.arange(384) >= 352),
    "huge and hugely negative": lambda rng: 3e4 * rng.uniform(-1, 1, (ROWS, TILES * KEYS)),
}


@cache
def case(name, narrow, scaled):
    """(warp, scores, values) of one of SCORES."""
    seed = list(SCORES).index(name)
    scores = SCORES[name](np.random.default_rng(seed)).astype(np.float32)
    warp, v = through(scores, narrow, scaled, seed)
    return warp, scores, v


# -- weights --------------------------------------------------------------------------------------


def test_constants():
    def number(text):
        return floats(int(text[2:], 16))

    assert number(hopper_weights.NO_OFFSET_CODE) == NO_OFFSET
    assert number(hopper_weights.LIMIT_CODE) == 2**softmax.SLACK.value


@both_widths
@both_ways
@pytest.mark.parametrize("name", SCORES)
def test_many_tiles(name, narrow, scaled):
    warp, scores, v = case(name, narrow, scaled)
    assert_right(warp, scores, v)
    empty = np.isinf(scores).all(1)
    total, offset = by_row(warp.total), by_row(warp.offset)
    assert (total[empty] == 0).all() and (whole(warp.acc)[empty] == 0).all()
    assert ((offset == NO_OFFSET) == empty[:, None]).all()
    # a row's largest weight was over a half of the unit when its offset was set
    assert (total[~empty].sum(1) >= 0.5).all()


@both_widths
@both_ways
@pytest.mark.parametrize("name", SCORES)
def test_weights_and_offsets_of_each_tile(name, narrow, scaled):
    warp, _, _ = case(name, narrow, scaled)
    former = np.full((ROWS, 4), NO_OFFSET)
    for weights, offset, factor, _ in warp.steps:
        assert (weights >= 0).all() and (weights <= 256).all()
        assert (offset == offset[:, :1]).all() and (offset == np.floor(offset)).all()
        assert (offset <= former).all()
        # numbers below the normal ones may be 0
        np.testing.assert_allclose(factor, np.exp2(offset - former), rtol=0, atol=2.0**-126)
        former = offset


@both_widths
@both_ways
@pytest.mark.parametrize("mult", [1.0, 0.02, 3.7])
def test_other_scales(mult, narrow, scaled):
    scores = rising(30)(np.random.default_rng(40)).astype(np.float32)
    warp, v = through(scores, narrow, scaled, 41, mult)
    assert_right(warp, scores, v)


@both_widths
@both_ways
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["ordinary", "16 times, rising", "no key in the first tile"])
def test_nan_and_inf_stay_in_their_row(name, value, narrow, scaled):
    """A result is NaN then, as that of softmax is."""
    for broken in (((0, 6, 5), (3, 13, 20)), ((0, 13, 40), (TILES - 1, 6, 63))):
        scores = SCORES[name](np.random.default_rng(51)).astype(np.float32)
        for tile, row, column in broken:
            scores[row, tile * KEYS + column] = value
        warp, v = through(scores, narrow, scaled)
        assert_broken(warp, scores, v, [6, 13])


@both_widths
@both_ways
def test_rows_of_nan_or_of_inf(narrow, scaled):
    scores = ordinary(np.random.default_rng(50)).astype(np.float32)
    scores[1] = NAN
    scores[9] = INF
    scores[4, :KEYS] = NAN
    scores[12, :KEYS] = INF
    warp, v = through(scores, narrow, scaled)
    assert_broken(warp, scores, v, [1, 4, 9, 12])


# -- the short way --------------------------------------------------------------------------------


@both_widths
@both_ways
def test_maxima_are_sought_in_the_first_tile_only(narrow, scaled):
    scores = np.random.default_rng(60).uniform(-8, 8, (ROWS, TILES * KEYS))
    scores -= 20 * (np.arange(TILES * KEYS) // KEYS % 2)
    warp, v = through(scores.astype(np.float32), narrow, scaled)
    assert_right(warp, scores.astype(np.float32), v)
    first, *others = (step[-1] for step in warp.steps)
    assert times(first, "shfl") > 0
    for ran in others:
        assert [times(ran, kind) for kind in ("shfl", "max", "mul", "ex2")] == [0, 0, 0, 32]


@both_widths
@both_ways
@pytest.mark.parametrize("column", [3, 33])
def test_maxima_are_sought_in_the_half_that_outgrew(column, narrow, scaled):
    scores = np.random.default_rng(61).uniform(-8, 8, (ROWS, TILES * KEYS)).astype(np.float32)
    scores[10, 2 * KEYS + column] = 300
    warp, v = through(scores, narrow, scaled)
    assert_right(warp, scores, v)
    counts = [step[-1] for step in warp.steps]
    assert [times(ran, "shfl") for ran in counts[1:]] == [0, 4, 0, 0, 0]
    assert times(counts[2], f"mul.{narrow}") == (8 if column > 31 else 0)  # packed weights
    for row in range(ROWS):  # other rows of the warp look as well, and keep their offset
        assert (warp.steps[2][1][row] == warp.steps[1][1][row]).all() == (row != 10)


@both_widths
@both_ways
@pytest.mark.parametrize(("score", "grown"), [(8, False), (9, True)])
@pytest.mark.parametrize("column", [0, 63])
def test_weights_of_256_are_kept_and_no_larger_ones(score, grown, column, narrow, scaled):
    scores = np.zeros((ROWS, 2 * KEYS), np.float32)
    scores[:, KEYS:] = -INF
    scores[:, KEYS + column] = score
    warp, v = through(scores, narrow, scaled, mult=1.0)
    assert_right(warp, scores, v)
    weights, offset, factor, ran = warp.steps[1]
    assert (times(ran, "shfl") > 0) == grown
    assert (offset == -score * grown).all() and (factor == 2.0 ** (-score * grown)).all()
    assert (weights[:, column] == 2.0 ** (score * (not grown))).all()
    assert weights.sum() == weights[:, column].sum()


# -- masks and factors ----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_keep_code(share):
    rng = np.random.default_rng(70)
    scores = rng.standard_normal((64, KEYS)).astype(np.float32)
    kept = rng.random((64, KEYS)) < share
    scores[rng.random(scores.shape) < 0.1] = NAN  # hidden where it is not kept
    scores[rng.random(scores.shape) < 0.1] = INF
    words = to_fragments(bitmap.pack(torch.from_numpy(kept[None]))).numpy().view(np.uint32)[0]
    for warp in range(4):
        s, keep = (x[warp * ROWS : warp * ROWS + ROWS] for x in (scores, kept))
        word = words[warp * LANES : warp * LANES + LANES]
        np.testing.assert_array_equal(kept_bits(word), keep)
        np.testing.assert_array_equal(kept_scores(s, word), np.where(keep, s, -INF))


@both_widths
@both_ways
def test_kept_scores_are_weighed(narrow, scaled):
    rng = np.random.default_rng(71)
    scores = ordinary(rng).astype(np.float32)
    seen = []
    for at in range(0, TILES * KEYS, KEYS):
        word = rng.integers(0, 2**32, LANES, np.uint32)
        tile = np.where(kept_bits(word), scores[:, at : at + KEYS], np.float32(NAN))
        seen.append(kept_scores(tile, word))
    scores = np.concatenate(seen, 1)
    assert not np.isnan(scores).any() and np.isinf(scores).any()
    warp, v = through(scores, narrow, scaled)
    assert_right(warp, scores, v)


@pytest.mark.parametrize("count", [32, 64])
@pytest.mark.parametrize("half", [0, 1])
def test_rescale_code(count, half):
    rng = np.random.default_rng(80)
    acc = rng.standard_normal((count, LANES)).astype(np.float32)
    acc[0, 3], acc[5, 9] = NAN, INF
    factor = np.ones((2, LANES), np.float32)
    result, ran = rescaled(acc, factor)
    np.testing.assert_array_equal(result, acc)
    assert times(ran, "mul") == 0
    for value in (0.25, 0.0, NAN):
        factor[half, 17] = value
        result, ran = rescaled(acc, factor)
        with np.errstate(invalid="ignore"):
            expected = acc * factor[np.arange(count) // 2 % 2]
        np.testing.assert_array_equal(result, expected)
        assert times(ran, "mul") == count
    factor = 2.0 ** -rng.integers(0, 30, (2, LANES)).astype(np.float32)
    result, _ = rescaled(acc, factor)
    np.testing.assert_array_equal(result, acc * factor[np.arange(count) // 2 % 2])
