"""What became of one attention site, for the record of the graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from stof_compile.attention.site import AttentionSite
from stof_compile.plan import AttentionPlan


@dataclass
class SiteReport:
    """What became of one attention site.

    Args:
        status: ``rewritten`` (a STOF call took its place) | ``kept`` (left as it was) | ``masked``
            (left, with the
            option's mask and-ed into it).
        reason: why, in one sentence.
        kernel: what runs there now.
        option_mask, static_mask: the option's mask for this site and all static masks joined, as
            text.
        shape: sizes and dtype, for people.
        statistics: of the block mask. choice: the decision with its candidates; key: of its
            problem.
        tiles: picture of the static mask (``masks.tile_map``), empty where there is none.
        no_fp8: why fp8, which was asked for, is not used; empty where it is, or was not asked for.
        folded: buffers of the model whose present contents went into the static mask.
    """

    name: str
    form: str
    source: str
    status: str = "kept"
    reason: str = ""
    kernel: str = ""
    option_mask: str = ""
    static_mask: str = ""
    padding: bool = False
    bias: bool = False
    cross: bool = False
    shape: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    choice: AttentionPlan | None = None
    key: str = ""
    tiles: dict[str, Any] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    no_fp8: str = ""

    @property
    def mask(self) -> str:
        """All that restricts the keys, in words."""
        parts = [
            self.static_mask or self.option_mask,
            "padding" if self.padding else "",
            "bias" if self.bias else "",
        ]
        return " & ".join(part for part in parts if part) or "none"


def site_shape(site: AttentionSite) -> dict[str, Any]:
    """Return sizes and dtype of a site as plain values; symbols as text."""
    q, k = site.q.meta["example_value"], site.k.meta["example_value"]
    k_len = k.shape[-1] if site.k_transposed else k.shape[-2]
    names = ("batch", "q_heads", "q_len", "head_dim", "kv_heads", "k_len")
    sizes = (*q.shape, k.shape[1], k_len)
    shape: dict[str, Any] = {
        n: (str(s) if isinstance(s, torch.SymInt) else int(s))
        for n, s in zip(names, sizes, strict=True)
    }
    return {**shape, "dtype": str(q.dtype).removeprefix("torch.")}
