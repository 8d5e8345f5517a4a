"""Parametrised kernels for fusion segments."""

TEMPLATES: tuple[object, ...] = ()
"""Every template the search may build, in the order in which it tries them."""
