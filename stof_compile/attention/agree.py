"""Agreement between ranks: one decides, the others read its choice, nobody waits past a limit."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from stof_compile.plan import AttentionPlan

logger = logging.getLogger("stof_compile")


def several_ranks() -> bool:
    """Whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(
    key: str,
    decide: Callable[[], AttentionPlan],
    otherwise: Callable[[], AttentionPlan],
    patience_s: float,
) -> AttentionPlan:
    """Return one choice on all ranks of the default process group.

    Args:
        key: name of the decision, equal on all ranks.
        decide: makes the choice; called on one rank.
        otherwise: the choice when no answer came in time; must depend on the problem alone.
        patience_s: seconds a rank waits for the answer, at most half of the group's own timeout.
    """
    if not several_ranks():
        return decide()
    made: list[AttentionPlan] = []

    def told() -> str:
        made.append(decide())
        return json.dumps(made[0].to_dict())

    text = agree_text(key, told, patience_s)
    if made:
        return made[0]
    if not text:
        logger.warning("the decision table is used on this rank")
        return otherwise()
    return AttentionPlan.from_dict(json.loads(text))


def agree_text(key: str, decide: Callable[[], str], patience_s: float) -> str:
    """Return one text on all ranks of the default process group, of which there are several.

    The first rank that asks for a key decides (in data parallel training the ranks ask at the same
    time; in pipeline parallel training rank 0 may never see the problem at all). The others read
    the answer from the group's key-value store, so no collective is involved and none can time out.

    Args:
        key: name of the decision, equal on all ranks.
        decide: makes the text, which is not empty; called on one rank, and what it raises goes to
            the caller there. It must not wait for what another rank does after it asked.
        patience_s: seconds a rank waits for the answer, at most half of the group's own timeout.
    Returns:
        The text; empty where the deciding rank failed, or was not ready in time.
    """
    store = dist.distributed_c10d._get_default_store()
    name = "stof/" + hashlib.sha256(key.encode()).hexdigest()[:32]
    if store.add(f"{name}/claim", 1) == 1:
        answer = ""
        try:
            answer = decide()
        finally:
            store.set(f"{name}/choice", answer)  # empty: it failed here, nobody has to wait
        return answer
    limit = min(patience_s, store.timeout.total_seconds() / 2)  # type: ignore[attr-defined]
    try:
        store.wait([f"{name}/choice"], timedelta(seconds=limit))
    except RuntimeError:  # DistStoreError: the deciding rank was not ready in time
        logger.warning("no choice for %s after %.0f s", key, limit)
        return ""
    text: str = store.get(f"{name}/choice").decode()
    return text
