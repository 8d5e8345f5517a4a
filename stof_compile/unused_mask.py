"""A mask of the options that no attention of a graph takes: said, or an error."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

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
