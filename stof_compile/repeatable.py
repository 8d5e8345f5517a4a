"""Whether a call gives the same whenever it is made with the same arguments: shown by trying it.

The call runs on fake tensors, and every operator it turns out to consist of is looked at. So it
does not matter how a random number is spelled: ``F.dropout1d``, ``F.gumbel_softmax`` and
``torch.binomial`` all end in operators that PyTorch marks. Nothing is computed and no generator is
asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from stof_compile.node_ops import hint

KNOWN = frozenset({"aten", "prim", "prims", "stof"})  # namespaces whose operators tell what they do
UNSET = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
PLAIN = (bool, int, float, torch.dtype, torch.device, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_repeatable(node: Node) -> bool:
    """Whether a call of a graph is a function of its arguments.

    It is not where it draws random numbers, returns memory that nothing has set or calls an
    operator that is neither PyTorch's nor ours, which may read whatever it likes. A call of which
    that cannot be seen, since sizes of its result depend on data or it has none, is taken for such
    a one.
    """
    values = [n.meta.get("example_value") for n in (node, *node.all_input_nodes)]
    if isinstance(node.target, HigherOrderOperator) or not all(map(_is_told, values)):
        return False
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        fake = FakeTensorMode(allow_fallback_kernels=False)
        with fake:
            stand_in = partial(tree_map, _stand_in)
            args, kwargs = map_arg(
                (node.args, node.kwargs), lambda n: stand_in(n.meta["example_value"])
            )
            watch = _Watch()
            try:
                with watch:
                    if node.op == "call_method":
                        getattr(args[0], str(node.target))(*args[1:], **kwargs)
                    elif callable(node.target):
                        node.target(*args, **kwargs)
            except (_Unrepeatable, RuntimeError):  # the latter: sizes depend on data
                return False
    return not watch.unset


class _Unrepeatable(Exception):
    """An operator of the call may give something else the next time."""


class _Watch(TorchDispatchMode):
    """Stops at the first operator that is no function of its arguments.

    ``unset``: the last operator returned memory as it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unset = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if drawn or func.namespace not in KNOWN:
            raise _Unrepeatable
        self.unset = func._schema.name.split("::")[-1] in UNSET
        return func(*args, **(kwargs or {}))


def _is_told(value: Any) -> bool:
    """Whether an example value is tensors and numbers that are known, not data's."""
    leaves = tree_leaves(value)
    return bool(leaves) and all(
        _has_hints(leaf.shape) if isinstance(leaf, Tensor) else _is_plain(leaf) for leaf in leaves
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) and _has_hints((value,))


def _has_hints(values: Sequence[Any]) -> bool:
    symbols = [v for v in values if isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return all(symbol.node.has_hint() for symbol in symbols)


def _stand_in(value: Any) -> Any:
    """A value like an example value that belongs to no other mode and guards nothing."""
    if isinstance(value, Tensor):
        sizes, strides = ([hint(n) for n in ns] for ns in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.SymFloat | torch.SymBool):
        return value.node.hint
    return hint(value) if isinstance(value, torch.SymInt) else value
