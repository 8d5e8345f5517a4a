"""Rules given as code: a mask_mod traced to a graph that can be stored, hashed and replayed."""

from __future__ import annotations

import inspect
import json
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from stof_compile.errors import StofMaskError
from stof_compile.masks.spec import MaskSpec, PlaneShape

_INPUTS = 4
"""The graph's first values are b, h, q, k."""


@dataclass(frozen=True, eq=False, repr=False)
class Opaque(MaskSpec):
    """A traced mask_mod.

    Args:
        graph: JSON ``{"steps": [[op, args, kwargs], ...], "out": value}``. A value ``{"v": i}`` is
            input i for i < 4 (b, h, q, k) and the result of step i - 4 otherwise; ``{"c": i}`` is a
            captured tensor; ``{"dtype": name}`` and ``{"device": null}`` (where the indices are)
            stand for themselves.
        captured: the tensors the function uses.
    """

    graph: str
    captured: tuple[Tensor, ...] = ()
    rule: ClassVar[str] = "opaque"
    has_code: ClassVar[bool] = True

    @cached_property
    def _program(self) -> tuple[list[tuple[Callable[..., Any], Any, Any]], Any]:
        content = json.loads(self.graph)
        return [(_resolve(name), args, kwargs) for name, args, kwargs in content["steps"]], content[
            "out"
        ]

    @cached_property
    def _inputs_used(self) -> frozenset[int]:
        steps, out = self._program
        values = [number for step in (*steps, (None, out, None)) for number in _values_in(step[1:])]
        return frozenset(number for number in values if number < _INPUTS)

    @cached_property
    def reach(self) -> tuple[int | None, ...]:
        """Sizes of the tables that b, h, q and k themselves index; None where there is none.

        Told from shapes: on a GPU an index past a table's end takes the process' CUDA with it.
        """
        found: dict[int, int] = {}
        shapes = {("c", i): list(tensor.shape) for i, tensor in enumerate(self.captured)}
        for number, (name, args, _) in enumerate(json.loads(self.graph)["steps"], _INPUTS):
            if name != "aten.index.Tensor":
                continue
            (source,) = args[0].items()
            shape = shapes.get(source, [])
            places = [place and place.get("v", _INPUTS) for place in args[1]]  # None: a whole axis
            for place, size in zip(places, shape, strict=False):
                if place is not None and place < _INPUTS:
                    found[place] = min(size, found.get(place, size))
            if all(place is None or place < _INPUTS for place in places):
                # scalars: `table[b]` of `table[b][q]` is a table, too
                left = zip_longest(places, shape)
                shapes["v", number] = [size for place, size in left if place is None]
        return tuple(found.get(number) for number in range(_INPUTS))

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Check that the tables of the function reach every position."""
        lengths = (q_len + q_offset, k_len)
        for side, most, length in zip(("query", "key"), self.reach[2:], lengths, strict=True):
            if most is not None and length > most:
                raise StofMaskError(
                    f"{self!r} looks the {side} up in a table of {most} positions, but position "
                    f"{length - 1} is asked for; give the function a table of {length} or more"
                )
        return self

    def plane_shape(self) -> PlaneShape:
        """As many planes as the problem has in each index the function reads."""
        return (None if 0 in self._inputs_used else 1), (None if 1 in self._inputs_used else 1)

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Replay the graph on scalars under vmap, one level for each dimension."""
        shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)
        if 0 in shape:
            return torch.zeros(shape, dtype=torch.bool, device=q.device)
        captured = [tensor.to(q.device) for tensor in self.captured]

        def scalar(*indices: Tensor) -> Tensor:
            return self._replay(indices, captured, q.device)

        indices = [
            index.reshape((1,) * (len(shape) - index.dim()) + tuple(index.shape))
            for index in (b, h, q, k)
        ]
        function: Callable[..., Tensor] = scalar
        for dim in reversed(range(len(shape))):
            if shape[dim] != 1:
                axes = tuple(0 if index.shape[dim] != 1 else None for index in indices)
                function = torch.vmap(function, in_dims=axes)
        squeezed = [index.reshape([size for size in index.shape if size != 1]) for index in indices]
        try:
            with _vmap_reachable():
                return function(*squeezed).reshape(shape)
        except IndexError as error:
            raise StofMaskError(
                f"{self!r} reads past the end of a table: {error}; its tables must cover every "
                "batch row, head and position of the attention, or the function must clamp"
            ) from error

    def _replay(
        self, inputs: tuple[Tensor, ...], captured: list[Tensor], device: torch.device
    ) -> Tensor:
        values: list[Any] = list(inputs)

        def load(value: Any) -> Any:
            if isinstance(value, list):
                return [load(one) for one in value]
            if not isinstance(value, dict):
                return value
            (kind, content), *_ = value.items()
            if kind == "v":
                return values[content]
            if kind == "c":
                return captured[content]
            return device if kind == "device" else getattr(torch, content)

        steps, out = self._program
        for function, args, kwargs in steps:
            values.append(
                function(*load(args), **{name: load(value) for name, value in kwargs.items()})
            )
        result = load(out)
        if not isinstance(result, Tensor):
            return torch.full_like(inputs[2], result, dtype=torch.bool)
        return result if result.dtype == torch.bool else result != 0

    def __repr__(self) -> str:
        names = [name for name, _, _ in json.loads(self.graph)["steps"]]
        shown = " ".join(name.removeprefix("aten.").split(".")[0] for name in names[:6])
        return f"rule(<{shown}{' ...' if len(names) > 6 else ''}>)"


