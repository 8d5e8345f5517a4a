"""Fixtures of the tests of templates."""

import pytest
import template_checks


@pytest.fixture
def poisoned_memory():
    """Memory that nothing was written to is NaN, in the whole test."""
    with template_checks.poisoned_memory():
        yield
