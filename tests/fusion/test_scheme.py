"""Codes of schemes: one to one with the partitions of a chain."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stof_compile.fusion.scheme import Scheme

BERT = Scheme((1, 5, 3, 3, 2))  # the paper: #2-#6 (MHA), #7-#9, #10-#12, #13-#14
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30).map(tuple)


@pytest.mark.parametrize("ops", range(1, 13))
def test_every_code_is_one_scheme(ops):
    schemes = [Scheme.decode((0, *rest)) for rest in product((0, 1), repeat=ops - 1)]
    assert len(set(schemes)) == 2 ** (ops - 1)
    assert len({scheme.hex for scheme in schemes}) == 2 ** (ops - 1)
    for scheme in schemes:
        assert scheme.ops == ops and scheme.code[0] == 0
        assert Scheme.decode(scheme.code) == scheme
        assert Scheme.from_hex(scheme.hex, ops) == scheme


@given(LENGTHS)
def test_round_trip(lengths):
    scheme = Scheme(lengths)
    assert Scheme.decode(scheme.code) == scheme
    assert Scheme.from_hex(scheme.hex, scheme.ops) == scheme
    assert Scheme.decode([1 - bit for bit in scheme.code]) == scheme  # the complement


@given(LENGTHS)
def test_segments_cover_the_chain(lengths):
    scheme = Scheme(lengths)
    covered = [op for start, stop in scheme.segments for op in range(start, stop)]
    assert covered == list(range(scheme.ops))
    for start, stop in scheme.segments:
        assert len(set(scheme.code[start:stop])) == 1
        assert stop == scheme.ops or scheme.code[stop] != scheme.code[start]


def test_paper_example_of_bert():
    assert BERT.code == (0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0)
    assert BERT.segments == ((0, 1), (1, 6), (6, 9), (9, 12), (12, 14))
    assert BERT.hex == "1f1c"  # 14 bits in four digits
    assert Scheme.from_hex("1F1C", 14) == BERT


def test_initial_value_of_the_artifact():
    scheme = Scheme.from_hex(f"{41115:04x}", 16)
    assert scheme == Scheme.decode([int(bit) for bit in "1010000010011011"])
    assert scheme.lengths == (1, 1, 1, 5, 1, 2, 2, 1, 2)


def test_hex_is_padded_on_the_left():
    assert Scheme((5,)).hex == "00"
    assert Scheme((4, 1)).hex == "01"
    assert Scheme.singletons(5).code == (0, 1, 0, 1, 0)
    assert Scheme.singletons(5).hex == "0a"


def test_scheme_is_a_value():
    assert Scheme([2, 1]) == Scheme((2, 1)) and len({Scheme((2, 1)), Scheme((2, 1))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        BERT.lengths = (14,)


def test_merge():
    assert BERT.merge(1, 2).lengths == (1, 8, 3, 2)
    assert BERT.merge(0, 4).lengths == (14,)


def test_move_boundary():
    assert BERT.move_boundary(1, 1).lengths == (1, 6, 2, 3, 2)
    assert BERT.move_boundary(1, -2).lengths == (1, 3, 5, 3, 2)
    assert BERT.move_boundary(3, 2).lengths == (1, 5, 3, 5)  # the right one vanishes
    assert BERT.move_boundary(0, -1).lengths == (6, 3, 3, 2)  # the left one vanishes


@given(LENGTHS, st.data())
def test_moves_keep_the_ops(lengths, data):
    scheme = Scheme(lengths)
    if len(lengths) < 2:
        return
    index = data.draw(st.integers(0, len(lengths) - 2))
    by = data.draw(st.integers(-lengths[index], lengths[index + 1]).filter(bool))
    assert scheme.move_boundary(index, by).ops == scheme.ops
    last = data.draw(st.integers(index + 1, len(lengths) - 1))
    merged = scheme.merge(index, last)
    assert merged.ops == scheme.ops and len(merged.lengths) == len(lengths) - (last - index)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Scheme(()), "at least one segment"),
        (lambda: Scheme((2, 0)), "segment 1 .* length 0"),
        (lambda: Scheme((True,)), "ints >= 1"),
        (lambda: Scheme.singletons(0), "at least one segment"),
        (lambda: Scheme.decode([]), "at least one segment"),
        (lambda: Scheme.decode([0, 2]), "bit 1 .* is 2"),
        (lambda: Scheme.from_hex("1f1c", 0), "ops=0"),
        (lambda: Scheme.from_hex("1f1", 14), "4 hexadecimal digits"),
        (lambda: Scheme.from_hex("0x1f", 14), "hexadecimal digits"),
        (lambda: Scheme.from_hex("7f1c", 14), "needs 15 bits, the chain has 14"),
        (lambda: BERT.merge(2, 2), "cannot merge segments 2 to 2 of 5"),
        (lambda: BERT.merge(3, 5), "cannot merge"),
        (lambda: BERT.merge(-1, 1), "cannot merge"),
        (lambda: BERT.move_boundary(4, 1), "no boundary right of segment 4"),
        (lambda: BERT.move_boundary(1, 0), "by 0"),
        (lambda: BERT.move_boundary(1, 4), "segments of 5 and 3 ops by 4"),
        (lambda: BERT.move_boundary(1, -6), "by -6"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()
