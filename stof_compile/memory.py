"""Which values of a Dynamo graph share memory, and which calls write to it.

Example values tell what shares memory: a view has the storage of its source in fake mode as well. A
name tells it too (``VIEWS``), where an example value is missing and for what shares memory only
with some strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from stof_compile.node_ops import VIEWS, argument, is_inplace, operation, raw_name

SHARED_INPUT = "stof_shared_input"  # meta of a placeholder whose memory another one has as well
_WRITES = "stof_writes"  # meta of a foreign function: whether it wrote to what it was given
_STATISTICS = {  # whether they are written unless an argument says so
    "batch_norm": False, "native_batch_norm": False, "cudnn_batch_norm": False,
    "miopen_batch_norm": False, "instance_norm": True,
}  # fmt: skip
_OBSERVERS = frozenset(  # write running figures, which no name or schema tells
    {
        "_native_batch_norm_legit",
        "fused_moving_avg_obs_fake_quant",
        "_fused_moving_avg_obs_fq_helper",
    }
)


def storages(value: Any) -> frozenset[int]:
    """Identities of the memory of a tensor, or of all tensors of a list."""
    if isinstance(value, list | tuple):
        return frozenset[int]().union(*map(storages, value))
    if not isinstance(value, Tensor):
        return frozenset()
    try:
        return frozenset((value.untyped_storage()._cdata,))
    except (NotImplementedError, RuntimeError):  # a subclass or a layout without memory of its own
        return frozenset()


def storage_base(node: Node) -> Node:
    """The oldest node whose memory this node may share."""
    return _base(node, {})


def _base(node: Node, known: dict[Node, Node]) -> Node:
    """The same, with bases that are known; adds those of what it comes by."""
    passed = [node]
    while passed[-1] not in known and (source := source_of_memory(passed[-1])) is not None:
        passed.append(source)
    last = passed[-1]
    base = known.get(last) or (_first_of_shared(last) if SHARED_INPUT in last.meta else last)
    known.update(dict.fromkeys(passed, base))
    return base


def _first_of_shared(node: Node) -> Node:
    held = storages(node.meta.get("example_value"))
    sharing = (n for n in node.graph.nodes if held & storages(n.meta.get("example_value")))
    return next(sharing, node)


def mark_shared_inputs(graph: Graph) -> None:
    """Note which inputs share memory with another one; :func:`storage_base` makes them one."""
    owners: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            for storage in storages(node.meta.get("example_value")):
                owners.setdefault(storage, []).append(node)
    for nodes in owners.values():
        for node in nodes if len(nodes) > 1 else ():
            node.meta[SHARED_INPUT] = True


def source_of_memory(node: Node) -> Node | None:
    """The input whose memory a value shares, or may share."""
    if node.op not in ("call_function", "call_method"):
        return None
    held = storages(node.meta.get("example_value"))
    if held:
        for source in _origins(node):
            if held & storages(source.meta.get("example_value")):
                return source
    if operation(node) not in VIEWS and not is_inplace(node):
        return None
    target = node.kwargs.get("out") or (node.args[0] if node.args else node.kwargs.get("input"))
    targets = _nodes_in(target)
    return targets[0] if targets else None


def _origins(node: Node) -> list[Node]:
    """Nodes a value may be memory of: for an item of a list the inputs of what made the list."""
    made = node.args[0] if raw_name(node) == "getitem" and node.args else None
    if isinstance(made, Node) and isinstance(made.meta.get("example_value"), list | tuple):
        return [*made.all_input_nodes, made]
    return node.all_input_nodes


# -- writes ----------------------------------------------------------------------------------------


def mutations(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Every writing node with the base of the memory it writes, in graph order."""
    known: dict[Node, Node] = {}
    for node in graph.nodes:
        for target in written_arguments(node):
            yield node, _base(target, known)


