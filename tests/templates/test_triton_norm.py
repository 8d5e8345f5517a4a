"""The norm template: what it accepts and offers, and the schema of its operator."""

from functools import partial

import pytest
import torch
from norm_recipes import HALF, INTERPRETED, SINGLE, Recording, machine, norm_recipe, random
from stof_compile.templates.triton_norm import TritonNorm
from template_checks import HOPPER, refusal_of

import stof_compile.ops_norm  # noqa: F401

TEMPLATE = TritonNorm()
refused = partial(refusal_of, TEMPLATE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("swapped", [False, True])
def test_adds_in_front_of_a_norm_are_accepted(bias, residual, norm, swapped):
    recipe, _ = norm_recipe(
        norm=norm, bias=bias, residual=residual, swapped=swapped, device="cpu", dtype=SINGLE
    )
    assert TEMPLATE.refusal(recipe, HOPPER) is None
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    assert (call.args[1] is not None, call.args[2] is not None) == (bias, residual)
    assert call.shape == recipe.result.shape


def test_casts_around_the_norm_are_accepted():
    """As autocast writes it: fp16 rows, an fp32 norm, fp16 again."""
    x, weight = random(4, 8, device="cpu"), random(8, dtype=SINGLE, device="cpu")
    rec = Recording(x, weight)
    rec.add("cast", ("o", 0), to=SINGLE)
    rec.add("layer_norm", ("v", 0), ("o", 1), eps=1e-5, width=8, has_weight=True, has_bias=False)
    rec.add("cast", ("v", 1), to=HALF)
    assert TEMPLATE.refusal(rec.recipe(), HOPPER) is None


def test_refusals_name_the_reason():
    plain, _ = norm_recipe(device="cpu", dtype=SINGLE)
    assert "CUDA" in refused(plain, machine(90, kind="cpu", runtime="cpu"))
    assert "CUDA" in refused(plain, machine(90, runtime="rocm 7.0"))
    assert "float64" in refused(norm_recipe(device="cpu", dtype=torch.float64)[0])
    assert "16384" in refused(norm_recipe((2,), 16400, SINGLE, device="cpu")[0])

    x = random(4, 6, 8, dtype=SINGLE, device="cpu")

    def norm(rec, last, width=8):
        rec.add("layer_norm", last, eps=1e-5, width=width, has_weight=False, has_bias=False)
        return rec.recipe()

    rec = Recording(x)
    rec.add("activation", ("o", 0), name="relu")
    assert "activation" in refused(norm(rec, ("v", 0)))
    rec = Recording(x)
    rec.add("add", ("o", 0), number=1.0, number_first=False)
    assert "number" in refused(norm(rec, ("v", 0)))
    rec = Recording(x, random(6, 1, dtype=SINGLE, device="cpu"))
    rec.add("add", ("o", 0), ("o", 1))
    assert "neither" in refused(norm(rec, ("v", 0)))
    rec = Recording(x, x[0])
    rec.add("add", ("o", 0), ("o", 1))
    assert "neither" in refused(norm(rec, ("v", 0)))
    rec = Recording(x)
    norm(rec, ("o", 0))
    rec.add("activation", ("v", 0), name="relu")
    assert "behind" in refused(rec.recipe())
    rec = Recording(x, x, x)
    rec.add("add", ("o", 0), ("o", 1))
    rec.add("add", ("v", 0), ("o", 2))
    assert "at most two" in refused(norm(rec, ("v", 1)))
    rec = Recording(x)
    rec.add("cast", ("o", 0), to=HALF)
    assert "rounds" in refused(norm(rec, ("v", 0)))
    assert "copied" in refused(norm(Recording(x.transpose(0, 1)), ("o", 0)))
    rec = Recording(x, x)
    rec.add("add", ("o", 0), ("o", 1))
    assert "no norm" in refused(rec.recipe())


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("rows", [1, 33, 128, 4096, 32768])
@pytest.mark.parametrize("n", [8, 72, 768, 1024, 8192, 16384])
def test_spaces_are_small_and_hold_the_first(target, rows, n):
    with torch.device("meta"):
        recipe, _ = norm_recipe((rows,), n, residual=True, device="meta")
    device = machine(target)
    configs = TEMPLATE.space(recipe, device).configs()
    assert 1 <= len(configs) <= 30
    assert TEMPLATE.first(recipe, device) in configs
    if rows <= 128:
        assert all(config["rows"] == 1 for config in configs)


def test_it_says_that_it_needs_a_gpu():
    if INTERPRETED:
        pytest.skip("the interpreter runs it on the CPU")
    with pytest.raises(ValueError, match="GPU"):
        torch.ops.stof.fused_norm(
            torch.randn(5, 72), None, None, None, None, "rms_norm", 1e-5, [1, 4]
        )


def test_schema_is_the_documented_one():
    assert str(torch.ops.stof.fused_norm.default._schema) == (
        "stof::fused_norm(Tensor x, Tensor? bias, Tensor? residual, Tensor? norm_weight, "
        "Tensor? norm_bias, str norm, float eps, SymInt[] config) -> Tensor"
    )
