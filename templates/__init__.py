"""Parametrised kernels for fusion segments, and with them the operators they call."""

from stof_compile.templates.base import Template
from stof_compile.templates.hopper_linear import HopperLinear
from stof_compile.templates.triton_gated_linear import TritonGatedLinear
from stof_compile.templates.triton_linear import TritonLinear
from stof_compile.templates.triton_linear_chain import TritonLinearChain
from stof_compile.templates.triton_linear_norm import TritonLinearNorm
from stof_compile.templates.triton_norm import TritonNorm
from stof_compile.templates.triton_pointwise import TritonPointwise

import stof_compile.ops_hopper_linear
import stof_compile.ops_linear
import stof_compile.ops_norm
import stof_compile.ops_pointwise  # noqa: F401

TEMPLATES: tuple[Template, ...] = (
    TritonLinear(),
    HopperLinear(),
    TritonGatedLinear(),
    TritonLinearChain(),
    TritonLinearNorm(),
    TritonNorm(),
    TritonPointwise(),
)
"""Every template the search may build, in the order in which it tries them."""