def written_arguments(node: Node) -> list[Node]:
    """Arguments whose memory a call writes.

    Told by its name or schema; a Triton kernel may write all it is given, and so may a
    higher-order operator with a body that writes to an input, and a function that Dynamo did not
    look into and that was seen to write.
    """
    if node.op not in ("call_function", "call_method"):
        return []
    if is_inplace(node):
        return _nodes_in(node.kwargs.get("out") or (node.args[0] if node.args else None))
    name = raw_name(node)
    if name in _STATISTICS:  # no schema tells
        word = "use_input_stats" if name == "instance_norm" else "training"
        still = argument(node, 5, word, _STATISTICS[name]) is False
        return [] if still else node.all_input_nodes[1:]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes) if _body_writes(node) else []
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _declared(node)
    if not name and node.op == "call_function":
        return list(node.all_input_nodes) if _was_seen_to_write(node) else []
    if name in _OBSERVERS:
        return node.all_input_nodes
    if name in ("embedding", "embedding_bag") and argument(node, 3, "max_norm") is not None:
        return node.all_input_nodes  # rows that are longer are scaled in place
    return []


def _nodes_in(value: Any) -> list[Node]:
    values = value if isinstance(value, list | tuple) else (value,)
    return [v for v in values if isinstance(v, Node)]


def _declared(node: Node) -> list[Node]:
    """Arguments that the schema of an operator declares as written."""
    target: Any = node.target
    overloads = [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    mutable = [overload._schema for overload in overloads if overload._schema.is_mutable]
    if len(overloads) > 1:
        return list(node.all_input_nodes) if mutable else []
    written = []
    for i, declared in enumerate(mutable[0].arguments if mutable else ()):
        if declared.alias_info is not None and declared.alias_info.is_write:
            written += _nodes_in(argument(node, i, declared.name))
    return written


def _body_writes(node: Node) -> bool:
    """Whether a higher-order operator is a Triton kernel, or a body of it writes to an input."""
    if str(node.target._name).startswith("triton_kernel_wrapper"):  # type: ignore[union-attr]
        return True
    owner = node.graph.owning_module
    for source in node.all_input_nodes:
        body: Any = owner if source.op == "get_attr" else None
        for name in str(source.target).split(".") if body is not None else ():
            body = getattr(body, name, None)
        if isinstance(body, GraphModule):
            bases = (base for _, base in mutations(body.graph))
            if any(base.op in ("placeholder", "get_attr") for base in bases):
                return True
    return False


def _was_seen_to_write(node: Node) -> bool:
    """Whether a function of the user changes what it is given, in fake mode; True if it fails."""
    if _WRITES not in node.meta:
        node.meta[_WRITES] = _writes_in_fake_mode(node)
    return bool(node.meta[_WRITES])


def _writes_in_fake_mode(node: Node) -> bool:
    copies: dict[Node, Any] = {}
    for source in node.all_input_nodes:
        value = source.meta.get("example_value")
        if value is None or isinstance(value, list | tuple):
            return True
        copies[source] = value
    tensors = [v for v in copies.values() if isinstance(v, Tensor)]
    mode = next((m for v in tensors if (m := getattr(v, "fake_mode", None)) is not None), None)
    if mode is None or not callable(node.target):
        return True
    shapes = mode.shape_env
    try:
        with ExitStack() as stack:
            if shapes is not None:  # sizes that depend on data are nobody's here
                stack.enter_context(shapes.ignore_fresh_unbacked_symbols())
            for context in (torch.inference_mode(False), torch.no_grad(), mode):
                stack.enter_context(context)
            copies = {n: v.clone() if isinstance(v, Tensor) else v for n, v in copies.items()}
            before = {n: v._version for n, v in copies.items() if isinstance(v, Tensor)}
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            node.target(*args, **kwargs)
    except Exception:  # a function of the user may raise anything: then nothing is known of it
        return True
    return any(copies[n]._version != version for n, version in before.items())
