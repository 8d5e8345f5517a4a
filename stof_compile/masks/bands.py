"""Arithmetic form of a mask on its part tiles: a band, leading rows and columns, and a cap.

Where it exists, a kernel compares positions instead of reading bitmaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from stof_compile.masks.algebra import And, Not, Or
from stof_compile.masks.rules import Band, BlockDiagonal, Dense, Range
from stof_compile.masks.spec import MaskSpec

FAR = 2**30
"""Stands for a limit that is absent; no length reaches it."""


@dataclass(frozen=True)
class BandRule:
    """``((lo <= d <= hi) | (q < global_q) | (k < global_k)) & (d <= cap)`` with ``d = k - q``,
    absolute positions.

    Args:
        lo, hi: band limits in tokens; ``-FAR`` / ``FAR`` = unlimited, ``lo > hi`` = no band.
        global_q, global_k: number of leading queries and keys that see and are seen by everything;
            0 = none.
        cap: upper limit of d over everything; ``FAR`` = none.
    """

    lo: int = -FAR
    hi: int = FAR
    global_q: int = 0
    global_k: int = 0
    cap: int = FAR

    def keep(self, q: Tensor, k: Tensor) -> Tensor:
        """Evaluate the form on int position tensors that broadcast together; bool."""
        d = k - q
        band = (d >= self.lo) & (d <= self.hi)
        return (band | (q < self.global_q) | (k < self.global_k)) & (d <= self.cap)

    def as_ints(self) -> list[int]:
        """The five numbers in the order of the kernels' ``band`` argument."""
        return [self.lo, self.hi, self.global_q, self.global_k, self.cap]

    def as_spec(self) -> MaskSpec:
        """The same form as a mask rule."""
        lo = None if self.lo <= -FAR else self.lo
        parts: list[MaskSpec] = []
        if self.has_band:
            parts.append(Band(lo, None if self.hi >= FAR else self.hi))
        if self.global_q:
            parts.append(Range("q", 0, self.global_q))
        if self.global_k:
            parts.append(Range("k", 0, self.global_k))
        base = Or(tuple(parts)) if parts else Not(Dense())
        return base if self.cap >= FAR else base & Band(None, self.cap)

    @property
    def has_band(self) -> bool:
        """False when no diagonal is kept by the band itself."""
        return self.lo <= self.hi

    @property
    def has_globals(self) -> bool:
        """True when leading rows or columns are kept."""
        return self.global_q > 0 or self.global_k > 0


NOTHING = BandRule(lo=FAR, hi=-FAR)


def derive_band(spec: MaskSpec, block_q: int, block_k: int, q_offset: int) -> BandRule | None:
    """Derive the arithmetic form of a rule on unclipped tiles that are neither empty nor full.

    Rules that are constant on every tile of this size drop out: below a mixed `|` they must be
        empty, below a mixed
    `&` full. That conclusion needs the mixed node to have one varying operand only, or a cap that
    decides (see `_under_cap`).
    """
    grid = (block_q, block_k, q_offset)
    return None if _is_constant(spec, *grid) else _form(spec, grid, mixed=True)


def _form(spec: MaskSpec, grid: tuple[int, int, int], *, mixed: bool) -> BandRule | None:
    """Form of ``spec``; ``mixed`` = the tile is known to be mixed in this very node."""
    form = _leaf_form(spec)
    if form is not None:
        return form
    if isinstance(spec, Not):
        return _negate(_form(spec.operand, grid, mixed=mixed))
    if not isinstance(spec, And | Or):
        expanded = spec.expanded()
        return None if expanded is None else _form(expanded, grid, mixed=mixed)
    operands = _flatten(spec)
    varying = [one for one in operands if not _is_constant(one, *grid)]
    if len(varying) < len(operands) and not mixed:
        return None
    if isinstance(spec, And) and len(varying) > 1:
        capped = _under_cap(varying, grid)
        if capped is not None:
            return capped
    forms = [_form(one, grid, mixed=mixed and len(varying) == 1) for one in varying]
    return _join(forms, both=isinstance(spec, And))


def _leaf_form(spec: MaskSpec) -> BandRule | None:
    if isinstance(spec, Dense):
        return BandRule()
    if isinstance(spec, Band):
        return BandRule(-FAR if spec.lo is None else spec.lo, FAR if spec.hi is None else spec.hi)
    if isinstance(spec, Range) and spec.start <= 0:
        count = max(spec.stop, 0)
        return replace(NOTHING, **{f"global_{spec.axis}": count})
    return None


