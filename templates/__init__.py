"""Parametrised kernels for fusion segments, and with them the operators they call."""

from stof_compile.templates.base import Template
from stof_compile.templates.cublas_linear import CublasLinear
from stof_compile.templates.hopper_linear import HopperLinear
from stof_compile.templates.tilelang_chain import TileLangChain
from stof_compile.templates.tilelang_linear import TileLangLinear
from stof_compile.templates.tilelang_linear_norm import TileLangLinearNorm
from stof_compile.templates.triton_gated_linear import TritonGatedLinear
from stof_compile.templates.triton_linear import TritonLinear
from stof_compile.templates.triton_linear_chain import TritonLinearChain
from stof_compile.templates.triton_linear_norm import TritonLinearNorm
from stof_compile.templates.triton_norm import TritonNorm
from stof_compile.templates.triton_pointwise import TritonPointwise
from stof_compile.templates.triton_rope_linear import TritonRopeLinear

import stof_compile.ops_cublas_linear
import stof_compile.ops_hopper_linear
import stof_compile.ops_linear
import stof_compile.ops_norm
import stof_compile.ops_pointwise
import stof_compile.ops_rope_linear
import stof_compile.ops_tilelang  # noqa: F401

TEMPLATES: tuple[Template, ...] = (
    TritonLinear(),
    HopperLinear(),
    TritonGatedLinear(),
    TritonRopeLinear(),
    TritonLinearChain(),
    TritonLinearNorm(),
    TritonNorm(),
    TritonPointwise(),
    TileLangLinear(),
    TileLangLinearNorm(),
    TileLangChain(),
    CublasLinear(),
)
"""Every template the search may build, in the order in which it tries them."""
