"""A mask of the options that no attention of a graph takes, or may take: said, or an error."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch._guards import CompileContext
from torch._logging._internal import warning_once

from stof_compile.attention.resolve import ResolvedMasks, path_matches
from stof_compile.attention.site import AttentionSite, NearMiss
from stof_compile.capture import CaptureFacts
from stof_compile.dump import Record
from stof_compile.errors import StofMaskError
from stof_compile.options import StofOptions

logger = logging.getLogger("stof_compile")


def warn_of_unmatched(resolved: ResolvedMasks, facts: CaptureFacts) -> None:
    """Warn once of a mask path no graph of a model in several graphs can match."""
    modules = facts.place.module_paths.values()
    for key in resolved.unmatched:
        if not any(path_matches(key, path) for path in modules):
            warning_once(
                logger,
                "options['mask']: the path %r names no module of the compiled model, so no "
                "attention takes this mask",
                key,
            )


def warn_of_last_graph(resolved: ResolvedMasks) -> None:
    """Say it when torch compiles a function for the last time: it runs the next graph of it, that
    of another length for instance, without any backend, and so without the mask of the options.
    """
    limit = torch._dynamo.config.recompile_limit
    current = CompileContext.current_compile_id()
    number = None if current is None else current.frame_compile_id
    # failing at the limit is what the user may have asked for already
    if number is None or not resolved.by_site or torch._dynamo.config.fail_on_recompile_limit_hit:
        return
    if number + 1 == limit:
        logger.warning(
            "options['mask']: this is graph %d of %d of one function (recompile_limit); torch will "
            "run it without STOF, and so without the mask, where it needs another. Raise "
            "torch._dynamo.config.recompile_limit, compile with dynamic=True, or set "
            "torch._dynamo.config.fail_on_recompile_limit_hit = True for an error instead",
            number + 1,
            limit,
        )


def refuse_lost_mask(
    resolved: ResolvedMasks,
    places: Sequence[AttentionSite | NearMiss],
    opts: StofOptions,
    record: Record,
) -> None:
    """Say it where attention that should have a mask of the options does not take it.

    That is attention of which the graph does not show whether it is cross-attention, and all there
    is of a graph where one mask was given for all.

    Raises:
        StofMaskError: ``strict``.
    """
    if opts.mask is None:
        return
    left = [place for place in places if place.name not in resolved.by_site]
    untold = [p for p in left if not p.cross_known and _is_meant(opts.mask, p)]
    if untold:
        message = (
            f"the mask of the options is not put into {_names(untold)}: queries and keys come into "
            "this graph with different lengths, so that it does not show whether they are one "
            "sequence; compute both in one graph, call sparse_attention, or name it by path "
            "(queries and keys then count from 0 each)"
        )
    elif left and not resolved.by_site and not isinstance(opts.mask, Mapping):
        message = (
            "the mask of the options was put into no attention of this graph: "
            f"{_names(left)} reads keys of another sequence than its queries (cross-attention); "
            "name it by path, or call sparse_attention"
        )
    else:
        return
    if opts.strict:
        raise StofMaskError(message + " (strict=True)")
    record.notes.append(message)
    warning_once(logger, message)


def _is_meant(mask: object, place: AttentionSite | NearMiss) -> bool:
    """Whether the option means a place, were it self-attention."""
    return not isinstance(mask, Mapping) or any(path_matches(key, place.path) for key in mask)


def _names(places: Sequence[AttentionSite | NearMiss]) -> str:
    return ", ".join(place.name for place in places[:4])
