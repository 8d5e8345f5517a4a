"""The exact key of a segment: equal when two segments compute the same in the same way."""

from __future__ import annotations

import hashlib
import json

from stof_compile.fusion.chain import OpChain, Value


def segment_key(chain: OpChain, start: int, stop: int) -> str:
    """Hash a segment up to the names of its nodes.

    The key covers the kinds of the ops, their edges (inside by position in the segment, from
    outside by order of first use, so that one tensor read twice counts), shapes, dtypes, stride
    classes and device types of all values, and constants such as eps, scale, dims and flags.
    Strides of class "other" are not told apart.

    Args:
        chain: the chain. start, stop: its ops ``start <= i < stop``.
    Returns:
        sha256 as 64 hexadecimal digits; the same in every process and on every machine.
    Raises:
        ValueError: not 0 <= start < stop <= number of ops.
    """
    check_range(chain, start, stop)
    outside: dict[str, int] = {}
    ops = []
    for op in chain.ops[start:stop]:
        edges = []
        for operand in op.operands:
            inside = operand.position is not None and operand.position >= start
            if inside and operand.position is not None:
                edges.append(["inside", operand.position - start])
            else:
                number = outside.setdefault(operand.name, len(outside))
                edges.append(["outside", number, _value(operand.value)])
        kind = [op.kind.name, op.kind.family, op.kind.shape_rule]
        ops.append([kind, _value(op.value), edges, op.constants])
    return hashlib.sha256(json.dumps(ops).encode()).hexdigest()


def check_range(chain: OpChain, start: int, stop: int) -> None:
    """Refuse a range of ops that a chain does not have.

    Raises:
        ValueError: not 0 <= start < stop <= number of ops.
    """
    if not 0 <= start < stop <= len(chain):
        raise ValueError(f"no segment {start}:{stop} in a chain of {len(chain)} ops")


def _value(value: Value) -> list[object]:
    return [list(value.shape), value.dtype, value.layout, value.device]