@contextmanager
def _vmap_reachable() -> Iterator[None]:
    """Let vmap work below a dispatch mode, where PyTorch has switched its dispatch keys off.

    An operator of a compiled graph builds its mask there: PyTorch runs custom operators under a
    mode that checks their outputs for aliases.
    """
    keys = torch._C.DispatchKey
    include, exclude = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    for key in (
        keys.FuncTorchBatched,
        keys.FuncTorchVmapMode,
        keys.FuncTorchDynamicLayerFrontMode,
        keys.FuncTorchDynamicLayerBackMode,
    ):
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def trace_mask_mod(mask_mod: Callable[..., Any]) -> Opaque:
    """Trace ``mask_mod(b, h, q_idx, kv_idx)`` on scalar indices.

    Raises:
        StofMaskError: it branches on values, reads a tensor's value, uses something that can't be
            stored, or does not answer yes or no.
    """
    name = getattr(mask_mod, "__qualname__", repr(mask_mod))
    if not callable(mask_mod):
        raise StofMaskError(
            f"rule takes a mask_mod(b, h, q_idx, kv_idx), got {type(mask_mod).__name__}"
        )
    _check_arguments(mask_mod, name)
    # captured tensors may be on a GPU; most functions trace with indices on the CPU all the same
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    failure: RuntimeError | None = None
    for device in devices:
        try:
            with _disable_current_modes(), _no_grad():
                zeros = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(_INPUTS)]
                with _IndexByTensor():
                    module = make_fx(partial(_answer, mask_mod, name))(*zeros)
            return _store(module, name)
        except StofMaskError:
            raise
        except RuntimeError as error:
            failure = error
    raise StofMaskError(
        f"mask_mod {name} can't be traced: {str(failure).strip().splitlines()[0]}. It gets index "
        "tensors and must stay "
        "in tensor operations: no `if`, `and`, `or`, `not`, int() or .item() on them; use &, |, "
        "~ and torch.where"
    ) from failure


