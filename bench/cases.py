"""Workloads: which attention problems are measured, and their masks in every spelling a peer needs.

Source: the four masks of Table 2 of the STOF paper with ``width = max(16, isqrt(S))`` for window
and global tokens and 10 % of the empty 64x64 tiles filled at random (BigBird), over the paper's
three settings and 16x4096; ``mha`` has the other cells of its Figures 9 and 10.
``fixed`` is the fixed attention of Sparse Transformers, section 4.3: segments of 128 tokens, of
which the last is seen by all behind it. ``documents`` are packed one behind the other and see
themselves, ``random`` is a tenth of all 64x64 tiles, ``dense`` all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stof_compile.masks.spec import MaskSpec

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MASKS = ("causal", "sliding", "longformer", "bigbird")
RANDOM_FILL = 0.1
RANDOM_BLOCK = 64  # tile of a random part; belongs to the mask, not to a kernel
WITH_RANDOM_TILES = ("bigbird", "random")
DENSE_LIMIT = 32768  # tokens up to which a mask is also built as bool [S, S]: 1 GiB


@dataclass(frozen=True)
class Cell:
    """One attention problem: ``[batch, heads, seq, head_dim]`` under a mask.

    Args:
        mask: one of ``MASKS``, "fixed", "documents", "random" or "dense".
        window, global_tokens: width of the window on each side and number of global tokens; of
            "fixed" the length of a segment and how many of its tokens others see; of "documents"
            their mean length and 0; of "random" and "dense" 0.
        dtype: name of a torch dtype.
    """

    batch: int
    seq: int
    mask: str
    window: int
    global_tokens: int
    heads: int = 12
    head_dim: int = 64
    dtype: str = "float16"
    suffix: str = ""  # tells cells of one grid apart that differ in dtype or head dim

    @property
    def shape_name(self) -> str:
        """``BxS``."""
        return f"{self.batch}x{self.seq}"

    @property
    def name(self) -> str:
        """Unique in a grid: ``BxS/mask[/dtype]``."""
        return f"{self.shape_name}/{self.mask}{self.suffix}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        return torch.float16 if self.dtype == "float16" else getattr(torch, self.dtype)

    @property
    def has_dense_mask(self) -> bool:
        """Whether peers that need the mask as a matrix can run at all."""
        return self.seq <= DENSE_LIMIT

    @property
    def dense_flop(self) -> int:
        """Operations of both products without a mask."""
        return 4 * self.batch * self.heads * self.seq * self.seq * self.head_dim

    @property
    def moved_bytes(self) -> int:
        """Bytes of Q, K, V and the output, each once."""
        itemsize = self.torch_dtype.itemsize
        return 4 * self.batch * self.heads * self.seq * self.head_dim * itemsize

    def columns(self) -> dict[str, Any]:
        """The columns that identify the cell in a CSV row."""
        row = asdict(self)
        row.pop("suffix")
        return {"cell": self.name, **row}


def table2_cell(batch: int, seq: int, mask: str, **other: Any) -> Cell:
    """A cell of the paper's grid: window and global tokens are ``max(16, isqrt(seq))``."""
    width = max(16, math.isqrt(seq))
    return Cell(batch, seq, mask, width, width, **other)


def _cpu_cell(seq: int, dtype: str) -> Cell:
    return Cell(1, seq, "longformer", 32, 16, dtype=dtype, suffix=f"/{dtype}")


