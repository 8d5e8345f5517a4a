"""Cases of ``sanitize.py``: linear layers, norms and steps by element."""

from functools import partial

import torch
from sanitize_case import Case, check_template, forms, on_gpu


def _template(template, make, form, config):
    recipe, operands = make(**{"dtype": torch.float16, "device": "cpu", **form})
    check_template(template, recipe, operands, config)


def _linear(form, config):
    from linear_recipes import SMALL, linear_recipe
    from stof_compile.templates.triton_linear import TritonLinear

    _template(TritonLinear(), linear_recipe, form, SMALL | config)


def _rope_linear(form, config):
    from linear_recipes import SMALL
    from rope_recipes import rope_recipe
    from stof_compile.templates.triton_rope_linear import TritonRopeLinear

    _template(TritonRopeLinear(), rope_recipe, form, SMALL | {"block_n": 32} | config)


def _gated_linear(form, config):
    from test_triton_gated_linear import SMALL, TEMPLATE, gated_recipe

    _template(TEMPLATE, gated_recipe, form, SMALL | config)


def _linear_chain(form, config):
    from test_triton_linear_chain import SMALL, TEMPLATE, chain_recipe

    _template(TEMPLATE, chain_recipe, form, SMALL | config)


def _linear_norm(form, config):
    from linear_norm_recipes import TEMPLATE, linear_norm_recipe
    from linear_norm_recipes import config as small

    form = {"bias": "inside", "residual": "first", **form}
    _template(TEMPLATE, linear_norm_recipe, form, small(**config))


def _norm(form, config):
    from norm_recipes import norm_recipe
    from stof_compile.templates.triton_norm import TritonNorm

    form = {"bias": True, "residual": True, **form}
    _template(TritonNorm(), norm_recipe, form, config)


def _pointwise(rows, n, dtype, config):
    from pointwise_recipes import TEMPLATE, gelu_residual

    rec = gelu_residual(rows, n, dtype, device="cpu")
    check_template(TEMPLATE, rec.recipe(), rec.operands, config)


def _pointwise_broadcast(config):
    """A row, a column and a number, of an operand with a gap behind its rows."""
    from norm_recipes import Recording, random, rows_apart
    from pointwise_recipes import TEMPLATE

    draw = partial(random, device="cpu")
    given = [rows_apart(draw(33, 72)), draw(72), draw(33, 1), draw(1)]
    rec = Recording(*given)
    value = ("o", 0)
    for number in (1, 2, 3):
        value = ("v", rec.add("mul", value, ("o", number)))
    check_template(TEMPLATE, rec.recipe(), given, config)


def _hopper_linear(config, **form):
    from recipes import linear_recipe, random_operands
    from stof_compile.templates.hopper_linear import DIMS, HopperLinear

    recipe = linear_recipe(**form)
    operands = random_operands(recipe, device="cpu")
    check_template(HopperLinear(), recipe, operands, dict(zip(DIMS, config, strict=True)))


def _marks(hopper, config):
    """Marking twins of the products: an infinity in the last element, and none."""
    from close import assert_close

    import stof_compile.ops_hopper_linear
    import stof_compile.ops_linear  # noqa: F401

    def run(x, weight, residual, marks):
        if hopper:
            given, marking = (x, weight, residual, "", config), torch.ops.stof.hopper_linear_marked
        else:
            given = x, weight, None, residual, None, "", config
            marking = torch.ops.stof.fused_linear_marked
        return marking(*given, marks, 16), marks

    draw = torch.Generator().manual_seed(0)
    x, weight, residual = (
        torch.randn(size, generator=draw).half() for size in ((257, 72), (136, 72), (257, 136))
    )
    for number, seen in ((1.0, 0), (torch.inf, 1)):
        residual[-1, -1] = number
        out, marks = on_gpu(run)(x, weight, residual, torch.zeros(32, dtype=torch.int32))
        assert_close(out, x.double() @ weight.double().t() + residual.double(), scale=2.0)
        assert marks.tolist() == [seen * (place == 16) for place in range(32)]


