"""FlexAttention over tile lists as a graph, written down instead of traced, and its compilation.

Dynamo takes 0.25 s to trace the call, each time anew; Inductor's disk caches know the rest.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.proxy import GraphAppendingTracer

# What FlexAttention's operator takes (torch 2.11 to 2.13); where it takes anything else, the call
# is traced.
OPERANDS = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options",
    "score_mod_other_buffers", "mask_mod_other_buffers",
)  # fmt: skip
# As flex_attention() fills them in where nothing is asked for, on a CPU.
KERNEL_OPTIONS: dict[str, Any] = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": False,
    "OUTPUT_MAX": False,
}


class FlexOperands(NamedTuple):
    """What one call of FlexAttention reads.

    Args:
        lists: part counts int32 [B|1, H|1, rows], part columns [.., rows, cols], the same of full
            tiles. numbers: int64 [6], the band's five and the position of the first query.
        tile_id: bitmap number of every tile, int32 [planes, rows, cols]. planes: int [B, H], the
            row of ``tile_id``. octets: int32 [part, block_k / 8, block_q], eight keys a number.
        kept: bool [B, K], True where the key may be attended, or None.
        softcap: fp32 scalar, or None. scale: text of a float.
        block: (block_q, block_k). banded: part tiles follow from ``numbers``, not from ``octets``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lists: list[Tensor]
    numbers: Tensor
    tile_id: Tensor
    planes: Tensor
    octets: Tensor
    kept: Tensor | None
    softcap: Tensor | None
    scale: str
    block: tuple[int, int]
    banded: bool


def in_band(q_idx: Any, k_idx: Any, numbers: Any) -> Any:
    """Whether a query may attend a key under a band; tensors or proxies."""
    position = q_idx + numbers[5]
    d = k_idx - position
    near = (d >= numbers[0]) & (d <= numbers[1])
    return (near | (position < numbers[2]) | (k_idx < numbers[3])) & (d <= numbers[4])


