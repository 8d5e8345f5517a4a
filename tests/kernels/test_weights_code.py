"""The Hopper kernel's online softmax in PTX, run for one warp by ptx_warp.py, against float64."""

from functools import cache

import numpy as np
import pytest
import torch
from ptx_warp import LANES, floats, times
from stof_compile.kernels import hopper_weights, softmax
from weights_warp import (
    FORMS,
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
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))


# -- scores ---------------------------------------------------------------------------------------


def ordinary(rng, keys):
    return 8 * rng.standard_normal((ROWS, TILES * keys))


def rising(amount, rows=slice(None)):
    def scores(rng, keys):
        s = ordinary(rng, keys)
        s[rows] += amount * (np.arange(TILES * keys) // keys)
        return s

    return scores


def masked(hides, rows=(0, 3, 6, 8, 11, 15)):
    """-inf in these rows where ``hides`` is true of (tile, column, half of the columns)."""

    def scores(rng, keys):
        s = ordinary(rng, keys)
        tile, column = np.divmod(np.arange(TILES * keys), keys)
        hidden = np.broadcast_to(hides(tile, column, keys // 2), tile.shape)
        s[np.ix_(rows, hidden.nonzero()[0])] = -INF
        return s

    return scores


def spikes(rng, keys):
    """Each in one lane of a row only; the last one later in the row than a higher one."""
    s = ordinary(rng, keys)
    places = (1, 2, 7, 150), (3, 4, keys // 2 + 7, 400), (5, 13, keys - 2, 900)
    for tile, row, column, score in places:
        s[row, tile * keys + column] = score
    s[4, 5 * keys] = 300
    return s


def scattered(rng, keys):
    s = 64 * rng.standard_normal((ROWS, TILES * keys))
    s[rng.random(s.shape) < 0.9] = -INF
    return s


def half_higher(half):
    """Where halves follow each other packed weights are scaled, by less and by more than they can
    be."""

    def scores(rng, keys):
        s = rising(100)(rng, keys)
        s += np.arange(ROWS)[:, None] * 12 * (np.arange(TILES * keys) % keys // (keys // 2) == half)
        return s

    return scores


def changed_from(place, amount):
    """By ``amount`` from one place among the tiles on; before it, if that is below 0."""

    def scores(rng, keys):
        after = np.arange(TILES * keys) >= abs(place) * keys
        return ordinary(rng, keys) + amount * (after if place > 0 else ~after)

    return scores


ALL = tuple(range(ROWS))
SCORES = {
    "ordinary": ordinary,
    "16 times": lambda rng, keys: 16 * ordinary(rng, keys),
    "16 times, rising": lambda rng, keys: 16 * rising(20)(rng, keys),
    "rising": rising(20),
    "rising fast": rising(160),
    "falling": rising(-20),
    "falling fast": rising(-160),
    "few rows rising": rising(200, [2, 11]),
    "one row falling": rising(-200, [5]),
    "spikes": spikes,
    "scattered": scattered,
    "first half higher": half_higher(0),
    "second half higher": half_higher(1),
    "no key in the first tile": masked(lambda tile, column, half: tile == 0),
    "no key of any row in the first tile": masked(lambda tile, column, half: tile == 0, ALL),
    "no key in the first halves": masked(lambda tile, column, half: column < half),
    "no key in the second halves": masked(lambda tile, column, half: column >= half),
    "no key of any row in the first halves": masked(lambda tile, column, half: column < half, ALL),
    "no key in the first half": masked(lambda tile, column, half: (tile == 0) & (column < half)),
    "no key in every other tile": masked(lambda tile, column, half: tile % 2 == 0),
    "the last key only": masked(lambda t, column, half: (t < TILES - 1) | (column < 2 * half - 1)),
    "the first key only": masked(lambda tile, column, half: (tile > 0) | (column > 0)),
    "no key": masked(lambda tile, column, half: True),
    "no key of any row": masked(lambda tile, column, half: True, ALL),
    "hugely negative": lambda rng, keys: ordinary(rng, keys) - 1e4,
    "hugely negative at first": changed_from(-1, -1e4),
    "hugely negative at last": changed_from(TILES - 1, -1e4),
    "huge": lambda rng, keys: ordinary(rng, keys) + 3e4,
    "huge at last": changed_from(TILES - 0.5, 3e4),
    "huge and hugely negative": lambda rng, keys: 3e4 * rng.uniform(-1, 1, (ROWS, TILES * keys)),
}


@cache
def case(name, narrow, form):
    """(warp, scores, values) of one of SCORES."""
    seed = list(SCORES).index(name)
    scores = SCORES[name](np.random.default_rng(seed), form.keys).astype(np.float32)
    warp, v = through(scores, narrow, form, seed)
    return warp, scores, v


# -- weights --------------------------------------------------------------------------------------


def test_constants():
    def number(text):
        return floats(int(text[2:], 16))

    assert number(hopper_weights.NO_OFFSET_CODE) == NO_OFFSET
    assert number(hopper_weights.LIMIT_CODE) == 2**softmax.SLACK.value


@both_widths
@every_form
@pytest.mark.parametrize("name", SCORES)
def test_many_tiles(name, narrow, form):
    warp, scores, v = case(name, narrow, form)
    assert_right(warp, scores, v)
    empty = np.isinf(scores).all(1)
    total, offset = by_row(warp.total), by_row(warp.offset)
    assert (total[empty] == 0).all() and (whole(warp.acc)[empty] == 0).all()
    assert ((offset == NO_OFFSET) == empty[:, None]).all()
    # a row's largest weight was over a half of the unit when its offset was set
    assert (total[~empty].sum(1) >= 0.5).all()


@both_widths
@every_form
@pytest.mark.parametrize("name", SCORES)
def test_weights_and_offsets_of_each_tile(name, narrow, form):
    warp, _, _ = case(name, narrow, form)
    former = np.full((ROWS, 4), NO_OFFSET)
    for weights, offset, factor, _ in warp.steps:
        assert (weights >= 0).all() and (weights <= 256).all()
        assert (offset == offset[:, :1]).all() and (offset == np.floor(offset)).all()
        assert (offset <= former).all()
        none = former == NO_OFFSET  # nor anything that the factor is of
        assert ((factor >= 0) & (factor <= 1)).all()
        # numbers below the normal ones may be 0
        expected = np.where(none, factor, np.exp2(offset - former))
        np.testing.assert_allclose(factor, expected, rtol=0, atol=2.0**-126)
        former = offset


@both_widths
@every_form
@pytest.mark.parametrize("mult", [1.0, 0.02, 3.7])
def test_other_scales(mult, narrow, form):
    scores = rising(30)(np.random.default_rng(40), form.keys).astype(np.float32)
    warp, v = through(scores, narrow, form, 41, mult)
    assert_right(warp, scores, v)


@both_widths
@every_form
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["ordinary", "16 times, rising", "no key in the first tile"])
def test_nan_and_inf_stay_in_their_row(name, value, narrow, form):
    """A result is NaN then, as that of softmax is."""
    for broken in (((0, 6, 5), (3, 13, 20)), ((0, 13, -24), (TILES - 1, 6, -1))):
        scores = SCORES[name](np.random.default_rng(51), form.keys).astype(np.float32)
        for tile, row, column in broken:
            scores[row, tile * form.keys + column % form.keys] = value
        warp, v = through(scores, narrow, form)
        assert_broken(warp, scores, v, [6, 13])


@both_widths
@every_form
def test_rows_of_nan_or_of_inf(narrow, form):
    scores = ordinary(np.random.default_rng(50), form.keys).astype(np.float32)
    scores[1] = NAN
    scores[9] = INF
    scores[4, : form.keys] = NAN
    scores[12, : form.keys] = INF
    warp, v = through(scores, narrow, form)
    assert_broken(warp, scores, v, [1, 4, 9, 12])


# -- the short way --------------------------------------------------------------------------------


@both_widths
@every_form
def test_eight_scores_begin_a_row_and_then_no_maxima_are_sought(narrow, form):
    scores = np.random.default_rng(60).uniform(-8, 8, (ROWS, TILES * form.keys))
    scores -= 20 * (np.arange(TILES * form.keys) // form.keys % 2)
    warp, v = through(scores.astype(np.float32), narrow, form)
    assert_right(warp, scores.astype(np.float32), v)
    first, *others = (step[-1] for step in warp.steps)
    kinds = "shfl", "max", "mul", "ex2"
    wide = form.keys > KEYS  # begins with the largest of all scores
    columns = form.keys if wide else 8
    assert times(first, "shfl") == 4 and times(first, "ex2") == form.keys // 2 + 2 * wide
    assert times(first, "max") == columns // 2 + 2
    for ran in others:
        assert [times(ran, kind) for kind in kinds] == [0, 0, 0, form.keys // 2]
    begun = np.floor(-scores[:, :columns].astype(np.float32).max(1) * np.float32(warp.mult))
    np.testing.assert_array_equal(warp.steps[0][1][:, 0], begun)


@both_widths
@every_form
@pytest.mark.parametrize("half", [0, 1])
def test_maxima_are_sought_in_the_half_that_outgrew(half, narrow, form):
    """Or in both, where they are weighed together."""
    scores = np.random.default_rng(61).uniform(-8, 8, (ROWS, TILES * form.keys)).astype(np.float32)
    scores[:, 0] = 8  # the largest of all rows but one, and among those that begin a row
    scores[10, 2 * form.keys + half * form.keys // 2 + 3] = 300
    warp, v = through(scores, narrow, form)
    assert_right(warp, scores, v)
    counts = [step[-1] for step in warp.steps]
    assert [times(ran, "shfl") for ran in counts[1:]] == [0, 4, 0, 0, 0]
    assert times(counts[2], "max") == form.part // 2 + 2
    known = half * form.keys // 2 // form.part  # parts of the tile that are weighed already
    assert times(counts[2], f"mul.{narrow}") == 8 * known
    for row in range(ROWS):  # other rows of the warp look as well, and keep their offset
        assert (warp.steps[2][1][row] == warp.steps[1][1][row]).all() == (row != 10)


@both_widths
@every_form
@pytest.mark.parametrize(("score", "grown"), [(8, False), (9, True)])
@pytest.mark.parametrize("column", [0, -1])
def test_weights_of_256_are_kept_and_no_larger_ones(score, grown, column, narrow, form):
    scores = np.zeros((ROWS, 2 * form.keys), np.float32)
    scores[:, form.keys :] = -INF
    scores[:, form.keys :][:, column] = score
    warp, v = through(scores, narrow, form, mult=1.0)
    assert_right(warp, scores, v)
    weights, offset, factor, ran = warp.steps[1]
    assert (times(ran, "shfl") > 0) == grown
    assert (offset == -score * grown).all() and (factor == 2.0 ** (-score * grown)).all()
    assert (weights[:, column] == 2.0 ** (score * (not grown))).all()
    assert weights.sum() == weights[:, column].sum()


# -- masks and factors ----------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [KEYS, KEYS // 2])
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_keep_code(share, keys):
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
        expected = np.where(keep, s, -INF)[:, :keys]
        np.testing.assert_array_equal(kept_scores(s[:, :keys], word), expected)


@both_widths
@every_form
def test_kept_scores_are_weighed(narrow, form):
    rng = np.random.default_rng(71)
    scores = ordinary(rng, form.keys).astype(np.float32)
    seen = []
    keys = min(KEYS, form.keys)
    for at in range(0, scores.shape[1], keys):
        word = rng.integers(0, 2**32, LANES, np.uint32)
        kept = kept_bits(word)[:, :keys]
        tile = np.where(kept, scores[:, at : at + keys], np.float32(NAN))
        seen.append(kept_scores(tile, word))
    scores = np.concatenate(seen, 1)
    assert not np.isnan(scores).any() and np.isinf(scores).any()
    warp, v = through(scores, narrow, form)
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
