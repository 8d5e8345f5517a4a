"""Peers: every way to run a masked attention, at its best, as ``(q, k, v) -> out``.

A peer has one or more variants (settings); the best correct one counts. Masks, tables and block
masks are prepared in ``build``, outside the timed call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import (
    RANDOM_BLOCK,
    WITH_RANDOM_TILES,
    Cell,
    MaskMod,
    arithmetic_rule,
    mask_spec,
    random_tile_table,
)
from fa4 import DTYPES as FA4_DTYPES
from fa4 import MASKS as FA4_MASKS
from fa4 import fa4_attention, load_fa4
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class PeerMissingError(Exception):
    """The peer cannot run here: its package is not installed, or its mask would not fit."""


@dataclass(frozen=True)
class Setup:
    """What a variant may use: the cell, its mask bool ``[S, S]`` (None where that is too long),
    STOF's store of choices.
    """

    cell: Cell
    device: torch.device
    keep: Tensor | None
    store: Path

    @property
    def dense(self) -> Tensor:
        """The mask bool ``[S, S]``.

        Raises:
            PeerMissingError: the cell is too long for one.
        """
        if self.keep is None:
            raise PeerMissingError(
                f"it takes the mask as a matrix, here of {self.cell.seq**2 / 2**30:.0f} GiB"
            )
        return self.keep

    @property
    def choices(self) -> Path:
        """STOF's folder in the store, where it also looks without being told."""
        return self.store / "stof-compile"


@dataclass(frozen=True)
class Variant:
    """One setting of a peer.

    Args:
        fp8: it rounds q, k and v to e4m3, which the others do not: it runs only where it is named,
            and is held to attention on what it rounded.
    """

    peer: str
    name: str
    build: Callable[[Setup], Attend]
    fp8: bool = False


# -- SDPA ------------------------------------------------------------------------------------------


def _sdpa_mask(setup: Setup, backend: SDPBackend | None = None) -> Attend:
    keep = setup.dense[None, None]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    if setup.device.type == "cpu":
        return torch.compile(run, dynamic=False)
    return run if backend is None else _under(backend, run)


def _sdpa_plain(setup: Setup, backend: SDPBackend | None = None) -> Attend:
    causal = setup.cell.mask == "causal"

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run if backend is None else _under(backend, run)


def _under(backend: SDPBackend, run: Attend) -> Attend:
    def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return run(q, k, v)

    return forced


# -- FlexAttention ---------------------------------------------------------------------------------


def _flex(block_mask: BlockMask, options: Any, mode: str | None = None) -> Attend:
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=block_mask, kernel_options=options or None)

    return run


def _block_mask(setup: Setup, rule: MaskMod, block: int) -> BlockMask:
    seq = setup.cell.seq
    # compiled it never holds the mask as a matrix, which long ones need
    return create_block_mask(
        rule, None, None, seq, seq, device=setup.device, BLOCK_SIZE=block,
        _compile=setup.keep is None,
    )  # fmt: skip


def gather_rule(keep: Tensor) -> MaskMod:
    """Look every element up in the dense mask: what people write when a mask has no formula."""
    return lambda b, h, q, k: keep[q, k]


