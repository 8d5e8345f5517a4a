"""Exact GELU of half types, written with half the instructions.

Inductor computes ``erf`` in fp32 with two polynomials of which each warp runs both: on an H200
that, not memory, bounds the kernel. In half precision one formula for the tail of the normal
distribution is enough. With a = |x|

    P(N(0, 1) > a) = erfc(a / sqrt(2)) / 2 = 2 ** Q(a),    Q(0) = -1

where Q has degree 6 for fp16, relative error 4.4e-5 up to a = 5.9, where GELU of -a leaves fp16,
and degree 9 for bf16, 1.2e-5 up to 5.9 and 2.4e-4 up to a = 13, where it leaves bf16. GELU(x) is
max(x, 0) - a * 2 ** Q(a) with a no larger than 13 (16 for bf16), rounded: at most one unit in the
last place from the exact value. At 13 less than 1e-33 is left, which stays nothing where what
follows reads the result before it is rounded: a gate, or what Inductor fuses. The maximum is taken
as x / 2 + |x / 2|, which is NaN where PyTorch's is, at -inf too. Of -0.0 it gives 0.0, PyTorch
-0.0: another order of these sums would keep the sign and lose the tail. The formula is ordinary
torch operations, so Inductor fuses it as it would fuse the GELU.
Source: Q was fitted to log2 of the tail in fp64: weighted minimax by Lawson's iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from stof_compile.emit import emit, fake_result

HALF_TYPES = (torch.float16, torch.bfloat16)
_GELU = (torch.nn.functional.gelu, torch._C._nn.gelu)
# by dtype: Q, lowest power first, and the largest a it is asked for
GELU_TAIL: dict[torch.dtype, tuple[tuple[float, ...], float]] = {
    torch.float16: (
        (-1.0, -1.1505447, -0.46068893, -0.051570752, 7.3175825e-3, -6.2941879e-4, 2.4037273e-5),
        13.0,
    ),
    torch.bfloat16: (
        (
            -1.0, -1.1512574, -0.45824954, -0.054387882, 8.8414437e-3,
            -1.0607141e-3, 8.8966007e-5, -4.8776738e-6, 1.5587791e-7, -2.1911338e-9,
        ),
        16.0,
    ),
}  # fmt: skip


def shorten_gelu(gm: GraphModule) -> int:
    """Rewrite every exact GELU of a half type on CUDA; returns how many.

    For graphs that record no gradients: the derivative of the formula is longer than GELU's own.
    """
    count = 0
    for node in list(gm.graph.nodes):
        if _is_exact_half_gelu(node):
            x = node.args[0]
            build = partial(short_gelu, dtype=x.meta["example_value"].dtype)
            # some 25 steps a layer, all of the shape and dtype of the first
            (short,) = emit(gm.graph, node, node, build, x, value_of=_as_the_first())
            if "example_value" in node.meta:
                short.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(short)
            gm.graph.erase_node(node)
            count += 1
    return count


def _as_the_first() -> Callable[[Node], Any]:
    """A function of steps that runs the first it is asked for, and answers with its value.

    One value for all makes them look like views of each other: nothing asks for that afterwards.
    """
    first: list[Any] = []

    def value_of(step: Node) -> Any:
        if not first:
            first.append(fake_result(step))
        return first[0]

    return value_of


def short_gelu(x: Any, dtype: torch.dtype) -> Any:
    """GELU of a tensor (or proxy) of a half dtype, computed in fp32."""
    factors, largest = GELU_TAIL[dtype]
    wide = x.float()
    a, half = wide.abs().clamp(max=largest), wide * 0.5
    q = a * factors[-1] + factors[-2]
    for factor in factors[-3::-1]:
        q = q * a + factor
    return ((half + half.abs()) - a * torch.exp2(q)).to(dtype)


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
