"""The functions users call to make a mask rule; they check their arguments."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks import patterns, rules, tensor_rules
from stof_compile.masks.random_tiles import RandomTiles
from stof_compile.masks.spec import MaskSpec


def dense() -> MaskSpec:
    """Every query sees every key."""
    return rules.Dense()


def causal(lower_right: bool = False) -> MaskSpec:
    """``k <= q`` on absolute positions.

    Args:
        lower_right: align the last query with the last key instead, whatever the offset.
    """
    return rules.LowerRight() if lower_right else rules.Band(None, 0)


def sliding_window(w: int, causal: bool = False) -> MaskSpec:
    """``|q - k| <= w`` tokens; causal: the last ``w`` positions, ``0 <= q - k < w``, as Hugging
    Face counts.

    Raises:
        StofMaskError: ``w`` is negative, or 0 with ``causal``.
    """
    w = _whole("sliding_window", "w", w, 1 if causal else 0)
    return rules.Band(1 - w, 0) if causal else rules.Band(-w, w)


def global_tokens(n: int) -> MaskSpec:
    """The first ``n`` positions see and are seen by every position."""
    n = _whole("global_tokens", "n", n, 0)
    return patterns.GlobalTokens(n)


def longformer(window: int, global_tokens: int) -> MaskSpec:
    """``|q - k| <= window``, or either position among the first ``global_tokens``."""
    window = _whole("longformer", "window", window, 0)
    global_tokens = _whole("longformer", "global_tokens", global_tokens, 0)
    return patterns.Longformer(window, global_tokens)


def bigbird(
    window: int,
    global_tokens: int,
    random_fill: float,
    seed: int = 0,
    random_block: int = 64,
    max_len: int | None = None,
    heads: int = 1,
) -> MaskSpec:
    """Longformer, and random tiles among those it leaves empty.

    Args:
        window, global_tokens: as in `longformer`, tokens.
        random_fill: fraction of the empty tiles that is filled, 0..1.
        seed: chooses the tiles; the same on every device.
        random_block: edge of a random tile in tokens, independent of any kernel's tile.
        max_len: longest sequence, needed when lengths grow (decoding): a shorter length then sees a
            prefix of the same pattern.
        heads: number of heads with random tiles of their own; 1 = shared.
    """
    window = _whole("bigbird", "window", window, 0)
    global_tokens = _whole("bigbird", "global_tokens", global_tokens, 0)
    fill, block, seed, max_len, heads = _random(
        "bigbird", random_fill, random_block, seed, max_len, heads
    )
    return patterns.BigBird(window, global_tokens, fill, seed, block, max_len, heads)


def random_blocks(
    fill: float, block: int = 64, seed: int = 0, max_len: int | None = None, heads: int = 1
) -> MaskSpec:
    """A fraction ``fill`` of all square tiles; arguments as in `bigbird`."""
    return RandomTiles(*_random("random_blocks", fill, block, seed, max_len, heads))


def longformer_ae(window: int, global_tokens: int) -> MaskSpec:
    """Longformer of the STOF artifact: a second global strip begins at half the length."""
    window = _whole("longformer_ae", "window", window, 0)
    global_tokens = _whole("longformer_ae", "global_tokens", global_tokens, 0)
    return patterns.LongformerAE(window, global_tokens)


def bigbird_ae(window: int, global_tokens: int, random_fill: float, seed: int = 0) -> MaskSpec:
    """Bigbird of the STOF artifact: points scattered in 32 x 32 blocks beside the diagonal."""
    window = _whole("bigbird_ae", "window", window, 0)
    global_tokens = _whole("bigbird_ae", "global_tokens", global_tokens, 0)
    fill = _fraction("bigbird_ae", random_fill)
    return patterns.BigBirdAE(window, global_tokens, fill, _seed("bigbird_ae", seed))


def dilated(window: int, dilation: int, causal: bool = False) -> MaskSpec:
    """Every ``dilation``-th position, ``window`` of them to each side, or to the left only."""
    window = _whole("dilated", "window", window, 0)
    dilation = _whole("dilated", "dilation", dilation, 1)
    return patterns.Dilated(window, dilation, causal)


def strided(stride: int) -> MaskSpec:
    """Causal: the last ``stride`` positions and every ``stride``-th position before them.

    Source: strided attention, Sparse Transformer, section 4.3.
    """
    stride = _whole("strided", "stride", stride, 1)
    return patterns.Strided(stride)


def fixed(stride: int, summary: int = 1) -> MaskSpec:
    """Causal: the own segment of ``stride`` tokens, the last ``summary`` tokens of every segment.

    Source: fixed attention, Sparse Transformer, section 4.3.
    """
    stride = _whole("fixed", "stride", stride, 1)
    summary = _whole("fixed", "summary", summary, 1)
    if summary > stride:
        raise StofMaskError(f"fixed: summary is 1..stride ({stride}), got {summary}")
    return patterns.Fixed(stride, summary)


def block_diagonal(size: int) -> MaskSpec:
    """Query and key lie in the same segment of ``size`` tokens."""
    size = _whole("block_diagonal", "size", size, 1)
    return rules.BlockDiagonal(size)


def document(ids: Tensor | Sequence[int]) -> MaskSpec:
    """Query and key belong to the same document.

    Args:
        ids: integers [S] or [B, S], the document of each position; sorted ids are classified by
            tile.
    """
    return tensor_rules.Document(_integers("document: ids are integers [S] or [B, S]", ids, (1, 2)))


def from_cu_seqlens(cu_seqlens: Tensor | Sequence[int]) -> MaskSpec:
    """Documents packed one after the other.

    Args:
        cu_seqlens: integers [N + 1] ascending from 0: where each document begins, and the total
            length.
    """
    what = "from_cu_seqlens: expected integers [N + 1] ascending from 0, such as [0, 100, 250]"
    ends = _integers(what, cu_seqlens, (1,))
    if int(ends[0]) != 0 or int(ends[-1]) < 1 or bool((ends.diff() < 0).any()):
        more = " ..." if ends.numel() > 8 else ""
        raise StofMaskError(f"{what}, got {ends[:8].tolist()}{more}")
    lengths = ends.diff()
    numbers = torch.arange(lengths.numel(), device=ends.device)
    return document(torch.repeat_interleave(numbers, lengths))


def prefix_lm(prefix: int) -> MaskSpec:
    """Causal, with the first ``prefix`` tokens seen by every query."""
    prefix = _whole("prefix_lm", "prefix", prefix, 0)
    return patterns.PrefixLM(prefix)


def batch_prefix_lm(lengths: Tensor | Sequence[int]) -> MaskSpec:
    """Causal, with a prefix of its own length, int [B] tokens, for every batch row."""
    table = _integers("batch_prefix_lm: lengths are integers [B]", lengths, (1,))
    return causal() | tensor_rules.BatchPrefix(table)


def per_head(specs: Sequence[MaskSpec]) -> MaskSpec:
    """Give every head a rule of its own; equal ones are stored once."""
    what = "per_head takes a non-empty sequence of mask rules, one per head"
    if isinstance(specs, MaskSpec):
        raise StofMaskError(f"{what}, got the rule {specs!r}; without per_head it holds for all")
    if not isinstance(specs, Sequence) or not len(specs):
        got = "an empty one" if isinstance(specs, Sequence) else type(specs).__name__
        raise StofMaskError(f"{what}, got {got}; give a list")
    for head, one in enumerate(specs):
        if not isinstance(one, MaskSpec):
            raise StofMaskError(
                f"{what}, got {type(one).__name__} for head {head}; wrap a function "
                "mask_mod(b, h, q_idx, kv_idx) with masks.rule"
            )
    return patterns.PerHead(tuple(specs))


def rule(mask_mod: Callable[..., Tensor] | MaskSpec) -> MaskSpec:
    """Wrap a FlexAttention ``mask_mod(b, h, q_idx, kv_idx) -> bool``.

    The function is traced once; tensors it uses are captured.

    Raises:
        StofMaskError: the function can't be traced (it branches on values, or reads a tensor's
            value).
    """
    if isinstance(mask_mod, MaskSpec):
        return mask_mod
    from stof_compile.masks.opaque import trace_mask_mod

    return trace_mask_mod(mask_mod)


def from_tensor(mask: Tensor) -> MaskSpec:
    """Wrap a dense mask; it holds at its own lengths only.

    Args:
        mask: bool [Q, K], [Bm, Q, K] or [Bm, Hm, Q, K], True = attend; sizes of 1 are shared.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not 2 <= mask.dim() <= 4:
        got = (
            f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        )
        raise StofMaskError(
            f"from_tensor takes a bool tensor [Q, K], [B, Q, K] or [B, H, Q, K], got {got}"
        )
    full = mask.detach().clone()  # a rule is constant, whatever becomes of the tensor
    if full.dim() == 3:
        full = full[:, None]
    return tensor_rules.TensorRule(full.reshape((1,) * (4 - full.dim()) + tuple(full.shape)))


