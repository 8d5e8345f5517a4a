"""Masks as arguments of an operator while Dynamo traces: JSON text as a constant, tensors apart."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from stof_compile import masks
from stof_compile.masks import MaskSpec, as_mask_spec


def trace_rule(mask: MaskSpec | Tensor | Callable[..., Any], tensors: list[Tensor]) -> str:
    """Return the JSON of a mask as a constant of the trace; its tensors are appended to
    ``tensors``.

    Written so that Dynamo can follow it for rules made outside and for rules made in the compiled
    function: it walks the dataclass fields, and only the JSON text of the finished tree is a
        constant.
    """
    if isinstance(mask, MaskSpec):
        return _json_of(_node(mask, tensors))
    if isinstance(mask, Tensor):
        return _json_of(_node(masks.from_tensor(mask), tensors))
    text, captured = _captured_rule(mask)
    tensors.extend(captured)
    return text


def _node(value: Any, tensors: list[Tensor]) -> Any:
    """Same tree as `MaskSpec.to_json` writes, in plain containers of constants."""
    if isinstance(value, MaskSpec):
        # every rule is a dataclass, which the type of their base does not say
        fields: Sequence[dataclasses.Field[Any]] = dataclasses.fields(cast(Any, value))
        node = {field.name: _node(getattr(value, field.name), tensors) for field in fields}
        node["rule"] = value.rule
        return node
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple):
        return [_node(one, tensors) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        # Dynamo makes a number symbolic once it changed; the text needs its value
        return operator.index(value)
    if isinstance(value, float):
        above, below = value.as_integer_ratio()
        return above / below
    return value


def _write_json(node: Any) -> str:
    return json.dumps(node, sort_keys=True, separators=(",", ":"))


def _capture_rule(mask: Any) -> tuple[str, list[Tensor]]:
    """Rule of a mask_mod or a FlexAttention BlockMask: traced once, when Dynamo meets it."""
    spec = as_mask_spec(mask)
    return spec.to_json(), list(spec.tensors())


def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


_constant: Any = torch._dynamo.assume_constant_result
# Dynamo of torch 2.11 takes torch's own function for True in every trace; here it is really called
exporting: Callable[[], bool] = _constant(_is_exporting)
_json_of: Callable[[Any], str] = _constant(_write_json)
_captured_rule: Callable[[Any], tuple[str, list[Tensor]]] = _constant(_capture_rule)
