"""The interpreter of masks that a model computes itself."""

import operator

import pytest
import torch

from stof_compile.errors import StofMaskError
from stof_compile.masks.computed import run_text

SPELLED = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "and_", "or_", "xor")


@pytest.mark.parametrize("name", SPELLED)
def test_an_operator_spelled_as_a_method(name):
    """Dynamo of torch 2.11 writes ``x == y`` as ``x.__eq__(y)``."""
    here, there = torch.arange(6), torch.tensor([3, 1, 2, 0, 4, 7])
    text = f"def value(a, b):\n    c = a.__{name.rstrip('_')}__(b)\n    return c"
    assert torch.equal(run_text(text, (here, there)), getattr(operator, name)(here, there))


@pytest.mark.parametrize("name", ["__setattr__", "__class__", "__reduce__", "_make_subclass"])
def test_no_other_private_method(name):
    with pytest.raises(StofMaskError, match=f"may not use 'a.{name}'"):
        run_text(f"def value(a):\n    return a.{name}()", (torch.ones(2),))
