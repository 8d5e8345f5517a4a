"""Whether a kernel can take the operands of a match: shapes, dtypes, no write in between."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from stof_compile.attention.mismatch import Mismatch
from stof_compile.memory import storage_base
from stof_compile.node_ops import raw_name, same_size, tensor_meta

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Writes = list[tuple[Node, Node]]  # (node that writes, node that owns the memory)


def operand_problem(
    q: Node, k: Node, v: Node, output: Node, *, transposed: bool
) -> Mismatch | None:
    """What no kernel takes in shapes and dtypes; ``transposed``: k is [B, Hk, D, K]."""
    metas = [tensor_meta(n) for n in (q, k, v, output)]
    if any(meta is None for meta in metas):
        return Mismatch("shape and dtype of q, k, v or the result are unknown")
    for name, meta in zip(("q", "k", "v", "the result"), metas, strict=True):
        assert meta is not None, "checked above"
        if type(meta) not in (torch.Tensor, FakeTensor):
            return Mismatch(f"{name} is a {type(meta).__name__}")
        if meta.dim() != 4:
            return Mismatch(
                f"{name} has {meta.dim()} dimensions, not [batch, heads, sequence, head dim]"
            )
        if meta.dtype not in FLOATS:
            return Mismatch(f"{name} is {meta.dtype}")
    dtypes = {str(meta.dtype) for meta in metas if meta is not None}
    if len(dtypes) > 1:
        return Mismatch(
            f"q, k, v and the result have different dtypes: {', '.join(sorted(dtypes))}"
        )
    (qb, qh, _, qd), ks, (vb, vh, v_len, _) = (tuple(m.shape) for m in metas[:3])  # type: ignore[union-attr]
    kb, kh, k_len, kd = (ks[0], ks[1], ks[3], ks[2]) if transposed else ks
    fitting = ((qd, kd), (k_len, v_len), (kh, vh))
    if not (same_size(qb, kb) and same_size(qb, vb)):
        reason = f"q, k and v have different batch sizes: {qb}, {kb}, {vb}"
        return Mismatch(reason, ((qb, kb), (qb, vb), *fitting))
    if not all(same_size(a, b) for a, b in fitting):
        return Mismatch("shapes of q, k and v do not fit together", fitting)
    if not same_size(qh, kh) and not (isinstance(qh, int) and isinstance(kh, int) and qh % kh == 0):
        return Mismatch(f"{qh} query heads do not divide into {kh} key heads")
    return None


def written_between(
    first: Node, last: Node, read: tuple[Node, ...], writes: Writes
) -> Mismatch | None:
    """A write to an operand's memory between the first matched node and the place where the
    operands are read anew."""
    if not writes:
        return None
    bases = {storage_base(node) for node in read}
    span: set[Node] = set()
    node = first
    while node is not last:
        span.add(node)
        node = node.next
    for writer, base in writes:
        if writer in span and base in bases:
            return Mismatch(f"'{writer.name}' ({raw_name(writer)}) writes to an operand in between")
    return None