def _under_cap(varying: Sequence[MaskSpec], grid: tuple[int, int, int]) -> BandRule | None:
    """Form of ``(form | constants) & (d <= cap)`` on its mixed tiles.

    If the cap is mixed on a tile, the tile holds d = cap and d = cap + 1. Constants that are empty
    wherever the form keeps something are then empty, provided the form's band holds one of the two.
    If the cap is full, the `|` itself is mixed, so its constants are empty as well.
    """
    from stof_compile.masks.random_tiles import RandomTiles

    caps = [_leaf_form(one) for one in varying]
    limits = [cap.hi for cap in caps if cap is not None and cap.lo == -FAR and cap.has_band]
    others = [one for one, cap in zip(varying, caps, strict=True) if cap is None]
    if not limits or len(others) != 1 or len(limits) + 1 != len(varying):
        return None
    expanded = others[0].expanded()
    inner = others[0] if expanded is None else expanded
    if not isinstance(inner, Or):
        return None
    parts = _flatten(inner)
    constants = [one for one in parts if _is_constant(one, *grid)]
    form = _join(
        [_form(one, grid, mixed=False) for one in parts if one not in constants], both=False
    )
    if form is None or not constants:
        return None
    cap = min(limits)
    for one in constants:
        avoided = one.empty_in if isinstance(one, RandomTiles) else None
        base = None if avoided is None else _form(avoided, grid, mixed=False)
        if base is None or not (
            base.has_band and (base.lo <= cap <= base.hi or base.lo <= cap + 1 <= base.hi)
        ):
            return None
    return _intersect(form, BandRule(hi=cap))


def _flatten(spec: And | Or) -> list[MaskSpec]:
    """Operands with nested operations of the same kind opened, named compositions included."""
    flat: list[MaskSpec] = []
    for operand in spec.operands:
        expanded = operand.expanded()
        inner = operand if expanded is None else expanded
        flat.extend(
            _flatten(inner)
            if type(inner) is type(spec) and isinstance(inner, And | Or)
            else [operand]
        )
    return flat


def _is_constant(spec: MaskSpec, block_q: int, block_k: int, q_offset: int) -> bool:
    """True when the rule has one value on every unclipped tile of the grid."""
    from stof_compile.masks.random_tiles import RandomTiles

    if isinstance(spec, RandomTiles):
        return _divides(spec.block, block_q, block_k, q_offset)
    if isinstance(spec, BlockDiagonal):
        return _divides(spec.size, block_q, block_k, q_offset)
    if isinstance(spec, Range):
        step = block_q if spec.axis == "q" else block_k
        shift = q_offset if spec.axis == "q" else 0
        return (spec.start <= 0 or (spec.start - shift) % step == 0) and (
            spec.stop - shift
        ) % step == 0
    if isinstance(spec, And | Or | Not):
        return all(_is_constant(child, block_q, block_k, q_offset) for child in spec.children)
    expanded = spec.expanded()
    return expanded is not None and _is_constant(expanded, block_q, block_k, q_offset)


def _divides(size: int, block_q: int, block_k: int, q_offset: int) -> bool:
    return size % block_q == 0 and size % block_k == 0 and q_offset % block_q == 0


def _join(forms: Sequence[BandRule | None], *, both: bool) -> BandRule | None:
    result: BandRule | None = None
    for form in forms:
        if form is None:
            return None
        if result is None:
            result = form
            continue
        result = _intersect(result, form) if both else _unite(result, form)
        if result is None:
            return None
    return result


def _negate(form: BandRule | None) -> BandRule | None:
    if form is None or form.has_globals:
        return None
    form = _fold_cap(form)
    if not form.has_band:
        return BandRule()
    if form.lo == -FAR:
        return NOTHING if form.hi == FAR else BandRule(lo=form.hi + 1)
    return BandRule(hi=form.lo - 1) if form.hi == FAR else None


def _fold_cap(form: BandRule) -> BandRule:
    """Without global rows and columns the cap is just an upper band limit."""
    return form if form.has_globals else replace(form, hi=min(form.hi, form.cap), cap=FAR)


def _intersect(left: BandRule, right: BandRule) -> BandRule | None:
    left, right = _fold_cap(left), _fold_cap(right)
    if left.has_globals and right.has_globals:
        return left if left == right else None
    if right.has_globals:
        left, right = right, left
    if not left.has_globals:
        return BandRule(max(left.lo, right.lo), min(left.hi, right.hi))
    if right.lo == -FAR and right.has_band:
        return replace(left, cap=min(left.cap, right.hi))
    return None


def _unite(left: BandRule, right: BandRule) -> BandRule | None:
    left, right = _fold_cap(left), _fold_cap(right)
    if left.cap != right.cap:
        if right.cap < left.cap:
            left, right = right, left
        # only a plain band that ends below the other's cap can join it
        if right.has_globals or (right.has_band and right.hi > left.cap):
            return None
    band = _hull(left, right)
    if band is None:
        return None
    globals_q = max(left.global_q, right.global_q)
    return BandRule(*band, globals_q, max(left.global_k, right.global_k), left.cap)


def _hull(left: BandRule, right: BandRule) -> tuple[int, int] | None:
    """Smallest band holding both, when nothing lies between them."""
    if not left.has_band:
        return right.lo, right.hi
    if not right.has_band:
        return left.lo, left.hi
    if max(left.lo, right.lo) > min(left.hi, right.hi) + 1:
        return None
    return min(left.lo, right.lo), max(left.hi, right.hi)