def _integers(what: str, values: object, dims: tuple[int, ...]) -> Tensor:
    """A tensor of its own, int64, of what a user gave for a table of integers that is not empty."""
    try:
        table = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged rows, words ...
        raise StofMaskError(
            f"{what}, got {type(values).__name__} of which torch makes no tensor ({error}); "
            "give a tensor, or a list of whole numbers or of rows of one length"
        ) from error
    is_whole = not (table.is_floating_point() or table.is_complex())
    if table.dim() not in dims or not is_whole or not table.numel():
        step = "" if is_whole or not table.numel() else "; convert whole numbers with .long()"
        raise StofMaskError(f"{what}, got {table.dtype} {list(table.shape)}{step}")
    return table.detach().to(torch.int64, copy=True)


LARGEST = 2**30  # of a window, a stride or a number of tokens


def _whole(name: str, argument: str, value: int, low: int) -> int:
    if not isinstance(value, int) and isinstance(value, numbers.Integral):  # NumPy's
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise StofMaskError(
            f"{name}: {argument} is a whole number of at least {low}, got {value!r}"
        )
    if value >= LARGEST:
        raise StofMaskError(
            f"{name}: {argument} is {value}, and positions are compared in 32 bits; give less than "
            f"{LARGEST}, the largest length will do"
        )
    return value


def _seed(name: str, seed: int) -> int:
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise StofMaskError(f"{name}: seed is a whole number, got {seed!r}")
    return int(seed)


def _fraction(name: str, fill: float) -> float:
    if not isinstance(fill, numbers.Real) or not 0 <= fill <= 1:
        raise StofMaskError(f"{name}: the filled fraction is between 0 and 1, got {fill!r}")
    return float(fill)


def _random(
    name: str, fill: float, block: int, seed: int, max_len: int | None, heads: int
) -> tuple[float, int, int, int | None, int]:
    if max_len is not None:
        max_len = _whole(name, "max_len", max_len, 1)
    block = _whole(name, "the random tile", block, 1)
    return _fraction(name, fill), block, _seed(name, seed), max_len, _whole(name, "heads", heads, 1)
