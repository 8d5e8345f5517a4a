"""Beyond torch's limit of graphs a function runs without STOF: said before a mask is lost."""

import logging

import pytest
import torch
from running import NO_TIMING, without_inductor
from torch.nn.functional import scaled_dot_product_attention as attention

from stof_compile import masks


@pytest.fixture(autouse=True)
def _quick(monkeypatch, fresh_dynamo):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)


def said(caplog, lengths, options, **limits):
    fast = torch.compile(attention, backend="stof", dynamic=False, options=options)
    with (
        torch._dynamo.config.patch(recompile_limit=3, **limits),
        caplog.at_level(logging.WARNING, logger="stof_compile"),
        torch.no_grad(),
    ):
        for length in lengths:
            fast(*torch.randn(3, 1, 2, length, 16))
    return [r.getMessage() for r in caplog.records if "recompile_limit" in r.getMessage()]


WITH_MASK = {**NO_TIMING, "mask": masks.causal()}


def test_the_last_graph_is_announced_once(caplog):
    (message,) = said(caplog, (8, 9, 10, 9, 8), WITH_MASK)
    assert "3 of 3" in message and "without the mask" in message


@pytest.mark.parametrize(
    ("lengths", "options", "limits"),
    [
        ((8, 9, 8), WITH_MASK, {}),
        ((8, 9, 10), NO_TIMING, {}),
        ((8, 9, 10), WITH_MASK, {"fail_on_recompile_limit_hit": True}),
    ],
    ids=["before it", "no mask", "torch raises"],
)
def test_nothing_is_said_without_need(lengths, options, limits, caplog):
    assert said(caplog, lengths, options, **limits) == []
