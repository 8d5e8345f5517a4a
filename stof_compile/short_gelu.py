"""Exact GELU of half types, written with half the instructions.

Inductor computes ``erf`` in fp32 with two polynomials of which each warp runs both: on an H200
that, not memory, bounds the kernel. In half precision one formula for the tail of the normal
distribution is enough. With a = |x|

    P(N(0, 1) > a) = erfc(a / sqrt(2)) / 2 = 2 ** Q(a)
    Q(a) = -1 + S * (2 ** (-R a) - 1) - a * (C1 + a * (C2 + a * (C3 + a * C4)))

and C3 = C4 = 0 for fp16. A GPU computes the powers of two in a unit of their own, beside ordinary
arithmetic, so the power within Q replaces powers of a, of which a polynomial as good has three
more (degree 6, or 9 for bf16). Before it is rounded the result is off by at most 0.08 units in the
last place of fp16 (so by 4e-5 of its size up to a = 3, by 3e-3 at 5.5, where fp16 has one
bit or two left) and by 0.03 of bf16 (1.3e-4), but for a GPU's powers of two below 2 ** -126, which
are 0: GELU of -13 is 8e-38. GELU(x) is
max(x, 0) - a * 2 ** Q(a) with a no larger than 13 (16 for bf16), rounded: at most one unit in the
last place from the exact value. At 13 less than 1e-33 is left, which stays nothing where what
follows reads the result before it is rounded: a gate, or what Inductor fuses. The maximum is taken
as x / 2 + |x / 2|, which is NaN where PyTorch's is, at -inf too. Of -0.0 it gives 0.0, PyTorch
-0.0: another order of these sums would keep the sign and lose the tail. The formula is ordinary
torch operations, so Inductor fuses it as it would fuse the GELU.
Source: the numbers were fitted to log2 of the tail in fp64: weighted minimax (units in the last
place of the result) by Lawson's iteration around a least-squares fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from stof_compile.dead_code import erase_dead
from stof_compile.emit import emit, fake_result

HALF_TYPES = (torch.float16, torch.bfloat16)
_GELU = (torch.nn.functional.gelu, torch._C._nn.gelu)


class Tail(NamedTuple):
    """Numbers of Q, positive as the module has them; ``share + 1`` is exact in fp32."""

    share: float  # S
    rate: float  # R
    powers: tuple[float, ...]  # C1, C2 and for bf16 C3, C4
    largest: float  # a is asked for no further


GELU_TAIL: dict[torch.dtype, Tail] = {
    torch.float16: Tail(1.1252787, 0.9528983, (0.40767052, 0.70441617), 13.0),
    torch.bfloat16: Tail(
        0.90591097, 1.0188546, (0.5108682, 0.68464665, 1.6298482e-3, -3.1196137e-5), 16.0
    ),
}


def shorten_gelu(gm: GraphModule) -> int:
    """Rewrite every exact GELU of a half type on CUDA; returns how many.

    For graphs that record no gradients: the derivative of the formula is longer than GELU's own.
    """
    count = 0
    for node in list(gm.graph.nodes):
        if _is_exact_half_gelu(node):
            x = node.args[0]
            build = partial(short_gelu, dtype=x.meta["example_value"].dtype)
            # some 20 steps a layer, all of the shape and dtype of the first
            (short,) = emit(gm.graph, node, node, build, x, value_of=_as_the_first())
            if "example_value" in node.meta:
                short.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(short)
            gm.graph.erase_node(node)
            count += 1
    if count:
        erase_dead(gm.graph)
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
    tail = GELU_TAIL[dtype]
    wide = x.float()
    a, half = wide.abs().clamp(max=tail.largest), wide * 0.5
    q = a * -tail.powers[-1] - tail.powers[-2]
    for factor in (*tail.powers[-3::-1], tail.share + 1):
        q = q * a - factor
    q = torch.exp2(a * -tail.rate) * tail.share + q
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
