"""Exact GELU of half types, written with half the instructions.

Inductor computes ``erf`` in fp32 with two polynomials of which each warp runs both: on an H200
that, not memory, bounds the kernel. In half precision one formula for the tail of the normal
distribution is enough. With a = |x|, z = a / sqrt(2) and t = 1 / (1 + z / 2)

    erfc(z) / 2 = t * 2 ** (Q(t) - z ** 2 * log2(e)),    Q of degree 5

holds to 9e-6, relative, for every z: GELU in fp16 or bf16 is then the exact value, rounded, more
often than with an fp32 ``erf``. The formula is ordinary torch operations, so Inductor fuses it as
it would fuse the GELU.
Source: the form of the approximation is that of W. H. Press et al., Numerical Recipes, erfc; Q was
fitted anew (minimax over 0.14 <= t <= 1).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from stof_compile.emit import emit

HALF_TYPES = (torch.float16, torch.bfloat16)
_GELU = (torch.nn.functional.gelu, torch._C._nn.gelu)
# Q, lowest power first
_Q = (-2.8271257, 1.4674070, 0.37257878, 0.67364152, -1.0130376, 0.32653764)
_SQRT_HALF = 0.70710678
_LOG2E = 1.44269504


def shorten_gelu(gm: GraphModule) -> int:
    """Rewrite every exact GELU of a half type on CUDA; returns how many.

    For graphs that record no gradients: the derivative of the formula is longer than GELU's own.
    """
    count = 0
    for node in list(gm.graph.nodes):
        if _is_exact_half_gelu(node):
            x = node.args[0]
            build = partial(short_gelu, dtype=x.meta["example_value"].dtype)
            (short,) = emit(gm.graph, node, node, build, x)
            node.replace_all_uses_with(short)
            gm.graph.erase_node(node)
            count += 1
    return count


def short_gelu(x: Any, dtype: torch.dtype) -> Any:
    """GELU of a tensor (or proxy) of a half dtype, computed in fp32: x * P(N(0, 1) <= x)."""
    wide = x.float()
    a = wide.abs()
    root = torch.rsqrt(a * (_SQRT_HALF / 2) + 1.0)  # t by its root: one instruction, no division
    t = root * root
    q = t * _Q[-1] + _Q[-2]
    for coefficient in _Q[-3::-1]:
        q = q * t + coefficient
    tail = t * torch.exp2(q - a * a * (_LOG2E / 2))
    return (wide * torch.where(wide >= 0, 1.0 - tail, tail)).to(dtype)


def _is_exact_half_gelu(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _GELU or len(node.args) != 1:
        return False
    value = node.args[0].meta.get("example_value") if isinstance(node.args[0], Node) else None
    return (
        node.kwargs.get("approximate", "none") == "none"
        and set(node.kwargs) <= {"approximate"}
        and isinstance(value, torch.Tensor)
        and value.device.type == "cuda"
        and value.dtype in HALF_TYPES
    )
