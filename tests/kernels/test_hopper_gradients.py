"""Gradients on Hopper GPUs: what their kernels compile to, what they read of a mask, when they are
chosen."""

import pytest
import torch
from hopper_gradients import BRAIN, HALF, hopper_gradients, launches, operands
from stof_compile.kernels.attention_hopper_backward import MAX_WIDTH
from stof_compile.kernels.bound_launch import Descriptor
from stof_compile.kernels.limits import shared_memory_limit

from stof_compile import masks
from stof_compile.masks.block_mask import build_block_mask

pytest.importorskip("triton.experimental.gluon")

HOPPER = (9, 0)


def of_heads(heads, q_len, k_len):
    """Of every head its own, with part tiles."""
    draw = torch.Generator().manual_seed(3)
    return masks.from_tensor(torch.rand(1, heads, q_len, k_len, generator=draw) < 0.5)


# -- code -----------------------------------------------------------------------------------------

FEATURES = {
    "part tiles": {"rule": masks.causal()},
    "full tiles": {"rule": masks.dense()},
    "groups": {"rule": masks.causal(), "group": 4, "grad_lse": True},
    "planes": {"rule": of_heads(8, 320, 256), "grad_lse": True},
}


def launched(monkeypatch, head_dim, dtype, rule, group=1, grad_lse=False):
    """The launches for a problem that fills a GPU of one multiprocessor."""
    found = []
    q, k, v, grad_out = operands(1, 8, 320, 256, head_dim, group, dtype)
    mask = build_block_mask(rule, 320, 256, 64, heads=8)
    with launches(monkeypatch, lambda *launch: found.append(launch)):
        of_lse = torch.zeros(1, 8, 320) if grad_lse else None
        hopper_gradients(q, k, v, grad_out, mask, of_lse)
    return found


def type_of(argument):
    """Triton's name of the type of an argument."""
    names = {HALF: "fp16", BRAIN: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    if isinstance(argument, Descriptor):
        shape = ", ".join(map(str, argument.block_shape))
        return f"tensordesc<{names[argument.base.dtype]}[{shape}],{argument.layout!r}>"
    return f"*{names[argument.dtype]}" if isinstance(argument, torch.Tensor) else "i32"


@pytest.mark.compile_only
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("head_dim", sorted({64, MAX_WIDTH}))
@pytest.mark.parametrize("number", [0, 1], ids=["query", "key"])
def test_compiles_without_spills(number, head_dim, features, dtype, monkeypatch):
    from compiling import assembler_report, compile_gluon, needs

    launch = launched(monkeypatch, head_dim, dtype, **FEATURES[features])[number]
    kernel, programs, arguments, constants, options = launch
    assert constants["HAS_PART"] == (features != "full tiles")
    assert constants["GROUP"] == (4 if features == "groups" else 1)
    assert constants["SINGLE_PLANE"] == (features != "planes")
    assert list(kernel.arg_names) == [*kernel.arg_names[: len(arguments)], *constants]
    assert options["num_warps"] == 4
    types = dict(zip(kernel.arg_names, map(type_of, arguments), strict=False))
    compiled = compile_gluon(kernel, 90, types, constants, options["maxnreg"])
    found = needs(compiled, 90)
    assert found.spill_bytes == 0
    assert found.registers * 256 * programs <= 65536
    # a multiprocessor has 228 KB; each program takes 1 KB more than it asks for
    assert (found.shared_bytes + 1024) * programs <= 228 * 1024
    assert found.shared_bytes <= shared_memory_limit(HOPPER)
    assert "C75" not in assembler_report(compiled, 90), "products wait for each other"
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text
    assert "setmaxnreg" in text
