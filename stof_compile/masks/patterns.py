"""Named masks made of elementary rules: longformer, bigbird, strided and so on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError
from stof_compile.masks.random_tiles import RandomTiles
from stof_compile.masks.rules import Band, BlockDiagonal, Multiple, Phase, Range
from stof_compile.masks.spec import MaskSpec, PlaneShape, Tiles, shown_as
from stof_compile.masks.tensor_rules import Points


class Composition(MaskSpec):
    """A named rule that stands for an expression; identity is that of the expression."""

    def expression(self) -> MaskSpec:
        """The rule this name stands for."""
        raise NotImplementedError

    def expanded(self) -> MaskSpec | None:
        """Same as `expression`."""
        return self.expression()

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the expression."""
        return self.expression().keep(b, h, q, k)

    def classes(self, tiles: Tiles) -> Tensor:
        """Classify through the expression."""
        return self.expression().classes(tiles)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """Signature of the expression."""
        return self.expression().signature(tiles)

    def plane_shape(self) -> PlaneShape:
        """Planes of the expression."""
        return self.expression().plane_shape()

    @property
    def depends_on_lengths(self) -> bool:
        """As the expression does."""
        return self.expression().depends_on_lengths

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Bind the expression where lengths matter."""
        if not self.depends_on_lengths:
            return self
        return shown_as(self.expression().bind(q_len, k_len, q_offset, device), self)

    def at_head(self, head: int) -> MaskSpec:
        """A name has no per-head choices."""
        return self

    def canonical(self) -> dict[str, Any]:
        """Tree of the expression."""
        return self.expression().canonical()


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Composition):
    """The first ``count`` positions see and are seen by everything."""

    count: int
    rule: ClassVar[str] = "global_tokens"

    def expression(self) -> MaskSpec:
        """Leading rows or leading columns."""
        return Range("q", 0, self.count) | Range("k", 0, self.count)


@dataclass(frozen=True, eq=False, repr=False)
class Longformer(Composition):
    """Symmetric window or global tokens."""

    window: int
    global_tokens: int
    rule: ClassVar[str] = "longformer"

    def expression(self) -> MaskSpec:
        """Band or leading rows and columns."""
        return Band(-self.window, self.window) | GlobalTokens(self.global_tokens)


@dataclass(frozen=True, eq=False, repr=False)
class BigBird(Composition):
    """Longformer, and a fraction of the tiles it leaves empty."""

    window: int
    global_tokens: int
    random_fill: float
    seed: int = 0
    random_block: int = 64
    max_len: int | None = None
    heads: int = 1
    rule: ClassVar[str] = "bigbird"

    def expression(self) -> MaskSpec:
        """Longformer or random tiles disjoint from it."""
        base = Longformer(self.window, self.global_tokens)
        return base | RandomTiles(
            self.random_fill, self.random_block, self.seed, self.max_len, self.heads, base
        )


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Composition):
    """``|q - k| <= window * dilation`` at multiples of ``dilation``."""

    window: int
    dilation: int
    causal: bool = False
    rule: ClassVar[str] = "dilated"

    def expression(self) -> MaskSpec:
        """Band and multiples."""
        reach = self.window * self.dilation
        return Band(-reach, 0 if self.causal else reach) & Multiple(self.dilation)


@dataclass(frozen=True, eq=False, repr=False)
class Strided(Composition):
    """Causal: the last ``stride`` positions, and every ``stride``-th before them."""

    stride: int
    rule: ClassVar[str] = "strided"

    def expression(self) -> MaskSpec:
        """Local band or causal multiples."""
        return Band(-self.stride, 0) | (Band(None, 0) & Multiple(self.stride))


@dataclass(frozen=True, eq=False, repr=False)
class Fixed(Composition):
    """Causal: the own segment, and the last ``summary`` positions of every segment."""

    stride: int
    summary: int = 1
    rule: ClassVar[str] = "fixed"

    def expression(self) -> MaskSpec:
        """Causal segments or causal summary columns."""
        return Band(None, 0) & (
            BlockDiagonal(self.stride) | Phase(self.stride, self.stride - self.summary)
        )


@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(Composition):
    """Causal, with the first ``prefix`` positions seen by everyone."""

    prefix: int
    rule: ClassVar[str] = "prefix_lm"

    def expression(self) -> MaskSpec:
        """Diagonal or leading columns."""
        return Band(None, 0) | Range("k", 0, self.prefix)


class RelativeComposition(MaskSpec):
    """A named rule that becomes an expression once the lengths are known."""

    def at_lengths(self, length: int) -> MaskSpec:
        """The expression at this sequence length."""
        raise NotImplementedError

    @property
    def depends_on_lengths(self) -> bool:
        """By definition."""
        return True

    @property
    def moves_with_length(self) -> bool:
        """By definition."""
        return True

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Become the expression of the whole sequence, whichever part the queries are."""
        return shown_as(self.at_lengths(max(q_offset + q_len, k_len)), self)

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Not defined before `bind`."""
        raise StofMaskError(f"{self.rule} depends on the length; call bind(q_len, k_len) first")


@dataclass(frozen=True, eq=False, repr=False)
class LongformerAE(RelativeComposition):
    """The longformer generator of the STOF artifact: a second global strip begins in the middle."""

    window: int
    global_tokens: int
    rule: ClassVar[str] = "longformer_ae"

    def at_lengths(self, length: int) -> MaskSpec:
        """Longformer or the second strip."""
        start, stop = length // 2, length // 2 + self.global_tokens
        return (
            Longformer(self.window, self.global_tokens)
            | Range("q", start, stop)
            | Range("k", start, stop)
        )


@dataclass(frozen=True, eq=False, repr=False)
class BigBirdAE(RelativeComposition):
    """Bigbird of the STOF artifact: points scattered in 32 x 32 blocks beside the diagonal."""

    window: int
    global_tokens: int
    random_fill: float
    seed: int = 0
    rule: ClassVar[str] = "bigbird_ae"

    def at_lengths(self, length: int) -> MaskSpec:
        """Longformer or the points, all of which lie within two blocks of the diagonal."""
        draw = random.Random(self.seed)
        edge, last = 32, length // 32 - 2
        codes = set()
        for block in range(last + 1):
            sides = [1, 0] if block == 0 else [-1, 0] if block == last else [-1, 0, 1]
            column = (block + draw.choice(sides)) * edge
            for _ in range(int(edge * edge * self.random_fill)):
                # the artifact draws 0..32, one past the block
                row_in, col_in = draw.randint(0, edge), draw.randint(0, edge)
                codes.add((block * edge + row_in) * 2**31 + column + col_in)
        base = Longformer(self.window, self.global_tokens)
        if not codes:
            return base
        return base | (Band(-2 * edge, 2 * edge) & Points(torch.tensor(sorted(codes))))


@dataclass(frozen=True, eq=False, repr=False)
class PerHead(MaskSpec):
    """A rule of its own for each head."""

    heads: tuple[MaskSpec, ...]
    rule: ClassVar[str] = "per_head"

    def plane_shape(self) -> PlaneShape:
        """As many head planes as there are rules."""
        batch, inner = MaskSpec.plane_shape(self)
        if inner not in (1, None, len(self.heads)):
            raise StofMaskError(
                f"per_head got {len(self.heads)} rules, one of them made for {inner} heads"
            )
        return batch, len(self.heads)

    def at_head(self, head: int) -> MaskSpec:
        """Choose the head's rule; a single one serves all heads."""
        return self.heads[head if len(self.heads) > 1 else 0].at_head(head)

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate every rule and choose by head."""
        result = self.heads[0].keep(b, h, q, k)
        for number, spec in enumerate(self.heads[1:], 1):
            result = torch.where(h == number, spec.keep(b, h, q, k), result)
        return result

    def classes(self, tiles: Tiles) -> Tensor:
        """Classify by every rule and choose by head."""
        result = self.heads[0].classes(tiles)
        for number, spec in enumerate(self.heads[1:], 1):
            result = torch.where(tiles.h == number, spec.classes(tiles), result)
        return result
