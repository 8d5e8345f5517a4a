"""What every mask rule is: evaluation by position, by tile, algebra, serialisation and identity.

A rule says which query position sees which key position. Positions are absolute: the builder adds
its query offset before it asks. Rules are immutable; two rules are equal when their keys are equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from stof_compile.errors import StofMaskError

if TYPE_CHECKING:
    from stof_compile.masks.bands import BandRule

EMPTY, FULL, MIXED = 0, 1, 2

PlaneShape = tuple[int | None, int | None]


@dataclass(frozen=True)
class Tiles:
    """A set of tiles for `MaskSpec.classify`, all bounds inclusive and broadcastable together.

    Args:
        q_lo, q_hi, k_lo, k_hi: int tensors, first and last absolute position of the tile on each
            side.
        b, h: int tensors, batch and head index.
        block: upper bound of the tile's edges in tokens.
        aligned: every tile begins at a multiple of its block's edges.
    """

    q_lo: Tensor
    q_hi: Tensor
    k_lo: Tensor
    k_hi: Tensor
    b: Tensor
    h: Tensor
    block: tuple[int, int]
    aligned: bool = False


def three_valued(empty: Tensor, full: Tensor) -> Tensor:
    """Combine two bool tensors into one int8 class: EMPTY wins over FULL, everything else is
    MIXED.
    """
    kind = torch.full_like(empty, MIXED, dtype=torch.int8)
    return kind.masked_fill(full, FULL).masked_fill(empty, EMPTY)


class MaskSpec:
    """Base of all mask rules; subclasses are frozen dataclasses whose fields are plain data,
    tensors or rules.
    """

    rule: ClassVar[str]
    has_code: ClassVar[bool] = False  # of the user, who may have written it for one device
    _shown: ClassVar[str] = ""  # of an instance: what it was bound from, in words
    __array_ufunc__: ClassVar[None] = None  # NumPy leaves `array & rule` to the rule

    # -- evaluation --------------------------------------------------------------------------------

    def keep(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the rule element by element.

        Args:
            b, h, q, k: int64 index tensors that broadcast together, on one device; q and k are
                absolute positions.
        Returns:
            bool tensor of the broadcast shape, True = attend. Pure torch, so it can be traced.
        Raises:
            StofMaskError: the rule depends on the lengths and `bind` was not called.
        """
        raise NotImplementedError

    def classify(
        self,
        q_lo: Tensor,
        q_hi: Tensor,
        k_lo: Tensor,
        k_hi: Tensor,
        b: Tensor,
        h: Tensor,
        block: tuple[int, int] | None = None,
    ) -> Tensor:
        """Classify tiles: 0 empty, 1 full, 2 mixed or unknown.

        Args:
            q_lo, q_hi, k_lo, k_hi: int tensors, inclusive absolute bounds of each tile; they
                broadcast together.
            b, h: int tensors, batch and head of each tile.
            block: upper bound of the tile edges in tokens; found from the bounds (one host sync)
                when not given.
        Returns:
            int8 tensor of the broadcast shape.
        """
        if block is None:
            rows, cols = int((q_hi - q_lo).max()) + 1, int((k_hi - k_lo).max()) + 1
            block = (rows, cols)
        tiles = Tiles(q_lo, q_hi, k_lo, k_hi, b, h, block)
        shape = torch.broadcast_shapes(*(t.shape for t in (q_lo, q_hi, k_lo, k_hi, b, h)))
        return self.classes(tiles).expand(shape)

    def classes(self, tiles: Tiles) -> Tensor:
        """Three-valued class of each tile, int8, broadcastable to the tiles; a rule that can't tell
        says MIXED.
        """
        return torch.full_like(tiles.q_lo, MIXED, dtype=torch.int8)

    def signature(self, tiles: Tiles) -> tuple[Tensor, ...] | None:
        """Integers that decide a tile's content: unclipped tiles with equal signatures have equal
        elements.

        Returns:
            Integer tensors broadcastable to the tiles, or None when only the elements themselves
            tell.
        """
        return None

    def band_rule(self, block_q: int, block_k: int, q_offset: int = 0) -> BandRule | None:
        """Return the arithmetic form that holds on every tile with kept and masked positions, or
        None.
        """
        from stof_compile.masks.bands import derive_band

        return derive_band(self, block_q, block_k, q_offset)

    # -- structure ---------------------------------------------------------------------------------

    @property
    def children(self) -> tuple[MaskSpec, ...]:
        """The rules directly inside this one."""
        return tuple(child for value in self._values() for child in _specs_in(value))

    def map_children(self, change: Callable[[MaskSpec], MaskSpec]) -> MaskSpec:
        """Return this rule with every direct child replaced by ``change(child)``."""
        if not self.children:
            return self
        changes = {
            field.name: _map_specs(getattr(self, field.name), change)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def walk(self) -> Iterator[MaskSpec]:
        """Iterate over this rule and everything inside it."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def is_plain(self) -> bool:
        """True when the rule has neither tensors nor code of the user: the same on all devices."""
        from stof_compile.masks.serial import RULES

        ours = all(type(rule) in RULES and not rule.has_code for rule in self.walk())
        return ours and not self.tensors()

    def expanded(self) -> MaskSpec | None:
        """The algebra a named composition stands for; None for every other rule."""
        return None

    def plane_shape(self) -> PlaneShape:
        """Number of different (batch, head) planes: 1 = shared by all, None = as many as the
        problem has.
        """
        planes: PlaneShape = (1, 1)
        for child in self.children:
            planes = _merge_planes(planes, child.plane_shape())
        return planes

    @property
    def depends_on_lengths(self) -> bool:
        """True when the rule must be bound to lengths before it can be evaluated."""
        return any(child.depends_on_lengths for child in self.children)

    @property
    def moves_with_length(self) -> bool:
        """True when a longer sequence has another pattern among its first tokens."""
        return any(child.moves_with_length for child in self.children)

    def bind(
        self, q_len: int, k_len: int, q_offset: int = 0, device: torch.device | str = "cpu"
    ) -> MaskSpec:
        """Resolve everything relative to the lengths, and check that the rule exists at these
        lengths.

        Args:
            q_len, k_len: lengths in tokens.
            q_offset: absolute position of the first query.
            device: where random tiles are counted if there are many; does not change the result.
        Raises:
            StofMaskError: the rule has fixed lengths and these are others.
        """
        return self.map_children(lambda child: child.bind(q_len, k_len, q_offset, device))

    def at_head(self, head: int) -> MaskSpec:
        """Return the rule as one head sees it: per-head choices are resolved, the rest is
        unchanged.
        """
        return self.map_children(lambda child: child.at_head(head))

    def to(self, device: torch.device | str) -> MaskSpec:
        """Return the rule with its captured tensors on ``device``."""
        if not self.tensors():
            return self
        moved = [tensor.to(device) for tensor in self.tensors()]
        if all(new is old for new, old in zip(moved, self.tensors(), strict=True)):
            return self
        return self.from_json(self.to_json(), moved)

    # -- identity and serialisation ----------------------------------------------------------------

    def tensors(self) -> tuple[Tensor, ...]:
        """Captured tensors in the order `to_json` numbers them."""
        found: list[Tensor] = []
        self._node(found)
        return tuple(found)

    def to_json(self) -> str:
        """Serialise to compact JSON; captured tensors appear as their number in `tensors`."""
        return json.dumps(self._node([]), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str, tensors: Sequence[Tensor] = ()) -> MaskSpec:
        """Inverse of `to_json`.

        Raises:
            StofMaskError: the text is no mask rule.
        """
        from stof_compile.masks.serial import decode

        try:
            node = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StofMaskError(f"not the JSON of a mask rule: {error}") from error
        return decode(node, tensors)

    @cached_property
    def key(self) -> str:
        """Identity as 32 hex digits: the same in every process for the same rule and tensor
        contents.
        """
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def canonical(self) -> dict[str, Any]:
        """Tree that decides identity: named compositions expanded, order of `&` and `|` removed,
        tensors as digests.
        """
        found: list[Tensor] = []
        fields = {
            field.name: _encode(getattr(self, field.name), found, canonical=True)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }
        return {"rule": self.rule, **fields}

    def _values(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def _node(self, tensors: list[Tensor]) -> dict[str, Any]:
        fields = {
            field.name: _encode(getattr(self, field.name), tensors, canonical=False)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }
        return {"rule": self.rule, **fields}

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, MaskSpec) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskSpec.from_json, (self.to_json(), self.tensors())

    def __repr__(self) -> str:
        if self._shown:
            return self._shown
        shown = ", ".join(
            f"{field.name}={_show(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        )
        return f"{self.rule}({shown})"

    # -- algebra -----------------------------------------------------------------------------------

    def __and__(self, other: MaskSpec) -> MaskSpec:
        from stof_compile.masks.algebra import And, operand

        return And((self, operand(other, "&")))

    def __or__(self, other: MaskSpec) -> MaskSpec:
        from stof_compile.masks.algebra import Or, operand

        return Or((self, operand(other, "|")))

    def __rand__(self, other: object) -> MaskSpec:
        from stof_compile.masks.algebra import operand

        return operand(other, "&") & self  # no rule on the left, so this raises

    def __ror__(self, other: object) -> MaskSpec:
        from stof_compile.masks.algebra import operand

        return operand(other, "|") | self

    def __invert__(self) -> MaskSpec:
        from stof_compile.masks.algebra import Not

        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"the mask rule {self!r} is neither true nor false; combine rules by &, | and ~ in "
            "place of `and`, `or` and `not`, and ask `rule is None` where there may be none"
        )


def _merge_planes(left: PlaneShape, right: PlaneShape) -> PlaneShape:
    return _merge_count(left[0], right[0], "batch"), _merge_count(left[1], right[1], "head")


def _merge_count(left: int | None, right: int | None, what: str) -> int | None:
    if left == right or right == 1:
        return left
    if left == 1 or left is None:
        return right
    if right is None:
        return left
    raise StofMaskError(
        f"parts of one mask have {left} and {right} {what} planes; give both the same number, or "
        "one shared plane"
    )


def _specs_in(value: Any) -> tuple[MaskSpec, ...]:
    if isinstance(value, MaskSpec):
        return (value,)
    if isinstance(value, tuple):
        return tuple(one for one in value if isinstance(one, MaskSpec))
    return ()


def _map_specs(value: Any, change: Callable[[MaskSpec], MaskSpec]) -> Any:
    if isinstance(value, MaskSpec):
        return change(value)
    if isinstance(value, tuple):
        return tuple(change(one) if isinstance(one, MaskSpec) else one for one in value)
    return value


def _encode(value: Any, tensors: list[Tensor], *, canonical: bool) -> Any:
    if isinstance(value, MaskSpec):
        return value.canonical() if canonical else value._node(tensors)
    if isinstance(value, Tensor):
        if canonical:
            return {"digest": digest(value)}
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple):
        return [_encode(one, tensors, canonical=canonical) for one in value]
    return value


def shown_as(bound: MaskSpec, rule: MaskSpec) -> MaskSpec:
    """A rule that was just made of another one, shown as that: as a user wrote it."""
    object.__setattr__(bound, "_shown", repr(rule))
    return bound


def digest(tensor: Tensor) -> str:
    """Hex digest of a tensor's dtype, shape and contents."""
    data = tensor.detach().to("cpu").contiguous()
    head = f"{data.dtype}{tuple(data.shape)}".encode()
    body = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return hashlib.sha256(head + body).hexdigest()


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)}>"
    return repr(value)
