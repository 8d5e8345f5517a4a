"""A mask the model itself computes from sizes: its source travels, its value is made once per
length.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stof_compile.errors import StofMaskError
from stof_compile.masks.recognise import recognise
from stof_compile.masks.spec import MaskSpec, PlaneShape

OPERATORS = frozenset(
    {"add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pos", "pow", "abs", "index"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "invert", "not_"}
    | {"getitem", "lshift", "rshift"}
)
# torch 2.11 writes x == y as x.__eq__(y)
METHODS: dict[str, Callable[..., Any]] = {
    f"__{name.rstrip('_')}__": getattr(operator, name) for name in OPERATORS
}
FUNCTIONALS = frozenset({"pad", "one_hot", "embedding", "relu", "softmax"})
NAMES: dict[str, Callable[..., Any]] = {
    "slice": slice,
    "float": float,
    "int": int,
    "bool": bool,
    "max": max,
    "min": min,
    "torch.device": torch.device,
    "torch.sym_max": torch.sym_max,
    "torch.sym_min": torch.sym_min,
    "torch.sym_not": torch.sym_not,
    "torch.diff": torch.diff,
    "torch.tril": torch.tril,
    "torch.triu": torch.triu,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.sqrt": math.sqrt,
}


@dataclass(frozen=True, eq=False, repr=False)
class Computed(MaskSpec):
    """The value of a piece of the model's own graph that depends on sizes and buffers only.

    Args:
        text: source of ``value(s0, ..., t0, ...)``, one plain torch call a line; its value is bool
            [B|1, H|1, Q|1, K|1], rows counted from the first query. It is interpreted call by call
            from a list of allowed functions, never executed as Python.
        sizes: tensor without elements whose shape is ``[s0, s1, ..., 0]``. Shapes are what a
            compiled graph hands on without a read from the device.
        captured: buffers ``t0 ...``.
        q_len, k_len: lengths of the attention, and q_start: position of its first row; set by
            `bind`.
    """

    text: str
    sizes: Tensor
    captured: tuple[Tensor, ...] = ()
    q_len: int | None = None
    k_len: int | None = None
    q_start: int = 0
    rule: ClassVar[str] = "computed"

    @property
    def depends_on_lengths(self) -> bool:
        """Broadcast axes of the value take the lengths of the attention."""
        return True

    def plane_shape(self) -> PlaneShape:
        """Planes of the value, equal ones counted once."""
        mask = _value(self)
        return mask.shape[0], mask.shape[1]

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Evaluate, and find the rule that produces the value where there is one.

        Raises:
            StofMaskError: the value does not fit the lengths.
        """
        bound = replace(self, q_len=q_len, k_len=k_len)
        found = _recognised(bound)
        # the value counts rows from 0: only a tensor can be told where its first row stands
        if q_offset:
            found = replace(bound, q_start=q_offset)
        return found

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Look the element up."""
        mask = _value(self).to(q.device)
        if self.q_len is None:
            raise StofMaskError("a computed mask must be bound to lengths before it is evaluated")
        places = [
            index.clamp(0, size - 1)
            for index, size in zip((b, h, q - self.q_start, k), mask.shape, strict=True)
        ]
        return mask[places[0], places[1], places[2], places[3]]

    def __repr__(self) -> str:
        return f"computed by the model ({self.text.count(chr(10)) - 2} calls)"


@lru_cache(maxsize=16)
def _recognised(spec: Computed) -> MaskSpec:
    mask = _value(spec)
    assert spec.q_len is not None and spec.k_len is not None, "bound by the caller"
    for axis, size in ((2, spec.q_len), (3, spec.k_len)):
        if mask.shape[axis] not in (1, size):
            raise StofMaskError(
                f"the model's mask has shape {list(mask.shape)}, the attention has {spec.q_len} "
                f"queries and {spec.k_len} keys"
            )
    return recognise(mask.expand(-1, -1, spec.q_len, spec.k_len))


@lru_cache(maxsize=16)
def _value(spec: Computed) -> Tensor:
    """Bool [b, h, Q|1, K|1]; a batch or head axis of equal planes is shrunk to 1."""
    inputs = (*spec.sizes.shape[:-1], *spec.captured)
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        mask = run_text(spec.text, inputs)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
            raise StofMaskError(f"the model's mask is no bool tensor of four dimensions: {mask!r}")
        for dim in (0, 1):
            first = mask.narrow(dim, 0, 1)
            if mask.shape[dim] > 1 and bool((mask == first).all()):
                mask = first
        return mask


# -- the interpreter -------------------------------------------------------------------------------


def run_text(text: str, inputs: Sequence[Any]) -> Any:
    """Interpret the source of a function of torch calls.

    Args:
        text: ``def value(...)`` with one assignment a line and a return at the end.
        inputs: its arguments.
    Raises:
        StofMaskError: the text calls something that is not allowed.
    """
    try:
        (function,) = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise StofMaskError(f"the text of a computed mask can't be read: {error}") from error
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != len(inputs):
        raise StofMaskError("the text of a computed mask is no function of its inputs")
    scope = dict(zip((a.arg for a in function.args.args), inputs, strict=True))
    for line in function.body:
        if isinstance(line, ast.Return) and line.value is not None:
            return _evaluate(line.value, scope)
        if not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
            raise _refusal(line)
        scope[line.targets[0].id] = _evaluate(line.value, scope)
    raise StofMaskError("the text of a computed mask returns nothing")


def _evaluate(node: ast.expr, scope: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in scope:
        return scope[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_evaluate(one, scope) for one in node.elts)
    if isinstance(node, ast.List):
        return [_evaluate(one, scope) for one in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, scope)
    if isinstance(node, ast.Attribute):
        value = getattr(torch, node.attr, None) if ast.unparse(node.value) == "torch" else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
    if isinstance(node, ast.Call) and all(word.arg is not None for word in node.keywords):
        args = [_evaluate(one, scope) for one in node.args]
        kwargs = {str(word.arg): _evaluate(word.value, scope) for word in node.keywords}
        return _callee(node.func, scope)(*args, **kwargs)
    raise _refusal(node)


def _callee(node: ast.expr, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function a call names: a tensor's method, or one of the allowed functions."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = scope.get(node.value.id)
        if isinstance(owner, Tensor | int) and node.attr in METHODS:
            return partial(METHODS[node.attr], owner)
        if isinstance(owner, Tensor | int) and not node.attr.startswith("_"):
            method = getattr(owner, node.attr, None)
            if callable(method):
                return method  # type: ignore[no-any-return]
    text = ast.unparse(node)
    name = text.rsplit(".", 1)[-1]
    if text in NAMES:
        return NAMES[text]
    found: Any = None
    if text == f"operator.{name}" and name in OPERATORS:
        found = getattr(operator, name)
    elif text == f"torch.{name}" and not name.startswith("_") and name != "from_file":
        found = getattr(torch._C._VariableFunctions, name, None)
    elif text == f"torch.nn.functional.{name}" and name in FUNCTIONALS:
        found = getattr(torch.nn.functional, name)
    if not callable(found):
        raise _refusal(node)
    return found  # type: ignore[no-any-return]


def _refusal(node: ast.AST) -> StofMaskError:
    return StofMaskError(f"a computed mask may not use {ast.unparse(node)!r}")
