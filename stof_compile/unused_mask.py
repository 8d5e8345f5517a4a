"""A mask of the options that no attention of a graph takes, or may take: said, or an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch._guards import CompileContext
from torch._logging._internal import warning_once

from stof_compile.attention.resolve import ResolvedMasks, path_matches
from stof_compile.attention.site import AttentionSite, NearMiss
from stof_compile.capture import CaptureFacts
from stof_compile.compiled_root import compiled_root
from stof_compile.dump import Record
from stof_compile.errors import StofMaskError
from stof_compile.explanation import innermost
from stof_compile.options import StofOptions

logger = logging.getLogger("stof_compile")

LOST = "the mask of the options is not put"  # how all notes of a lost mask begin
SPELLING = (
    "write it as F.scaled_dot_product_attention, without a graph break inside, call "
    "sparse_attention, or write the mask into the model"
)
FATE = "stof_mask_fate"
NOWHERE = (
    f"{LOST} into any attention: no graph of the compiled function has attention that STOF knows "
    f"and that it is meant for; {SPELLING}"
)


@dataclass
class MaskFate:
    """What became of the option's mask in the graphs of one compiled function so far.

    Args:
        taken: some attention took it. said: it was logged that some did not.
    """

    taken: bool = False
    said: bool = False

    def say(self, message: str) -> None:
        """Log a warning, the first of the function only."""
        if not self.said:
            logger.warning("%s", message)
        self.said = True


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
    facts: CaptureFacts,
    opts: StofOptions,
    record: Record,
) -> None:
    """Note it where attention that should have a mask of the options does not take it.

    That is attention that the graph does not show well enough, and a graph that is all there is of
    a function, or has cross-attention only, where one mask was given for all.

    Raises:
        StofMaskError: ``strict``.
    """
    if opts.mask is None:
        return
    fate = _fate()
    fate.taken |= bool(resolved.by_site)
    left = [place for place in places if place.name not in resolved.by_site]
    message = _hidden(left, opts.mask)
    if not message:
        if fate.taken or isinstance(opts.mask, Mapping):
            return
        message = _in_vain(left, facts)
        if not message:
            return
    if opts.strict:
        raise StofMaskError(message + " (strict=True)")
    record.notes.append(message)


def _hidden(left: Sequence[AttentionSite | NearMiss], mask: object) -> str:
    """What is said of attention that the graph does not show well enough to put a mask into it."""
    meant = [place for place in left if _is_meant(mask, place)]
    unlike = [p for p in meant if isinstance(p, NearMiss) and not p.maskable]
    if unlike:
        why = "; ".join(f"{place.name} ({place.reason})" for place in unlike[:4])
        return f"{LOST} into {why}: {SPELLING}"
    untold = [place for place in meant if place.cross and not place.cross_known]
    if not untold:
        return ""
    return (
        f"{LOST} into {_names(untold)}: queries and keys come into this graph with different "
        "lengths, so that it does not show whether they are one sequence; compute both in one "
        "graph, call sparse_attention, or name it by path (queries and keys then count from 0 each)"
    )


def _in_vain(left: Sequence[AttentionSite | NearMiss], facts: CaptureFacts) -> str:
    """What is said of a graph whose attention does not take the one mask for all."""
    if left:
        return (
            f"{LOST} into any attention of this graph: {_names(left)} reads keys of another "
            "sequence than its queries (cross-attention); name it by path, or call sparse_attention"
        )
    return NOWHERE if _is_whole(facts) else ""


def _is_whole(facts: CaptureFacts) -> bool:
    """Whether a graph is all of the compiled function; data-parallel training cuts them later."""
    return facts.place.whole_model and not facts.fake_inputs


def warn_of_lost_mask(record: Record) -> None:
    """Log what was noted of a graph, once for all graphs of one compiled function."""
    for note in record.notes:
        if note.startswith(LOST):
            _fate().say(note)


def check_at_second_call(
    record: Record, facts: CaptureFacts, opts: StofOptions
) -> Callable[[], None] | None:
    """A check for the first piece of a function, of which it cannot be told yet whether others take
    the mask; None for all other graphs.

    It runs once a call. At the second one the pieces of the first were compiled: attention that is
    in none of them ran without STOF. A warning only, under ``strict`` too: the first call may have
    failed between two pieces, and another branch may have attention.
    """
    if opts.mask is None or record.masked or _is_whole(facts) or not facts.place.at_start:
        return None
    return partial(_warn_of_mask_in_vain, _fate(), record)


def _warn_of_mask_in_vain(fate: MaskFate, record: Record) -> None:
    if not (fate.taken or fate.said):
        record.notes.append(NOWHERE)
        fate.say(NOWHERE)


def _fate() -> MaskFate:
    """The fate of the mask in the function that is being compiled, kept with what torch.compile
    made for it: it lives as long, and its graphs share nothing else."""
    holder = innermost(compiled_root().callback)
    fate = getattr(holder, FATE, None)
    if not isinstance(fate, MaskFate):
        fate = MaskFate()
        if holder is not None:
            setattr(holder, FATE, fate)
    return fate


def _is_meant(mask: object, place: AttentionSite | NearMiss) -> bool:
    """Whether the option means a place, were it self-attention."""
    return not isinstance(mask, Mapping) or any(path_matches(key, place.path) for key in mask)


def _names(places: Sequence[AttentionSite | NearMiss]) -> str:
    return ", ".join(place.name for place in places[:4])
