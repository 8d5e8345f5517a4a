"""Checks of any template: its refusals, its results against the recipe, its compiled calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from close import assert_close
from norm_recipes import compiled_and_captured, machine

HOPPER = machine(90)


def refusal_of(template, recipe, device=HOPPER):
    """Why a template does not take a recipe, which it must not."""
    reason = template.refusal(recipe, device)
    assert reason is not None and not template.accepts(recipe, device)
    return reason


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory is NaN until something is written to it."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def call_of(template, recipe, config=None):
    """The call a template builds of a recipe that it takes; by default of its first config."""
    assert template.refusal(recipe, HOPPER) is None
    return template.build(recipe, config or template.first(recipe, HOPPER))


def run_template(template, recipe, operands, config=None):
    """The result of a template's call."""
    return call_of(template, recipe, config).run(operands)


def check_template(template, recipe, operands, config=None, scale=1.0):
    """Run a template's call and compare it with the recipe in fp64; returns the result."""
    with poisoned_memory():
        out = run_template(template, recipe, operands, config)
    assert out.is_contiguous() and out.dtype == recipe.result.dtype
    assert out.shape == recipe.result.shape
    assert_close(out, template.reference(recipe, operands, torch.float64), scale=scale)
    return out


def check_compiled(template, recipe, operands, config=None, scale=1.0):
    """The same under Inductor with CUDA graphs and in a graph captured by hand."""
    call = call_of(template, recipe, config)
    wanted = template.reference(recipe, operands, torch.float64)
    for out in compiled_and_captured(lambda *given: call.run(given), *operands):
        assert_close(out, wanted, scale=scale)


def check_operator(operator, *arguments):
    """Schema and fake result of an operator; an interpreted kernel cannot be traced by AOT."""
    tests = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(operator.default, arguments, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
