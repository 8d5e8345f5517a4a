"""When a pass of STOF fails: the graph goes to PyTorch as captured, or it is an error."""

from __future__ import annotations

import logging

from stof_compile.dump import Record
from stof_compile.errors import StofMaskError
from stof_compile.options import StofOptions

logger = logging.getLogger("stof_compile")


def fall_back(failure: Exception, opts: StofOptions, record: Record) -> None:
    """Say that the whole graph is left to PyTorch, and keep the reason.

    Raises:
        StofMaskError: the options have a mask, which would be lost.
        Exception: ``strict``; the failure itself.
    """
    reason = f"a pass of STOF failed: {type(failure).__name__}: {failure}"
    if opts.mask is not None:
        raise StofMaskError(
            f"the mask of the options cannot be put into this graph, {reason}; run without the "
            "option's mask, and report this error"
        ) from failure
    if opts.strict:
        raise failure
    logger.warning("this graph is left to torch.compile, %s", reason, exc_info=failure)
    record.sites.clear()
    record.fallbacks.clear()
    record.add_fallback("graph", reason)
