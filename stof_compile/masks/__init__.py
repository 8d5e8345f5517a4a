"""Mask rules, their algebra and their block-sparse storage: what users write.

A rule says which query position sees which key position: ``masks.causal() &
masks.sliding_window(512)``. Rules combine with ``&``, ``|`` and ``~``, differ per head with
`per_head`, and become a `BlockMask` for given lengths.
"""

from stof_compile.masks.block_mask import BlockMask, build_block_mask
from stof_compile.masks.constructors import (
    batch_prefix_lm,
    bigbird,
    bigbird_ae,
    block_diagonal,
    causal,
    dense,
    dilated,
    document,
    fixed,
    from_cu_seqlens,
    from_tensor,
    global_tokens,
    longformer,
    longformer_ae,
    per_head,
    prefix_lm,
    random_blocks,
    rule,
    sliding_window,
    strided,
)
from stof_compile.masks.convert import as_mask_spec, from_block_mask, to_flex
from stof_compile.masks.mask_cache import cached_block_mask
from stof_compile.masks.recognise import recognise
from stof_compile.masks.spec import MaskSpec

__all__ = [
    "BlockMask",
    "MaskSpec",
    "as_mask_spec",
    "batch_prefix_lm",
    "bigbird",
    "bigbird_ae",
    "block_diagonal",
    "build_block_mask",
    "cached_block_mask",
    "causal",
    "dense",
    "dilated",
    "document",
    "fixed",
    "from_block_mask",
    "from_cu_seqlens",
    "from_tensor",
    "global_tokens",
    "longformer",
    "longformer_ae",
    "per_head",
    "prefix_lm",
    "random_blocks",
    "recognise",
    "rule",
    "sliding_window",
    "strided",
    "to_flex",
]