TABLE2_SHAPES = ((1, 128), (8, 512), (16, 2048), (16, 4096))
GRIDS: dict[str, tuple[Cell, ...]] = {
    "table2": tuple(
        table2_cell(batch, seq, mask) for batch, seq in TABLE2_SHAPES for mask in MASKS
    ),
    # window 32 + 16 global tokens: the CPU cell of the goals
    "cpu": tuple(_cpu_cell(2048, dtype) for dtype in ("float32", "bfloat16")),
    # minutes of typos cost more on a lent GPU than here: the same code on toy sizes
    "smoke": tuple(
        table2_cell(batch, seq, mask, heads=2, head_dim=32, dtype="float32")
        for batch, seq in ((1, 128), (2, 320))
        for mask in MASKS
    ),
    "long": (
        *(table2_cell(1, 16384, mask, heads=32, head_dim=128) for mask in MASKS),
        *(table2_cell(1, 65536, mask) for mask in ("sliding", "longformer", "bigbird")),
        *(table2_cell(1, 262144, mask) for mask in ("sliding", "longformer")),
        table2_cell(1, 1048576, "sliding"),
    ),
    "headdims": tuple(
        table2_cell(4, 4096, mask, head_dim=dim, dtype=dtype, suffix=f"/d{dim}/{dtype}")
        for dim in (64, 80, 96, 128, 192, 256)
        for dtype in ("float16", "bfloat16")
        for mask in ("causal", "bigbird")
    ),
    "single": tuple(
        table2_cell(16, 2048, mask, dtype="float32", suffix="/float32") for mask in MASKS
    ),
    # columns that are far from each other: tiles hold little of the mask, packed columns do
    "scattered": (
        *(Cell(b, s, "fixed", 128, 1) for b, s in ((8, 512), (16, 2048), (16, 4096))),
        Cell(1, 16384, "fixed", 128, 1, heads=32, head_dim=128),
    ),
    # what packing and block sparsity have: tiles in places that no formula of positions knows
    "blocks": tuple(
        Cell(batch, seq, mask, window, 0, heads=heads, head_dim=dim)
        for batch, seq, heads, dim in ((16, 2048, 12, 64), (16, 4096, 12, 64), (1, 16384, 32, 128))
        for mask, window in (("documents", 512), ("random", 0))
    ),
    # no mask: how far the kernel for sparse masks is from those written for this; causal masks of
    # these shapes are in table2 and long, but for one
    "dense": (
        *(Cell(16, seq, "dense", 0, 0) for seq in (2048, 4096)),
        *(Cell(4, 4096, mask, 0, 0, heads=32, head_dim=128) for mask in ("dense", "causal")),
        Cell(1, 16384, "dense", 0, 0, heads=32, head_dim=128),
    ),
    # what Figures 9 and 10 have beside the cells of table2
    "mha": tuple(
        table2_cell(batch, seq, mask)
        for batch in (1, 8, 16)
        for seq in (128, 256, 512, 1024, 2048, 4096)
        for mask in MASKS
        if (batch, seq) not in TABLE2_SHAPES
    ),
    # of `paper --quick`
    "quick": (table2_cell(1, 128, "bigbird"), table2_cell(8, 512, "bigbird")),
    "quick-long": (table2_cell(1, 16384, "sliding", heads=32, head_dim=128),),
    "quick-cpu": tuple(
        table2_cell(1, seq, mask, heads=4, dtype="float32")
        for seq in (128, 512)
        for mask in ("sliding", "bigbird")
    ),
    "quick-long-cpu": (table2_cell(1, 4096, "sliding", heads=4, dtype="float32"),),
}


def select_cells(cells: Sequence[Cell], wanted: str | None) -> list[Cell]:
    """Keep the cells named by a comma-separated list of ``BxS``, ``mask`` or ``BxS/mask``.

    Raises:
        SystemExit: an entry matches no cell; the message lists the names.
    """
    if not wanted:
        return list(cells)
    chosen: set[str] = set()
    for word in (w.strip() for w in wanted.split(",")):
        hits = [c.name for c in cells if word in (c.name, c.shape_name, c.mask, c.dtype)]
        hits += [c.name for c in cells if c.name.startswith(word + "/")]
        if not hits:
            raise SystemExit(f"no cell {word!r}; cells: {', '.join(c.name for c in cells)}")
        chosen.update(hits)
    return [c for c in cells if c.name in chosen]


def mask_spec(cell: Cell) -> MaskSpec:
    """The mask as STOF's users write it."""
    from stof_compile import masks

    if cell.mask == "dense":
        return masks.dense()
    if cell.mask == "causal":
        return masks.causal()
    if cell.mask == "sliding":
        return masks.sliding_window(cell.window)
    if cell.mask == "longformer":
        return masks.longformer(window=cell.window, global_tokens=cell.global_tokens)
    if cell.mask == "fixed":
        return masks.fixed(cell.window, cell.global_tokens)
    if cell.mask == "documents":
        return masks.document(document_ids(cell))
    if cell.mask == "random":
        return masks.random_blocks(RANDOM_FILL, RANDOM_BLOCK, seed=0)
    return masks.bigbird(
        window=cell.window, global_tokens=cell.global_tokens, random_fill=RANDOM_FILL, seed=0
    )


