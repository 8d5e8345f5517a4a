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
    modules = facts.module_paths.values()
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
    """Say it when one mask was given for all attention and none of this graph's takes it."""
    if opts.mask is None or isinstance(opts.mask, Mapping) or not places or resolved.by_site:
        return
    message = (
        "the mask of the options was put into no attention of this graph: "
        f"{', '.join(place.name for place in places[:4])} reads keys of another sequence than its "
        "queries (cross-attention); name it by path, or call sparse_attention"
    )
    if opts.strict:
        raise StofMaskError(message + " (strict=True)")
    record.notes.append(message)
    warning_once(logger, message)