def _tile(name, rows=None):
    """A case of the GPU tests; ``rows`` in place of its own."""
    from norm_recipes import machine
    from test_tilelang_gpu import CASES

    template, make, arguments, dtype, values = CASES[name]
    arguments = arguments if rows is None else (rows, *arguments[1:])
    recipe, operands = make(*arguments, dtype=dtype, device="cpu")
    first = template.first(recipe, machine(90))
    config = first if values is None else dict(zip(first, values, strict=True))
    check_template(template, recipe, operands, config)


def _cases():
    large = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    walked = {"persistent": 1, "block_m": 128, "block_n": 128, "block_k": 32, "num_warps": 4}
    tma, tma_split = {"persistent": 1, "tma": 1}, {"tma": 1, "split_k": 4}
    ragged, even = {"rows": (257,), "n": 136, "k": 72}, {"rows": (64,), "n": 64, "k": 64}
    # more tiles than a large GPU has multiprocessors: persistent programs take several
    several = {"rows": (1000,), "n": 776, "k": 72}
    everything = {"factor": True, "residual": True, "bias": "add"}
    single, rms = {"dtype": torch.float32}, {"norm": "rms_norm"}
    yield from forms("linear", "linear", _linear, {
        "plain": ({"bias": "", "activation": ""}, {}),
        "tall": (ragged | everything, large),
        "even": (even | everything, large),
        "strided": ({"strided": True, "residual": True, "activation": "silu"}, {"block_k": 32}),
        "kn": (ragged | {"kn": True}, large),
        "fp32": (everything | single, {}),
        "split": ({"k": 200, "residual": True}, {"split_k": 7}),
        "split-kn": (ragged | {"k": 264, "kn": True}, large | {"split_k": 3}),
        "persistent": (ragged | everything, walked),
        "persistent-several": (ragged | everything, {"persistent": 1}),
        "row": ({"rows": ()}, {}),
    })  # fmt: skip
    yield from forms("linear", "linear", _linear, {
        "tma": (several | everything, large | tma),
        "tma-kn": (several | {"kn": True}, large | tma),
        "tma-split": (ragged | {"k": 264, "residual": True}, large | tma_split),
    }, "gpu")  # fmt: skip
    small = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 2, "num_stages": 2}
    marking = small | {"group_m": 2, "split_k": 1, "persistent": 0, "tma": 0}
    yield from forms("linear", "linear", _marks, {
        "marks": (False, list(marking.values())),
        "marks-split": (False, list((marking | {"split_k": 3}).values())),
    })  # fmt: skip
    wide = large | {"block_n": 128}
    heads = {"rows": (2, 67), "heads": (5, 2), "kept": 2, "dim": 64, "k": 136}
    yield from forms("rope-linear", "rope_linear", _rope_linear, {
        "groups": ({}, {}),
        "bias": (heads | {"bias": True}, wide),
        "kn": (heads | {"kn": True, "bias": True}, wide),
        "table-for-each": ({"period": 66, "heads": (1, 1)}, {}),
        "split": ({"k": 200, "bias": True}, {"split_k": 7, "block_n": 64}),
        "persistent": ({"rows": (257,), "heads": (3, 1)}, walked),
        "persistent-several": ({"rows": (257,), "heads": (6, 2), "kept": 2}, {"persistent": 1}),
        "row": ({"rows": (1, 1)}, {}),
    })  # fmt: skip
    yield from forms("rope-linear", "rope_linear", _rope_linear, {
        "tma": (heads | {"rows": (2, 401), "heads": (16, 4), "kept": 4}, wide | tma),
        "tma-split": (heads | {"k": 264}, wide | tma_split),
    }, "gpu")  # fmt: skip
    yield from forms("gated-linear", "gated_linear", _gated_linear, {
        "plain": ({}, {}),
        "bias": (ragged | {"bias": "input"}, large),
        "kn": (ragged | {"kn": True, "bias": "add"}, large),
        "strided": ({"strided": True, "activation": "gelu"}, {}),
        "persistent": (ragged | {"bias": "input"}, walked | {"block_n": 64}),
        "persistent-several": (ragged | {"bias": "input"}, {"persistent": 1}),
    })  # fmt: skip
    yield from forms("gated-linear", "gated_linear", _gated_linear, {
        "tma": (several | {"bias": "input"}, large | tma),
    }, "gpu")  # fmt: skip
    chain = {"block_m": 64, "block_h": 64, "block_n": 64, "block_k": 64, "num_warps": 4}
    hidden = {"rows": (100,), "n": 136, "h": 264, "k": 72}
    yield from forms("linear-chain", "linear_chain", _linear_chain, {
        "plain": ({"bias": "", "activation": ""}, {}),
        "tall": (hidden | {"residual": True}, chain),
        "kn": (hidden | {"kn": True, "bias": "add"}, chain),
        "strided": ({"strided": True, "residual": True}, {"block_m": 32}),
        "split": (hidden | {"residual": True}, chain | {"split_k": 4}),
        "row": ({"rows": ()}, {"split_k": 2}),
    })  # fmt: skip
    whole = {"form": "full_row", "block_m": 16}
    yield from forms("linear-norm", "linear_norm", _linear_norm, {
        "plane": ({}, {}),
        "planes": (ragged, {"block_m": 64, "split_k": 3, "norm_rows": 4}),
        "planes-kn": (ragged | rms | {"kn": True}, {"split_k": 2}),
        "planes-fp32": (single, {"split_k": 7, "block_k": 64}),
        "rows": ({"n": 257, "k": 100}, whole),
        "rows-kn": (ragged | rms | {"kn": True, "strided": True}, whole | {"block_m": 32}),
        "rows-fp32": (single, whole),
    })  # fmt: skip
    yield from forms("norm", "norm", _norm, {
        "layer": ({"n": 257}, {"rows": 2, "num_warps": 4}),
        "rms": ({"n": 1000, "strided": True} | rms, {"rows": 1, "num_warps": 8}),
        "fp32": ({"rows": (257,), "n": 64} | single, {"rows": 8, "num_warps": 4}),
        "plain": ({"affine": False, "bias": False, "residual": False}, {"rows": 8, "num_warps": 1}),
    })  # fmt: skip
    small = {"block": 256, "num_warps": 2}
    yield from forms("pointwise", "pointwise", _pointwise, {
        "half": ((33,), 72, torch.float16, small),
        "fp32": ((2, 3, 5), 71, torch.float32, small),
        "one-block": ((), 72, torch.float16, small),
    })  # fmt: skip
    yield Case("pointwise-broadcast", "pointwise", partial(_pointwise_broadcast, small))
    residual = {"m": 257, "n": 264, "k": 200, "residual": True}
    for name, config, form in (
        ("gelu", (128, 128, 5, 8), residual | {"activation": "gelu"}),
        ("silu-kn", (128, 128, 4, 8), residual | {"activation": "silu", "kn": True}),
        ("wide", (64, 256, 4, 2), residual | {"m": 1000, "n": 776, "bias": False}),
        ("flat", (64, 128, 3, 8), {"m": 33, "n": 72, "k": 72, "activation": "relu"}),
        ("many", (64, 128, 3, 8), {"m": 1300, "n": 1032, "k": 64, "dtype": torch.bfloat16}),
    ):
        run = partial(_hopper_linear, config, **form)
        yield Case(f"hopper-linear-{name}", "hopper_linear", run, "hopper")
    yield Case("hopper-linear-marks", "hopper_linear", partial(_marks, True, [128, 128, 5, 8]),
               "hopper")  # fmt: skip
    yield from forms("tile-linear", "tilelang_linear", _tile, {
        "groups": ("ragged", (257,)), "group": ("one warp group, long steps",),
        "warps": ("warps",), "step": ("one step",), "wide": ("wide tile", (2, 100)),
    }, "tilelang")  # fmt: skip
    yield from forms("tile-linear-norm", "tilelang_linear_norm", _tile, {
        "layer": ("norm, one warp group", (257,)), "rms": ("rms norm",),
        "rms-groups": ("rms norm, warp groups", (257,)),
    }, "tilelang")  # fmt: skip
    yield from forms("tile-chain", "tilelang_chain", _tile, {
        "residual": ("chain", (257,)), "kn": ("chain [K, N]",), "wide": ("chain, wide hidden",),
    }, "tilelang")  # fmt: skip


CASES = tuple(_cases())