def document_ids(cell: Cell) -> Tensor:
    """The document of each token, int32 ``[S]``: as many of them as their mean length tells, which
    begin anywhere; always the same."""
    generator = torch.Generator().manual_seed(0)
    begins = torch.randperm(cell.seq - 1, generator=generator)
    ids = torch.zeros(cell.seq, dtype=torch.int32)
    ids[1 + begins[: max(0, cell.seq // cell.window - 1)]] = 1
    return ids.cumsum(0, dtype=torch.int32)


def arithmetic_rule(cell: Cell, device: torch.device) -> MaskMod:
    """The mask as comparisons of positions, or of documents; of masks with random tiles everything
    but these."""
    window, global_tokens = cell.window, cell.global_tokens
    documents = document_ids(cell).to(device) if cell.mask == "documents" else None

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k <= window) & (k - q <= window)

    def longformer(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q - k <= window) & (k - q <= window)) | (q < global_tokens) | (k < global_tokens)

    def fixed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        summary = k % window >= window - global_tokens
        return (q >= k) & ((q // window == k // window) | summary)

    def of_documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[q] == documents[k]

    def nothing(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q < 0) & (k < 0)

    def dense(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= 0) & (k >= 0)

    known = {
        "dense": dense, "causal": causal, "sliding": sliding, "fixed": fixed,
        "documents": of_documents, "random": nothing,
    }  # fmt: skip
    return known.get(cell.mask, longformer)


def dense_mask(cell: Cell, device: torch.device) -> Tensor:
    """The mask as bool ``[S, S]``, True = attend; what every peer and the oracle compute."""
    assert cell.has_dense_mask, f"{cell.name}: a mask of {cell.seq}^2 elements is not built"
    return keep_rows(cell, torch.arange(cell.seq, device=device))


def keep_rows(cell: Cell, rows: Tensor) -> Tensor:
    """Some rows of the mask as bool ``[len(rows), S]``; ``rows`` are positions of queries.

    The arithmetic of this file is compared with STOF's rule, so a wrong rule cannot pass as a fast
    one; random tiles come from STOF's rule, as no formula of this file defines them.
    """
    q, k = rows[:, None], torch.arange(cell.seq, device=rows.device)[None, :]
    theirs, own = _both_rules(cell, q, k)
    if cell.mask in WITH_RANDOM_TILES:
        assert bool((theirs | ~own).all()), "the mask must contain its regular part"
        return theirs.contiguous()
    assert bool((theirs == own).all()), f"STOF's rule of {cell.name} differs from its definition"
    return theirs.contiguous()


def _both_rules(cell: Cell, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """STOF's rule, and the arithmetic of this file, at positions ``[Q, 1]`` and ``[1, K]``."""
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    shape = (q.shape[0], k.shape[1])
    theirs = mask_spec(cell).bind(cell.seq, cell.seq).keep(zero, zero, q, k)
    return theirs.expand(shape), arithmetic_rule(cell, q.device)(zero, zero, q, k).expand(shape)


def densities(cell: Cell, keep: Tensor | None, device: torch.device) -> tuple[float, float]:
    """Share of kept elements, and of elements in touched 64x64 tiles.

    Args:
        keep: the mask bool ``[S, S]``; None where it is too long for one.
    """
    if keep is not None:
        return float(keep.double().mean()), tile_fraction(keep)
    from stof_compile.masks.block_mask import build_block_mask

    built = build_block_mask(mask_spec(cell), cell.seq, cell.seq, 64, device=device)
    return built.density, (built.full_tiles + built.part_tiles) * 64 * 64 / cell.seq**2


def tile_fraction(keep: Tensor, block: int = 64) -> float:
    """Elements of touched ``block x block`` tiles over all elements."""
    seq = keep.shape[0]
    edge = -(-seq // block)
    padded = torch.zeros((edge * block, edge * block), dtype=torch.bool, device=keep.device)
    padded[:seq, :seq] = keep
    touched = padded.view(edge, block, edge, block).any(dim=3).any(dim=1).double()
    sizes = torch.full((edge,), float(block), dtype=torch.float64, device=keep.device)
    sizes[-1] = seq - (edge - 1) * block
    return float(sizes @ touched @ sizes) / (seq * seq)


def random_tile_table(cell: Cell, device: torch.device) -> Tensor:
    """The random tiles as bool ``[tiles, tiles]``: in the mask, not in its formula.

    They are whole tiles that the formula leaves empty, so the first element of each tells.
    """
    first = torch.arange(0, cell.seq, RANDOM_BLOCK, device=device)
    theirs, own = _both_rules(cell, first[:, None], first[None, :])
    return theirs & ~own


def make_inputs(
    cell: Cell, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh normal Q, K, V ``[B, H, S, D]``."""
    shape = (cell.batch, cell.heads, cell.seq, cell.head_dim)
    drawn = [
        torch.randn(shape, device=device, generator=generator).to(cell.torch_dtype)
        for _ in range(3)
    ]
    return drawn[0], drawn[1], drawn[2]
