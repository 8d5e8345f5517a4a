"""Parametrised kernels for fusion segments."""

from stof_compile.templates.base import Template

TEMPLATES: tuple[Template, ...] = ()
"""Every template the search may build, in the order in which it tries them."""
