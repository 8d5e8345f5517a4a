"""The initial scheme: fusion by rule, from op kinds and sizes, before anything is measured.

Stage 1 begins here; with ``tune_budget_s`` = 0 the scheme is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stof_compile.fusion.scheme import Scheme
from stof_compile.search.kinds import Kind

CHAIN_ROWS = 1024
"""Most rows (B*S) for which two GEMMs start in one segment. Source: specs/01, section 8 (ours); the
paper has a gain at (1, 128) only, and none on the A100, so a device may need another limit."""

NORM_COLUMNS = 512
"""Most columns (N) for which a GEMM starts in one segment with the norm behind it: one block has to
hold whole rows of the result. Source: specs/01, section 8."""

GEMMS = frozenset({"linear", "matmul", "addmm"})
"""Kinds (names of fusion.op_kind) that are fused by rule. Attention is no GEMM: it is one op, and
its boundary stays, since breaking it costs up to 1.5x (STOF paper)."""
BIASES = frozenset({"bias_add", "residual_add"})
NORMS = frozenset({"layer_norm", "rms_norm"})
ACTIVATIONS = frozenset({"gelu", "relu", "silu", "tanh", "sigmoid"})


@dataclass(frozen=True)
class InitialLimits:
    """Where the rules end on a device.

    Args:
        chain_rows, norm_columns: see :data:`CHAIN_ROWS`, :data:`NORM_COLUMNS`.
        few_rows: most rows of which a GEMM starts in one segment with its activation, or with the
            norm behind it whatever its columns (split-K sums that the norm reads); 0 = never.
        activation: whether a search begins with a GEMM and its activation in one segment whatever
            the rows. What is taken unmeasured does not: the fastest template differs by dtype.
    """

    chain_rows: int = CHAIN_ROWS
    norm_columns: int = NORM_COLUMNS
    few_rows: int = 0
    activation: bool = False


def limits_of(capability: tuple[int, int] | None) -> InitialLimits:
    """Limits for a CUDA device.

    On Hopper two GEMMs in one kernel lost to GEMM + activation and GEMM + norm apart (BERT-base,
    128 rows, H200: 17.1 us against 14.7 us, measured in turns, 2026-11-21), which won against the
    library (5.7 against 7.3 us, 8.6 against 11.5 us). With many rows GEMM + GELU in fp16 was kept
    by every search of BERT-base that came to try it (template hopper_linear, 34 us against 43 us
    apart at 4,096 rows, H200); one on a slow host ended before it did (2026-11-25).
    """
    if capability is not None and capability[0] == 9:
        return InitialLimits(chain_rows=0, few_rows=256, activation=True)
    return InitialLimits()


class SizedKind(Kind, Protocol):
    """Kind of an op with the width of its result."""

    @property
    def columns(self) -> int:
        """N: length of the last dimension of the op's result."""


def initial_scheme(
    kinds: Sequence[SizedKind],
    rows: int,
    legality: Callable[[int, int], str | None],
    *,
    limits: InitialLimits | None = None,
    searched: bool = True,
) -> Scheme:
    """Cut a chain by rule, from left to right; the first rule that fits and is legal decides.

    1. GEMM, ops that are no norm, GEMM: one segment while ``rows`` <= ``chain_rows``.
    2. GEMM, biases, norm: one segment while the GEMM has at most ``norm_columns`` columns, or few
       rows.
    3. GEMM, activation: one segment with few rows, or where the limits let a search begin so.
    4. Biases, norm: one segment.
    5. All else is left unfused.

    Args:
        kinds: ops of the chain, at least one.
        rows: B*S, rows of every GEMM of the chain.
        legality: (start, stop) -> why the ops cannot be one kernel, None if they can.
        limits: of the rules; None = those of specs/01, section 8.
        searched: whether the scheme is where a search begins, and not what is taken unmeasured.
    Raises:
        ValueError: the chain is empty.
    Source: STOF paper, initial scheme; limits from specs/01, section 8.
    """
    held = limits or InitialLimits()
    few = rows <= held.few_rows
    lengths: list[int] = []
    start = 0
    while start < len(kinds):
        stops: list[int | None] = []
        if kinds[start].name in GEMMS:
            if rows <= held.chain_rows:
                stops.append(_end_of_gemm_chain(kinds, start))
            if few or kinds[start].columns <= held.norm_columns:
                stops.append(_end_of_norm(kinds, start + 1))
            joined = few or (searched and held.activation)
            if joined and start + 1 < len(kinds) and kinds[start + 1].name in ACTIVATIONS:
                stops.append(start + 2)
        elif kinds[start].name in BIASES:
            stops.append(_end_of_norm(kinds, start))
        legal = (stop for stop in stops if stop is not None and legality(start, stop) is None)
        stop = next(legal, start + 1)
        lengths.append(stop - start)
        start = stop
    return Scheme(tuple(lengths))


def _end_of_gemm_chain(kinds: Sequence[SizedKind], start: int) -> int | None:
    """End of the GEMM behind the one at ``start``, with only simple ops in between."""
    for index in range(start + 1, len(kinds)):
        if kinds[index].name in GEMMS:
            return index + 1
        if kinds[index].compute_intensive or kinds[index].name in NORMS:
            return None
    return None


def _end_of_norm(kinds: Sequence[SizedKind], start: int) -> int | None:
    """End of the norm that stands at ``start`` or behind the biases there."""
    index = start
    while index < len(kinds) and kinds[index].name in BIASES:
        index += 1
    return index + 1 if index < len(kinds) and kinds[index].name in NORMS else None
