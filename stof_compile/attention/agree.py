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


def agree(
    key: str,
    decide: Callable[[], AttentionPlan],
    otherwise: Callable[[], AttentionPlan],
    patience_s: float,
) -> AttentionPlan:
    """Return one choice on all ranks of the default process group.

    The first rank that asks for a key decides it (in data parallel training the ranks ask at the
    same time; in
    pipeline parallel training rank 0 may never see the problem at all). The others read the answer
    from the group's
    key-value store, so no collective is involved and none can time out.

    Args:
        key: name of the decision, equal on all ranks.
        decide: makes the choice; called on one rank.
        otherwise: the choice when no answer came in time; must depend on the problem alone.
        patience_s: seconds a rank waits for the answer, at most half of the group's own timeout.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return decide()
    store = dist.distributed_c10d._get_default_store()
    name = "stof/" + hashlib.sha256(key.encode()).hexdigest()[:32]
    if store.add(f"{name}/claim", 1) == 1:
        answer = ""
        try:
            choice = decide()
            answer = json.dumps(choice.to_dict())
        finally:
            store.set(f"{name}/choice", answer)  # empty: it failed here, nobody has to wait
        return choice
    limit = min(patience_s, store.timeout.total_seconds() / 2)  # type: ignore[attr-defined]
    try:
        store.wait([f"{name}/choice"], timedelta(seconds=limit))
    except RuntimeError:  # DistStoreError: the deciding rank was not ready in time
        logger.warning(
            "no choice for %s after %.0f s; the decision table is used on this rank", key, limit
        )
        return otherwise()
    text = store.get(f"{name}/choice")
    return AttentionPlan.from_dict(json.loads(text)) if text else otherwise()
