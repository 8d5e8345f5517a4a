"""The initial scheme: rules and their limits."""

from typing import NamedTuple

import pytest

from stof_compile.fusion.op_kind import CONTRACTIONS
from stof_compile.search.initial import (
    CHAIN_ROWS,
    GEMMS,
    NORM_COLUMNS,
    InitialLimits,
    initial_scheme,
    limits_of,
)


class Op(NamedTuple):
    name: str
    columns: int = 768
    compute_intensive: bool = False


def linear(columns=768):
    return Op("linear", columns, True)


BIAS, ADD, GELU, NORM = Op("bias_add"), Op("residual_add"), Op("gelu"), Op("layer_norm")
ATTENTION = Op("attention", 768, True)
LARGE = CHAIN_ROWS + 1


def lengths(kinds, rows=LARGE, illegal=()):
    scheme = initial_scheme(kinds, rows, lambda *s: "no template" if s in illegal else None)
    return scheme.lengths


@pytest.mark.parametrize(
    ("kinds", "rows", "expected"),
    [
        ([linear(), BIAS, GELU, linear()], CHAIN_ROWS, (4,)),
        ([linear(), BIAS, GELU, linear()], LARGE, (1, 1, 1, 1)),
        ([linear(), linear(), linear()], 1, (2, 1)),
        ([linear(), NORM, linear()], 1, (1, 1, 1)),
        ([linear(), ATTENTION, linear()], 1, (1, 1, 1)),
        ([BIAS, NORM], LARGE, (2,)),
        ([BIAS, ADD, NORM], LARGE, (3,)),
        ([BIAS, GELU, NORM], LARGE, (1, 1, 1)),
        ([linear(NORM_COLUMNS), BIAS, NORM], LARGE, (3,)),
        ([linear(NORM_COLUMNS), NORM], LARGE, (2,)),
        ([linear(NORM_COLUMNS + 1), BIAS, NORM], LARGE, (1, 2)),
        ([ATTENTION, NORM], LARGE, (1, 1)),
        ([NORM], 1, (1,)),
    ],
    ids=[
        "chain of few rows",
        "chain of many rows",
        "two of three GEMMs",
        "norm breaks a chain",
        "attention breaks a chain",
        "bias and norm",
        "bias, residual and norm",
        "no norm behind the bias",
        "narrow GEMM with norm",
        "narrow GEMM without bias",
        "wide GEMM left alone",
        "attention left alone",
        "one op",
    ],
)
def test_rules(kinds, rows, expected):
    assert lengths(kinds, rows) == expected


def test_layer_of_an_encoder():
    layer = [ATTENTION, linear(), BIAS, ADD, NORM, linear(3072), BIAS, GELU]
    layer += [linear(), BIAS, ADD, NORM]
    assert lengths(layer, 8 * 512) == (1, 1, 3, 1, 1, 1, 1, 3)
    assert lengths(layer, 128) == (1, 1, 3, 4, 3)


def test_illegal_rule_gives_way_to_the_next():
    kinds = [linear(64), BIAS, NORM]
    assert lengths(kinds, illegal={(0, 3)}) == (1, 2)
    assert lengths(kinds, illegal={(0, 3), (1, 3)}) == (1, 1, 1)


def test_names_are_those_of_fusion():
    assert GEMMS <= CONTRACTIONS


def test_empty_chain_is_refused():
    with pytest.raises(ValueError, match="at least one segment"):
        lengths([])


def test_hopper_has_limits_of_its_own():
    hopper, other = limits_of((9, 0)), limits_of((8, 0))
    assert hopper.chain_rows == 0 and hopper.few_rows == 256 and other == InitialLimits()
    assert limits_of(None) == InitialLimits()


def test_a_gemm_starts_with_its_activation_and_with_few_rows_with_its_norm():
    kinds = [linear(3072), GELU, linear(), ADD, NORM]
    found = initial_scheme(kinds, 128, lambda a, b: None, limits=limits_of((9, 0)))
    assert found.lengths == (2, 3)
    found = initial_scheme(kinds, 4096, lambda a, b: None, limits=limits_of((9, 0)))
    assert found.lengths == (2, 1, 2)
    found = initial_scheme(kinds, 4096, lambda a, b: None, limits=limits_of((9, 0)), searched=False)
    assert found.lengths == (1, 1, 1, 2)