def table_rule(cell: Cell, device: torch.device) -> MaskMod:
    """Arithmetic, and for random tiles one lookup in a small table of tiles."""
    regular = arithmetic_rule(cell, device)
    if cell.mask not in WITH_RANDOM_TILES:
        return regular
    table = random_tile_table(cell, device)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return regular(b, h, q, k) | table[q // RANDOM_BLOCK, k // RANDOM_BLOCK]

    return rule


def split_block_mask(setup: Setup, block: int, causal: bool = False) -> BlockMask:
    """Block mask of the whole rule, but only its arithmetic part evaluated inside partial blocks.

    Right because random tiles are whole blocks, on either side of the diagonal:
    FlexAttention never evaluates the rule in full blocks. The last block of a ragged length is
    never full, so there the whole rule is evaluated.

    Args:
        causal: and-ed with the cell's mask.
    """
    assert RANDOM_BLOCK % block == 0, (
        f"random tiles of {RANDOM_BLOCK} are not whole blocks of {block}"
    )
    cell, device = setup.cell, setup.device
    whole, arithmetic = table_rule(cell, device), arithmetic_rule(cell, device)
    if causal:
        whole, arithmetic = _and_causal(whole), _and_causal(arithmetic)
    built = _block_mask(setup, whole, block)
    if setup.cell.seq % block:
        return built
    return BlockMask.from_kv_blocks(
        built.kv_num_blocks,
        built.kv_indices,
        built.full_kv_num_blocks,
        built.full_kv_indices,
        BLOCK_SIZE=block,
        mask_mod=arithmetic,
        seq_lengths=(setup.cell.seq, setup.cell.seq),
    )


def _and_causal(rule: MaskMod) -> MaskMod:
    return lambda b, h, q, k: (q >= k) & rule(b, h, q, k)


def _flex_default(setup: Setup) -> Attend:
    rule = arithmetic_rule(setup.cell, setup.device)
    if setup.cell.mask in WITH_RANDOM_TILES:
        rule = gather_rule(setup.dense)
    return _flex(_block_mask(setup, rule, 128), {})


def _flex_default_table(setup: Setup) -> Attend:
    return _flex(_block_mask(setup, table_rule(setup.cell, setup.device), 128), {})


def flex_expert(
    setup: Setup, block: int, options: dict[str, Any], mode: str | None = None
) -> Attend:
    """FlexAttention with an arithmetic rule, blocks of a size, kernel options and a mode."""
    rule = table_rule(setup.cell, setup.device)
    return _flex(_block_mask(setup, rule, block), options, mode)


def flex_split(
    setup: Setup, block: int, options: dict[str, Any], mode: str | None = None
) -> Attend:
    """The same with :func:`split_block_mask`."""
    return _flex(split_block_mask(setup, block), options, mode)


def _flex_flash(setup: Setup) -> Attend:
    _fa4_function(setup.cell)
    rule = table_rule(setup.cell, setup.device)
    return _flex(_block_mask(setup, rule, 128), {"BACKEND": "FLASH"})


# -- FlashAttention 4 ------------------------------------------------------------------------------


def _fa4_function(cell: Cell) -> Callable[..., Any]:
    function = load_fa4()
    if function is None:
        raise PeerMissingError("FA4 (flash_attn.cute) is not installed")
    if cell.torch_dtype not in FA4_DTYPES:
        raise PeerMissingError(f"FA4 has no {cell.dtype}")
    return function


def _fa4(setup: Setup) -> Attend:
    """Its own function, for the masks it has."""
    return fa4_attention(_fa4_function(setup.cell), setup.cell.mask, setup.cell.window)


# -- FlexAttention's settings ----------------------------------------------------------------------


SAFE = {"ROWS_GUARANTEED_SAFE": True}
# the flag asks for a kept key in the first tile that a row visits: under these masks there is one
SAFE_MASKS = ("causal", "dense", "longformer", "bigbird", "fixed")
M64 = {"BLOCK_M": 64, "BLOCK_N": 64}


def expert_settings(cell: Cell) -> list[tuple[str, int, dict[str, Any]]]:
    """Settings an expert would try: (name, block size, kernel options)."""
    tuned: list[tuple[str, int, dict[str, Any]]] = [
        ("b64{}", 64, dict(M64)),
        ("b64{}-s2", 64, M64 | {"num_stages": 2}),
        ("b64{}-w8", 64, M64 | {"num_warps": 8}),
        ("b64{}-tma", 64, M64 | {"USE_TMA": True}),
        ("b64{}-prescale", 64, M64 | {"PRESCALE_QK": True}),
        ("b128{}", 128, {}),
        ("b128-m64{}", 128, dict(M64)),
    ]
    if cell.mask in ("causal", "dense"):  # whose partial and full blocks are one run each
        tuned += [("b128{}-contiguous", 128, {"BLOCKS_ARE_CONTIGUOUS": True})]
    if cell.seq <= 1024:
        tuned += [("b32{}", 32, {"BLOCK_M": 32, "BLOCK_N": 32})]
    if cell.dtype == "float32":  # twice the bytes and registers: smaller tiles
        tuned += [
            ("b64-n32{}", 64, {"BLOCK_M": 64, "BLOCK_N": 32}),
            ("b64-m32{}", 64, {"BLOCK_M": 32, "BLOCK_N": 32}),
        ]
    if cell.mask not in SAFE_MASKS:
        return [(name.format(""), block, options) for name, block, options in tuned]
    safe = [(name.format("-safe"), block, options | SAFE) for name, block, options in tuned]
    return [("b64", 64, dict(M64)), *safe]


# -- STOF ------------------------------------------------------------------------------------------


def _stof_option(setup: Setup, **options: Any) -> Attend:
    """What a user writes for existing code: plain SDPA, the mask through options."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    return _with_stof(attend, setup, {"mask": mask_spec(setup.cell), **options})


def _stof_call(setup: Setup) -> Attend:
    """What a user writes for new code: STOF's function inside a compiled one."""
    import stof_compile

    spec = mask_spec(setup.cell)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof_compile.sparse_attention(q, k, v, mask=spec)

    return _with_stof(attend, setup, {})


def _with_stof(attend: Attend, setup: Setup, options: dict[str, Any]) -> Attend:
    common = {"cache_dir": setup.choices, "strict": True}
    return torch.compile(attend, backend="stof", dynamic=False, options=options | common)


def _stof_function(setup: Setup) -> Attend:
    import stof_compile

    return partial(stof_compile.sparse_attention, mask=mask_spec(setup.cell))


# -- lists -----------------------------------------------------------------------------------------


def default_variants(cell: Cell) -> list[Variant]:
    """Spellings of a call with default blocks; two where the mask has no formula.

    ``b128`` then is the lookup in the dense mask: rows measured before there were two have its
    name.
    """
    variants = [Variant("flex_default", "b128", _flex_default)]
    if cell.mask in WITH_RANDOM_TILES:
        variants += [Variant("flex_default", "b128_table", _flex_default_table)]
    return variants


def chosen_variants(cell: Cell, device: torch.device, only: Iterable[str]) -> list[Variant]:
    """The variants that ``--peers`` selects: all of a ``peer``, or one as ``peer/variant``."""
    return chosen_of(attention_variants(cell, device), only)


def chosen_of(every: Iterable[Variant], only: Iterable[str]) -> list[Variant]:
    """Those of ``every`` that ``only`` names as ``--peers`` does; by default all but fp8."""
    wanted = set(only)
    if not wanted:
        return [v for v in every if not v.fp8]
    return [v for v in every if v.peer in wanted or f"{v.peer}/{v.name}" in wanted]


def attention_variants(cell: Cell, device: torch.device) -> list[Variant]:
    """Every variant of every peer, STOF first: a cell that is cut off has its rows."""
    stof = [
        Variant("stof", "option", _stof_option),
        Variant("stof", "function", _stof_call),
        Variant("stof_fn", "eager", _stof_function),
    ]
    if device.type == "cpu":
        return [
            *stof,
            Variant("sdpa_mask", "compiled", _sdpa_mask),
            *default_variants(cell),
            Variant("flex_expert", "b32", lambda s: flex_expert(s, 32, {})),
            Variant("flex_expert", "b64", lambda s: flex_expert(s, 64, {})),
        ]
    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    variants = [
        Variant("sdpa_mask", "default", _sdpa_mask),
        Variant(
            "sdpa_mask", "efficient", partial(_sdpa_mask, backend=SDPBackend.EFFICIENT_ATTENTION)
        ),
        Variant("sdpa_mask", "cudnn", partial(_sdpa_mask, backend=cudnn)),
    ]
    if cell.mask in ("causal", "dense"):
        peer = f"sdpa_{cell.mask}"
        variants += [
            Variant(peer, "default", _sdpa_plain),
            Variant(peer, "flash", partial(_sdpa_plain, backend=flash)),
            Variant("cudnn", cell.mask, partial(_sdpa_plain, backend=cudnn)),
        ]
        stof += [Variant("stof_block", "option", partial(_stof_option, attention="block"))]
    if cell.mask in FA4_MASKS:
        variants += [Variant("fa4", "function", _fa4)]
    variants += default_variants(cell)
    for name, block, options in expert_settings(cell):
        variants += [
            Variant("flex_expert", name, partial(flex_expert, block=block, options=options))
        ]
        if cell.mask == "bigbird" and name in ("b64-safe", "b64-safe-s2", "b32-safe"):
            variants += [
                Variant("flex_split", name, partial(flex_split, block=block, options=options))
            ]
    rounded = Variant("stof_fp8", "option", partial(_stof_option, fp8=True), fp8=True)
    return [*stof, rounded, *variants, Variant("flex_flash", "fa4", _flex_flash)]
