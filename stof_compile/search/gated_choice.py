"""Gate and up projections on a GPU: both products and what joins them in one kernel, or the
packed product and a kernel behind it.

    act(x Wg) * (x Wu)                           one segment, where a template takes it
    y = x cat(Wg, Wu);  act(y[:n]) * y[n:]       packed: the joining kernel reads slices

A template that takes the first form needs two products, so packing decides about it as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule

from stof_compile.fusion.chain import OpChain
from stof_compile.fusion.read_recipe import read_recipe
from stof_compile.fusion.recipe import Recipe, Ref, Step, TensorSpec
from stof_compile.packing import Pack


def gated_recipes(
    gm: GraphModule, chains: Sequence[OpChain], packs: Sequence[Pack]
) -> dict[str, Recipe]:
    """Key of a pack -> the segment from its products to where they are joined.

    Args:
        chains: of the graph. packs: those of other roles are left out, as are those that are
            joined otherwise than by a product of both sides.
    """
    nodes = {node.name: node for node in gm.graph.nodes}
    found: dict[str, Recipe] = {}
    for pack in packs:
        if pack.role != "gate_up" or pack.key in found:
            continue
        for chain in chains:
            place = {op.name: i for i, op in enumerate(chain.ops)}
            if not all(name in place for name in (*pack.nodes, *pack.results)):
                continue
            start = min(place[name] for name in pack.nodes)
            for stop in range(max(place[name] for name in pack.results) + 2, len(chain) + 1):
                recipe = read_recipe(gm, chain, start, stop, nodes)
                if not isinstance(recipe, Recipe):
                    break
                last = recipe.result
                if last.kind == "mul" and last.attr("number") is None:
                    if joining(recipe) is not None:
                        found[pack.key] = recipe
                    break
    return found


def joining(recipe: Recipe) -> Recipe | None:
    """What is left of a gated recipe behind the packed product, whose slices it reads.

    None where it reads something else as well, or is not made of two products.
    """
    products = [i for i, step in enumerate(recipe.steps) if step.kind == "linear"]
    if len(products) != 2 or any(r.kind != "operand" for i in products for r in _inputs(recipe, i)):
        return None
    total = sum(recipe.steps[i].shape[-1] for i in products)
    operands: list[TensorSpec] = []
    refs: dict[int, Ref] = {}
    for i in products:
        step = recipe.steps[i]
        strides = [total * math.prod(step.shape[d + 1 : -1]) for d in range(len(step.shape) - 1)]
        device = recipe.operands[0].device
        refs[i] = Ref("operand", len(operands))
        operands.append(TensorSpec(step.shape, (*strides, 1), step.dtype, device))
    steps: list[Step] = []
    for i, step in enumerate(recipe.steps):
        if i in products:
            continue
        if any(ref.kind == "operand" for ref in step.inputs):
            return None
        steps.append(replace(step, inputs=tuple(refs[ref.index] for ref in step.inputs)))
        refs[i] = Ref("step", len(steps) - 1)
    return Recipe(tuple(operands), tuple(steps)) if steps else None


def _inputs(recipe: Recipe, index: int) -> tuple[Ref, ...]:
    return recipe.steps[index].inputs
