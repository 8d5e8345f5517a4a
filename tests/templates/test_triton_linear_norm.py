"""The product-and-norm template: what it accepts and offers, and the schema of its operator."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from linear_norm_recipes import TEMPLATE, config, linear_norm_recipe
from norm_recipes import HALF, INTERPRETED, MACHINES, SINGLE, Recording, machine, random
from stof_compile.templates.linear_norm_configs import (
    DIMS,
    FORMS,
    ProductSize,
    offered_configs,
    row_tiles,
)
from template_checks import HOPPER, refusal_of

refused = partial(refusal_of, TEMPLATE)


@pytest.mark.parametrize("bias", ["", "inside", "added"])
@pytest.mark.parametrize("residual", ["", "first", "second"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("kn", [False, True])
def test_a_linear_with_adds_and_a_norm_is_accepted(bias, residual, norm, kn):
    recipe, _ = linear_norm_recipe(
        norm=norm, bias=bias, residual=residual, kn=kn, device="cpu", dtype=SINGLE
    )
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    assert (call.args[2] is not None, call.args[3] is not None) == (bool(bias), bool(residual))
    assert len(call.args[-1]) == len(DIMS) + 1


def test_refusals_name_the_reason():
    x, w = (random(*s, dtype=SINGLE, device="cpu") for s in ((3, 5, 8), (16, 8)))
    full, vector = (random(*s, dtype=SINGLE, device="cpu") for s in ((3, 5, 16), (16,)))

    def built(*steps, operands=(x, w, full, vector), width=16):
        rec = Recording(*operands)
        rec.add("linear", ("o", 0), ("o", 1))
        for kind, *inputs in steps:
            rec.add(kind, *inputs)
        last = ("v", len(rec.steps) - 1)
        rec.add("layer_norm", last, eps=1e-5, width=width, has_weight=False, has_bias=False)
        return rec.recipe()

    plain = built()
    assert TEMPLATE.refusal(plain, HOPPER) is None
    assert "CUDA" in refused(plain, machine(90, kind="cpu", runtime="cpu"))
    assert "capability" in refused(plain, replace(HOPPER, capability=(7, 5), arch="sm_75"))
    assert "'neg'" in refused(built(("neg", ("v", 0))))
    two = (("add", ("v", 0), ("o", 2)), ("add", ("v", 1), ("o", 2)))
    assert "one is taken" in refused(built(*two))
    two = (("add", ("v", 0), ("o", 3)), ("add", ("v", 1), ("o", 3)))
    assert "one is taken" in refused(built(*two))
    wider = random(2, 3, 5, 16, dtype=SINGLE, device="cpu")
    assert "straight" in refused(built(("add", ("v", 0), ("o", 2)), operands=(x, w, wider, x)))
    assert "copied" in refused(
        built(operands=(x, random(16, 16, dtype=SINGLE, device="cpu")[:, ::2]))
    )
    rec = Recording(x, w)
    rec.add("linear", ("o", 0), ("o", 1))
    assert "no norm" in refused(rec.recipe())
    rec = Recording(full)
    rec.add("layer_norm", ("o", 0), eps=1e-5, width=16, has_weight=False, has_bias=False)
    assert "not with a linear" in refused(rec.recipe())
    half = built(operands=(x.to(HALF), w.to(HALF)))
    assert TEMPLATE.refusal(half, HOPPER) is None
    mixed = built(("add", ("v", 0), ("o", 2)), operands=(x.to(HALF), w.to(HALF), full))
    assert "not one dtype" in refused(mixed)


SIZES = [
    (1, 768, 768), (33, 1000, 72), (128, 768, 768), (128, 768, 3072), (1000, 768, 768),
    (4096, 768, 3072), (32768, 768, 768), (512, 1024, 4096), (128, 2048, 8192), (32768, 256, 256),
    (128, 16384, 16), (7, 8, 8),
]  # fmt: skip


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_spaces_are_small_and_hold_the_first(target, size, itemsize):
    rows, n, k = size
    recipe, _ = linear_norm_recipe(
        (rows,), n, k, HALF if itemsize == 2 else SINGLE, bias="inside", residual="first",
        device="meta",
    )  # fmt: skip
    device = machine(target)
    configs = TEMPLATE.space(recipe, device).configs()
    assert 1 <= len(configs) <= 50
    assert TEMPLATE.first(recipe, device) in configs
    for found in configs:
        if found["form"] == "split_k":
            assert found["split_k"] <= -(-k // found["block_k"]), "a split would be empty"


def test_the_first_config_fills_the_device():
    for size in ((128, 768, 768), (128, 768, 3072)):
        first = offered_configs(ProductSize(*size, 2), HOPPER)[0]
        tiles = -(-128 // first["block_m"]) * (768 // first["block_n"])
        assert 132 <= tiles * first["split_k"] <= 264
        assert size[2] % (first["split_k"] * first["block_k"]) == 0


def test_it_says_that_it_needs_a_gpu():
    if INTERPRETED:
        pytest.skip("the interpreter runs it on the CPU")
    with pytest.raises(ValueError, match="GPU"):
        torch.ops.stof.fused_linear_norm(
            torch.randn(5, 72), torch.randn(40, 72), None, None, None, None, "rms_norm", 1e-5,
            [0, *list(config().values())[1:]],
        )  # fmt: skip


def test_schema_and_config_are_the_documented_ones():
    from stof_compile.kernels import linear_norm

    assert str(torch.ops.stof.fused_linear_norm.default._schema) == (
        "stof::fused_linear_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
        "Tensor? norm_weight, Tensor? norm_bias, str norm, float eps, SymInt[] config) -> Tensor"
    )
    assert linear_norm.LinearNormConfig._fields == (*DIMS, "tf32")
    assert (FORMS[linear_norm.SPLIT_K], FORMS[linear_norm.FULL_ROW]) == ("split_k", "full_row")
    for n in range(16, 1025):
        assert linear_norm.row_tiles(n) == row_tiles(n)
