"""Sizes that decide what an attention is and are symbols: the graph is guarded for what they are.

Dynamo gives queries, keys and values that are inputs a symbol each once their length changes.
Whether the symbols stand for one length then shows in their present values only.
"""

from __future__ import annotations

from collections.abc import Sequence

from stof_compile.attention.site import AttentionSite, NearMiss
from stof_compile.node_ops import guarded_equal


def settle_sizes(places: Sequence[AttentionSite | NearMiss]) -> bool:
    """Decide by present values, each time with a guard: another case is another graph.

    To be called where a mask of the options depends on it: guards cost compilations.
    Returns:
        Whether sizes became known to be equal, so that the attention is to be matched anew.
    """
    return any([guarded_equal(a, b) for place in places for a, b in place.undecided])
