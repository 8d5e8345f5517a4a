"""The template of projections with rotary embeddings: what it takes and offers, its definition."""

from dataclasses import replace

import pytest
import stof_compile.templates as templates
import torch
from linear_recipes import Writer
from norm_recipes import HALF, SINGLE, machine
from rope_recipes import rope_recipe, sized
from stof_compile.templates.gemm_estimate import Product, Tile, shared_bytes
from stof_compile.templates.triton_linear import DIMENSIONS
from stof_compile.templates.triton_rope_linear import TritonRopeLinear
from template_checks import HOPPER, refusal_of

from stof_compile.fusion.recipe import run_recipe
from stof_compile.search.library import recipe_graph

TEMPLATE = TritonRopeLinear()


def on_cpu(**form):
    return rope_recipe(device="cpu", **form)


# -- the definition --------------------------------------------------------------------------------


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@pytest.mark.parametrize("batched", [False, True], ids=["one table", "a table each"])
def test_the_step_is_the_rotation_that_models_write(batched):
    period = 66 if batched else 33
    recipe, (x, w, b, cos, sin) = on_cpu(dtype=SINGLE, bias=True, period=period)
    out = run_recipe(recipe, (x, w, b, cos, sin))
    value = torch.nn.functional.linear(x, w, b).view(2, 33, 4, 32).transpose(1, 2)
    c, s = (table.view(-1, 1, 33, 32) for table in (cos, sin))
    turned = value * c + rotate_half(value) * s
    wanted = torch.cat((turned[:, :3], value[:, 3:]), 1).transpose(1, 2).reshape(2, 33, 128)
    torch.testing.assert_close(out, wanted)


def test_what_it_was_without_us_gives_the_values_apart():
    recipe, operands = on_cpu(dtype=SINGLE)
    parts = recipe_graph(recipe)(*operands)
    assert [tuple(part.shape) for part in parts] == [(66, 64), (66, 32), (66, 32)]
    assert parts[2].untyped_storage().nbytes() > parts[2].nbytes, "what stays is copied"
    torch.testing.assert_close(torch.cat(parts, -1).view(2, 33, 128), run_recipe(recipe, operands))


def test_the_key_covers_the_rotation():
    keys = {
        on_cpu(**form)[0].key
        for form in ({}, {"heads": (1, 2)}, {"heads": (3,)}, {"heads": (2,), "kept": 2},
                     {"dim": 64, "heads": (1,), "kept": 1}, {"period": 66})
    }  # fmt: skip
    assert len(keys) == 6


# -- what is accepted ------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kn", [False, True])
def test_operands_find_their_places(bias, kn):
    recipe, _ = on_cpu(bias=bias, kn=kn)
    call = TEMPLATE.build(recipe, TEMPLATE.first(recipe, HOPPER))
    x, weight, held, cos, sin, dim, rotated, config = call.args
    assert (x.operand, weight.operand) == (0, 1)
    assert (None if held is None else held.operand) == (2 if bias else None)
    assert (cos.operand, sin.operand) == ((3, 4) if bias else (2, 3))
    assert (dim, rotated, len(config)) == (32, 96, len(DIMENSIONS))
    assert call.shape == (2, 33, 128)


def test_refusals_name_the_reason():
    plain, _ = on_cpu()
    assert "CUDA" in refusal_of(TEMPLATE, plain, machine(90, runtime="rocm 7.0"))
    here = replace(plain, operands=tuple(replace(o, device="cpu") for o in plain.operands))
    assert "cpu" in refusal_of(TEMPLATE, here)
    assert "heads of 16" in refusal_of(TEMPLATE, on_cpu(dim=16)[0])
    linear, rope = plain.steps
    alone = replace(plain, operands=plain.operands[:2], steps=(linear,))
    assert "no product with" in refusal_of(TEMPLATE, alone)
    longer = replace(rope, attrs=(("head_dim", 32), ("heads", (9,))))
    assert "cannot be rotated" in refusal_of(TEMPLATE, replace(plain, steps=(linear, longer)))
    x, weight, cos, sin = plain.operands
    ragged = replace(cos, shape=(31, 32))
    assert "divisor of 66" in refusal_of(
        TEMPLATE, replace(plain, operands=(x, weight, ragged, sin))
    )
    other = replace(cos, shape=(66, 32))
    assert "different" in refusal_of(TEMPLATE, replace(plain, operands=(x, weight, cos, other)))
    mixed = replace(cos, dtype=SINGLE)
    assert "float32" in refusal_of(TEMPLATE, replace(plain, operands=(x, weight, mixed, sin)))


def behind_a_rotation(kind):
    w = Writer(HALF, "cpu")
    value = w.linear(w.operand(33, 72), 64, 72)
    value = w.step("rope", value, w.operand(33, 32), w.operand(33, 32), head_dim=32, heads=(2,))
    if kind == "activation":
        w.step("activation", value, name="gelu")
    elif kind == "add":
        w.step("add", value, w.operand(33, 64))
    elif kind == "norm":
        attrs = {"eps": 1e-5, "width": 64, "has_weight": False, "has_bias": False}
        w.step("rms_norm", value, **attrs)
    elif kind == "linear":
        w.linear(value, 48, 64)
    return w.done()[0]


@pytest.mark.parametrize("kind", ["", "activation", "add", "norm", "linear"])
@pytest.mark.parametrize("template", templates.TEMPLATES, ids=lambda t: t.name)
def test_every_other_template_refuses_a_rotation(template, kind):
    recipe = behind_a_rotation(kind)
    if isinstance(template, TritonRopeLinear) and not kind:
        assert template.accepts(recipe, HOPPER)
    else:
        assert not template.accepts(recipe, HOPPER)


# -- what is offered -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [80, 86, 89, 90, 100])
@pytest.mark.parametrize("rows", [1, 128, 4096])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["fp16", "fp32"])
def test_the_space_is_a_few_dozen_tiles_of_whole_heads(target, rows, dim, dtype):
    device, kv = machine(target), 512 // dim
    recipe = sized((rows,), (2048 // dim, kv), kv, dim, 2048, dtype)
    configs = TEMPLATE.space(recipe, device).configs()
    few = dim == 256 or (dtype == SINGLE and rows == 1)  # exact fp32: no wide, flat tiles
    assert (1 if few else 5) <= len(configs) <= 60
    assert TEMPLATE.first(recipe, device) in configs
    for config in configs:
        assert tuple(config) == DIMENSIONS
        assert config["block_n"] % dim == 0
        used = shared_bytes(Tile(**config), Product(rows, 3072, 2048, dtype), device)
        assert used <= device.shared_memory_bytes
        assert target >= 90 or not config["tma"]


@pytest.mark.parametrize("kn", [False, True])
def test_exact_fp32_on_hopper_copies_weights_by_columns_of_many_rows(kn):
    form = {"heads": (8, 2), "kept": 2, "dim": 64, "k": 1024, "kn": kn, "device": "cpu"}
    recipe, _ = rope_recipe((4096,), dtype=SINGLE, **form)
    copied = [config["depth_first"] for config in TEMPLATE.space(recipe, HOPPER).configs()]
    assert copied[0] == kn and max(copied) == kn
