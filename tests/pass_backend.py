"""A backend that runs one pass over a normalised graph, and what has to hold of any pass."""

import torch

from stof_compile.capture import read_capture
from stof_compile.emit import autocast_at, fake_result
from stof_compile.normalize import normalize


class PassBackend:
    """Runs a pass; ``inductor`` compiles the result for real.

    Args:
        run_pass: of (graph, facts); returns how much it changed, 0 the second time.
    """

    def __init__(self, run_pass, inductor=False):
        self.run_pass, self.inductor, self.count, self.gm = run_pass, inductor, None, None

    def __call__(self, gm, inputs):
        facts = read_capture(gm, inputs)
        normalize(gm, facts)
        self.count = self.run_pass(gm, facts)
        assert self.run_pass(gm, facts) == 0, "a second run finds nothing"
        gm.graph.lint()
        gm.recompile()
        self.gm = gm
        for node in gm.graph.nodes:
            old = node.meta.get("example_value")
            if node.op in ("call_function", "call_method") and isinstance(old, torch.Tensor):
                with autocast_at(gm.graph, node):
                    new = fake_result(node)
                told = [(value.shape, value.stride(), value.dtype) for value in (new, old)]
                assert told[0] == told[1], node.name
        if self.inductor:
            from torch._inductor.compile_fx import compile_fx

            return compile_fx(gm, inputs)
        return gm.forward
