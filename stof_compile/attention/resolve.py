"""Which mask of ``options["mask"]`` applies to which attention site.

A single mask goes to every self-attention. A dictionary maps module paths to masks; its keys are
compared with whole
path components (``layer.1`` never takes ``layer.10``), ``*`` stands for anything inside one
component, and a key
matches a site when it is a prefix of the site's path. Of several matching keys the longest wins,
then the one with
fewer wildcards. Cross-attention keeps its own mask unless a key matches cross-attention only.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol

from stof_compile.errors import StofMaskError
from stof_compile.masks import as_mask_spec
from stof_compile.masks.spec import MaskSpec


class Place(Protocol):
    """Where attention stands: a site or a near miss."""

    @property
    def name(self) -> str:
        """Unique in the graph."""

    @property
    def path(self) -> tuple[str, ...]:
        """Module path."""

    @property
    def cross(self) -> bool:
        """Cross-attention."""


@dataclass(frozen=True)
class ResolvedMasks:
    """Masks of the option by site, and keys that named no site of this graph.

    Args:
        by_site: site name -> spec; sites without one keep the model's own mask.
        by_path: key of the dictionary -> names of the sites it matched in this graph.
    """

    by_site: dict[str, MaskSpec]
    by_path: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Keys without a site in this graph."""
        return tuple(key for key, names in self.by_path.items() if not names)


def path_matches(key: str, path: Sequence[str]) -> bool:
    """Tell whether ``key`` (dotted, ``*`` inside a component) is a prefix of ``path``, whole
    components only."""
    parts = key.split(".")
    return len(parts) <= len(path) and all(
        fnmatchcase(c, p) for c, p in zip(path, parts, strict=False)
    )


def resolve_masks(
    mask: object, sites: Sequence[Place], *, path_known: bool, whole_model: bool
) -> ResolvedMasks:
    """Assign the option's masks to sites.

    Args:
        mask: ``options["mask"]``: None, one mask, or a mapping from path to mask.
        sites: attention found in this graph.
        path_known: site paths are relative to the compiled root module.
        whole_model: the model is one graph, so a key that matches no site is a mistake.
    Raises:
        StofMaskError: a path matches nothing in a one-graph model, or paths cannot be told in this
            graph.
    """
    if mask is None:
        return ResolvedMasks({})
    if not isinstance(mask, Mapping):
        spec = as_mask_spec(mask)
        return ResolvedMasks({site.name: spec for site in sites if not site.cross})
    specs = {key: as_mask_spec(value) for key, value in mask.items()}
    if sites and not path_known:
        raise StofMaskError(
            f"options['mask'] names paths ({', '.join(specs)}) but this graph starts inside a "
            f"submodule whose place in the model is unknown; its sites are {_listed(sites)}. "
            "Compile the whole model, or give one mask instead of paths"
        )
    hits = {key: [s for s in sites if path_matches(key, s.path)] for key in specs}
    for key, found in hits.items():
        if not found and whole_model:
            raise StofMaskError(_unmatched_message(key, sites))
    by_site: dict[str, MaskSpec] = {}
    for site in sites:
        keys = [
            key
            for key, found in hits.items()
            if site in found and (not site.cross or all(s.cross for s in found))
        ]
        if keys:
            by_site[site.name] = specs[max(keys, key=_specificity)]
    return ResolvedMasks(
        by_site, {key: tuple(site.name for site in found) for key, found in hits.items()}
    )


def _specificity(key: str) -> tuple[int, int]:
    parts = key.split(".")
    return len(parts), -sum("*" in part for part in parts)


def _listed(sites: Sequence[Place]) -> str:
    names = [site.name for site in sites]
    return (
        ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if names
        else "none"
    )


def _unmatched_message(key: str, sites: Sequence[Place]) -> str:
    prefixes = {".".join(site.path[:n]) for site in sites for n in range(1, len(site.path) + 1)}
    close = difflib.get_close_matches(key, prefixes, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return (
        f"options['mask'] has the path {key!r}, which matches no attention of the model{hint} "
        f"Sites: {_listed(sites)}"
    )