def in_bitmap(
    plane: Any, q_idx: Any, k_idx: Any, tile_id: Any, octets: Any, block: tuple[int, int]
) -> Any:
    """Whether a query may attend a key by the bitmap of their tile; tensors or proxies."""
    tile = tile_id[plane, q_idx // block[0], k_idx // block[1]]
    octet = octets[tile, (k_idx % block[1]) // 8, q_idx % block[0]]
    return ((octet >> (k_idx % 8)) & 1) != 0


def capped(score: Any, softcap: Any) -> Any:
    """A score below the softcap; tensors or proxies."""
    return softcap * torch.tanh(score / softcap)


def only_kept(score: Any, key_kept: Any) -> Any:
    """A score, of a key that may be attended; tensors or proxies."""
    return torch.where(key_kept, score, -float("inf"))


@cache
def can_be_written() -> bool:
    """Whether this torch has the operator that :func:`flex_graph` writes down."""
    from torch._higher_order_ops.flex_attention import flex_attention

    return tuple(inspect.signature(type(flex_attention).__call__).parameters)[1:] == OPERANDS


def flex_graph(given: FlexOperands) -> tuple[GraphModule, list[Tensor]]:
    """Write the call of FlexAttention down, as Dynamo would.

    Args:
        given: the values are not read.
    Returns:
        A graph and its inputs; its one result is [batch, heads, q_len, head_dim].
    """
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import BlockMask

    of_scores = {"softcap": given.softcap, "kept": given.kept}
    of_mask = {"numbers": given.numbers}
    if not given.banded:
        of_mask = {"tile_id": given.tile_id, "planes": given.planes, "octets": given.octets}
    operands = {name: getattr(given, name) for name in "qkv"}
    operands |= {f"list_{i}": array for i, array in enumerate(given.lists)}
    operands |= of_mask | {name: t for name, t in of_scores.items() if t is not None}

    root, graph = torch.nn.Module(), Graph()
    root.score_mod = _score_graph(tuple(n for n in of_scores if n in operands))
    root.mask_mod = _mask_graph(tuple(of_mask), given.block)
    nodes = {name: graph.placeholder(name) for name in operands}
    functions = {name: graph.get_attr(name) for name in ("score_mod", "mask_mod")}
    # whatever this torch holds of a block mask, in its order
    counts, columns, full_counts, full_columns = given.lists
    told: tuple[Any, ...] = BlockMask.from_kv_blocks(
        counts,
        columns,
        full_counts,
        full_columns,
        BLOCK_SIZE=given.block,
        mask_mod=root.mask_mod,
        seq_lengths=(given.q.shape[2], given.k.shape[2]),
        compute_q_blocks=False,
    ).as_tuple()
    node_of: dict[int, Any] = {id(t): nodes[f"list_{i}"] for i, t in enumerate(given.lists)}
    node_of[id(root.mask_mod)] = functions["mask_mod"]
    block_mask = tuple(node_of.get(id(part), part) for part in told)
    assert not any(isinstance(part, Tensor) for part in block_mask), (
        "the graph's tensors are inputs"
    )
    results = graph.call_function(
        flex_attention,
        (
            *(nodes[name] for name in "qkv"),
            functions["score_mod"],
            block_mask,
            float(given.scale),
            KERNEL_OPTIONS,
            tuple(nodes[name] for name in of_scores if name in nodes),
            tuple(nodes[name] for name in of_mask),
        ),
    )
    graph.output((graph.call_function(operator.getitem, (results, 0)),))
    return GraphModule(root, graph), list(operands.values())


def compiled_flex(given: FlexOperands) -> Callable[[FlexOperands], Tensor]:
    """Compile the call for operands of just these shapes and strides, without running it."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._python_dispatch import _disable_current_modes

    graph, inputs = flex_graph(given)
    mode = FakeTensorMode(shape_env=ShapeEnv())  # Inductor's caches ask for symbols, even if none
    # as Dynamo would be here: alone, outside the modes and the trace of whoever is calling
    with compile_lock, _disable_current_modes(), torch.no_grad(), tracing(TracingContext(mode)):
        fakes = [mode.from_tensor(t, static_shapes=True) for t in inputs]
        compiled: Any = compile_fx(graph, fakes)

    def run(now: FlexOperands) -> Tensor:
        result: Tensor = compiled(*_inputs(now))[0]
        return result

    return run


def _inputs(given: FlexOperands) -> list[Tensor]:
    """The inputs of the graph, in its order."""
    mask = [given.numbers] if given.banded else [given.tile_id, given.planes, given.octets]
    scores = [t for t in (given.softcap, given.kept) if t is not None]
    return [given.q, given.k, given.v, *given.lists, *mask, *scores]


def _score_graph(buffers: Sequence[str]) -> GraphModule:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any, **held: Any) -> Any:
        if "softcap" in held:
            score = capped(score, held["softcap"])
        if "kept" in held:
            score = only_kept(score, held["kept"][b, k_idx])
        return score

    return _written(score_mod, ("score", "b", "h", "q_idx", "k_idx"), buffers)


def _mask_graph(buffers: Sequence[str], block: tuple[int, int]) -> GraphModule:
    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any, **held: Any) -> Any:
        if "numbers" in held:
            return in_band(q_idx, k_idx, held["numbers"])
        plane = held["planes"][b, h]
        return in_bitmap(plane, q_idx, k_idx, held["tile_id"], held["octets"], block)

    return _written(mask_mod, ("b", "h", "q_idx", "k_idx"), buffers)


def _written(
    function: Callable[..., Any], indices: Sequence[str], buffers: Sequence[str]
) -> GraphModule:
    """A function of scalars and of buffers (by name) as a graph."""
    graph = Graph()
    tracer = GraphAppendingTracer(graph)  # one for all, or they could not meet in a call
    given = {name: Proxy(graph.placeholder(name), tracer) for name in (*indices, *buffers)}
    result = function(*(given[name] for name in indices), **{name: given[name] for name in buffers})
    graph.output(result.node)
    return GraphModule(torch.nn.Module(), graph)