def _check_arguments(mask_mod: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(mask_mod, follow_wrapped=False).bind(*"bhqk")
    except TypeError as error:
        raise StofMaskError(
            f"mask_mod {name} can't be called with the four indices (b, h, q_idx, kv_idx): "
            f"{error}; a function that makes a rule has to be called first"
        ) from error
    except ValueError:  # a builtin has no signature to read
        return


def _answer(mask_mod: Callable[..., Any], name: str, *indices: Tensor) -> Any:
    """What a mask_mod says of one pair of positions, if that is a yes or a no."""
    answer = mask_mod(*indices)
    if isinstance(answer, Tensor):
        got = f"a tensor {list(answer.shape)} of {answer.dtype}"
        fits = answer.numel() == 1 and not (answer.is_floating_point() or answer.is_complex())
    else:
        got, fits = f"{answer!r}", isinstance(answer, int)
    if not fits:
        raise StofMaskError(
            f"mask_mod {name} returned {got} for one query and one key; it has to return one bool, "
            "True where the query sees the key. What is added to the scores is a bias, not a mask"
        )
    return answer


@contextmanager
def _no_grad() -> Iterator[None]:
    """``torch.no_grad()`` that ``torch.export`` does not put into the graph that it is making."""

    def switch(enabled: bool) -> None:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(enabled)

    before = torch.is_grad_enabled()
    switch(False)
    try:
        yield
    finally:
        switch(before)


class _IndexByTensor(TorchFunctionMode):
    """Makes ``table[q]`` an index operation; Python would read the scalar's value instead."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__getitem__:
            table, places = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            whole = [place is None or isinstance(place, bool) for place in places]
            simple = all(
                isinstance(place, Tensor | int) or place == slice(None) for place in places
            )
            if simple and not any(whole) and any(isinstance(place, Tensor) for place in places):
                return torch.ops.aten.index.Tensor(
                    table, [_as_index(place, table) for place in places]
                )
        return func(*args, **(kwargs or {}))


def _as_index(place: Tensor | int | slice, table: Tensor) -> Tensor | None:
    if isinstance(place, slice):
        return None
    return place if isinstance(place, Tensor) else torch.full((), place, device=table.device)


def _store(module: fx.GraphModule, name: str) -> Opaque:
    module.graph.eliminate_dead_code()
    numbers: dict[fx.Node, dict[str, int]] = {}
    captured: list[Tensor] = []
    steps: list[list[Any]] = []
    out: Any = None
    inputs = 0

    def dump(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return numbers[value]
        if isinstance(value, list | tuple):
            return [dump(one) for one in value]
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, torch.layout | torch.memory_format):
            return {"dtype": str(value).removeprefix("torch.")}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise StofMaskError(f"mask_mod {name} uses a {type(value).__name__}, which can't be stored")

    for node in module.graph.nodes:
        if node.op == "placeholder":
            numbers[node] = {"v": inputs}
            inputs += 1
        elif node.op == "get_attr":
            tensor = getattr(module, str(node.target))
            if not isinstance(tensor, Tensor):
                raise StofMaskError(f"mask_mod {name} uses a sub-graph, which can't be stored")
            same = [number for number, one in enumerate(captured) if one is tensor]
            numbers[node] = {"c": same[0] if same else len(captured)}
            captured += [] if same else [tensor]
        elif node.op == "output":
            out = dump(node.args[0])
        else:
            numbers[node] = {"v": _INPUTS + len(steps)}
            steps.append(
                [
                    _name(node.target, name),
                    dump(node.args),
                    {k: dump(v) for k, v in node.kwargs.items()},
                ]
            )
    text = json.dumps({"steps": steps, "out": out}, sort_keys=True, separators=(",", ":"))
    # copies: a rule is constant, whatever becomes of the tensors it was made from
    return Opaque(text, tuple(tensor.detach().clone() for tensor in captured))


def _name(target: Any, mask_mod: str) -> str:
    if target is operator.getitem:
        return "getitem"
    text = str(target)
    if isinstance(target, torch._ops.OpOverload) and text.startswith("aten."):
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise StofMaskError(
                f"mask_mod {mask_mod} draws random numbers ({text}), and a rule says the same "
                "whenever it is asked; draw a tensor outside, which the function can index, or "
                "take masks.random_blocks"
            )
        return text
    raise StofMaskError(
        f"mask_mod {mask_mod} uses {text}, which can't be stored; use plain tensor operations"
    )


def _resolve(name: str) -> Callable[..., Any]:
    """Find an operator by the name `_name` gave it; only ATen operators are ever called."""
    if name == "getitem":
        return operator.getitem
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if namespace != "aten" or not isinstance(found, torch._ops.OpOverload):
        raise StofMaskError(
            f"the stored mask function uses {name!r}, which this PyTorch doesn't have"
        )
    return found


def _values_in(tree: Any) -> Iterator[int]:
    """Numbers of all values a stored step refers to."""
    if isinstance(tree, dict):
        if "v" in tree and isinstance(tree["v"], int):
            yield tree["v"]
        else:
            for one in tree.values():
                yield from _values_in(one)
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _values_in(one)
