"""Which graphs keep their operators: those are left to Inductor as a whole, with the reason."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from stof_compile.between import switches_gradients_on
from stof_compile.capture import CaptureFacts
from stof_compile.emit import has_autocast


def fusion_refusal(gm: GraphModule, facts: CaptureFacts) -> str:
    """Why the operators of a graph are left to Inductor as a whole; empty when they are not."""
    if facts.grad_enabled:
        return "gradients are recorded, and templates have none"
    if switches_gradients_on(gm.graph):
        return "gradients are recorded in a part of it, and templates have none"
    if facts.has_symbolic_shapes:
        return "sizes are symbolic, and templates need fixed ones"
    if facts.fake_inputs:
        return "the inputs are fake (distributed training)"
    if _spread_inputs(facts):  # timing an operator of theirs would talk to ranks that do not listen
        return "some inputs are spread over ranks (DTensor)"
    device = facts.device.type
    if torch.is_autocast_enabled(device) or has_autocast(gm.graph):
        return "autocast chooses dtypes inside the graph"
    return ""


def _spread_inputs(facts: CaptureFacts) -> bool:
    kinds = (type(facts.inputs[name].example) for name in facts.subclass_inputs)
    return any(kind.__module__.startswith("torch.distributed") for kind in kinds)
