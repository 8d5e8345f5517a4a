"""What a call of a sparse kernel keeps for its gradients, and when candidates are measured anew."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import stof_compile.ops  # noqa: F401  # registers the operators
from stof_compile import masks, ops_block
from stof_compile.attention.call import bind_kernel, mask_arrays
from stof_compile.attention.problem import AttentionProblem, TensorMeta
from stof_compile.masks import build_block_mask


def problem(**kwargs):
    meta = TensorMeta((1, 2, 64, 16), (2048, 16, 32, 1), torch.float32)
    facts = {"spec": masks.sliding_window(9)} | kwargs
    return AttentionProblem(
        meta, meta, meta, q_offset=0, device=torch.device("cpu"), scale=0.25, **facts
    )


def bound(kernel, config=None, **kwargs):
    """Names of the buffers of a call, and the arguments it gives its operator."""
    pytest.importorskip("triton")
    from stof_compile.kernels.attention_blockwise import BlockConfig
    from stof_compile.kernels.attention_rowwise import RowConfig

    config = config or tuple(BlockConfig(16, 16) if kernel == "block" else RowConfig(16, 16))
    call = bind_kernel(problem(**kwargs), kernel, config)
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    q, k, v, *held = (
        torch.fx.Proxy(graph.placeholder(name), tracer) for name in ("q", "k", "v", *call.buffers)
    )
    call.run(q, k, v, None, None, dict(zip(call.buffers, held, strict=True)))
    (node,) = (n for n in graph.nodes if "attention" in str(n.target))
    names = [name.split(f"{config[0]}x{config[1]}_")[1] for name in call.buffers]
    return names, node.args


@pytest.mark.parametrize("kernel", ["block", "row"])
def test_training_keeps_the_log_sum_exp_and_the_lists_by_column(kernel):
    names, arguments = bound(kernel, training=True)
    assert names[7:] == ["key_ptr", "key_tiles"]
    assert arguments[17] is True
    assert [str(a).split("16x16_")[1] for a in arguments[18:]] == names[7:]


@pytest.mark.parametrize(("rule", "more"), [("sliding", []), ("random", ["bitmap"])])
def test_training_with_fragments_keeps_the_bitmap_where_no_rule_says_it(rule, more, monkeypatch):
    pytest.importorskip("triton")
    from stof_compile.kernels.attention_blockwise import BlockConfig

    from stof_compile.attention import call as module

    monkeypatch.setattr(module, "_refuse_hopper", lambda *_: None)
    keep = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(1)) < 0.3
    spec = masks.sliding_window(9) if rule == "sliding" else masks.from_tensor(keep)
    asked = replace(problem(training=True), spec=spec)
    call = bind_kernel(asked, "block", tuple(BlockConfig(hopper=3)))
    names = [name.split("64x64_")[1] for name in call.buffers]
    assert names[7:] == ["key_ptr", "key_tiles", *more]
    assert all(name.startswith("fragments_") for name in names[:7])


@pytest.mark.parametrize("hopper", [0, 3])
@pytest.mark.parametrize("rule", ["sliding", "random"])
def test_training_on_hopper_keeps_the_fragments_in_place_of_a_bitmap(rule, hopper, monkeypatch):
    pytest.importorskip("triton")
    from stof_compile.kernels.attention_blockwise import BlockConfig

    from stof_compile.attention import call as module

    monkeypatch.setattr(module, "_refuse_hopper", lambda *_: None)
    asked_for = []

    def fragments(mask, *facts):
        asked_for.append(facts)
        return mask.gradient_fragments

    monkeypatch.setattr(module, "gradient_fragments", fragments)
    keep = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(1)) < 0.3
    spec = masks.sliding_window(9) if rule == "sliding" else masks.from_tensor(keep)
    names, arguments = bound("block", tuple(BlockConfig(hopper=hopper)), spec=spec, training=True)
    assert names[7:] == ["key_ptr", "key_tiles", "gradient_fragments"]
    assert [str(a).split("64x64_")[-1] for a in arguments[18:]] == [
        "key_ptr", "key_tiles", "None", "gradient_fragments",
    ]  # fmt: skip
    ((*shapes, dtype, device, plain),) = asked_for
    assert shapes == [(1, 2, 64, 16)] * 2 and dtype == torch.float32
    assert device.type == "cpu" and plain


@pytest.mark.parametrize("facts", [{}, {"training": True, "bias_grad": True}], ids=str)
def test_what_the_kernels_do_not_serve_keeps_neither(facts):
    names, arguments = bound("block", **facts)
    assert len(names) == 7
    assert arguments[17] is False and len(arguments) == 18


def test_a_choice_for_training_is_not_one_for_inference_nor_for_a_learned_bias():
    keys = {
        problem(**facts).key
        for facts in ({}, {"training": True}, {"training": True, "bias_grad": True})
    }
    assert len(keys) == 3


def test_lists_by_column_are_made_once():
    stored = build_block_mask(masks.causal(), 50, 70, 16)
    key_ptr, key_tiles = stored.key_lists
    assert stored.key_lists[0] is key_ptr
    assert key_ptr.shape == (3, 5 + 1) and key_tiles.shape == (2, stored.col_idx.numel())
    assert key_ptr.dtype == key_tiles.dtype == torch.int32


@pytest.mark.parametrize("rows", [64, 192])
@pytest.mark.parametrize("rule", ["longformer", "random"])
def test_gradient_is_the_same_from_fragments(rule, rows, monkeypatch):
    """From the rule, from the bitmap that comes with them, and from the fragments themselves."""
    pytest.importorskip("triton")
    from stof_compile.kernels.attention_blockwise import BlockConfig

    generator = torch.Generator().manual_seed(5)
    length = 130 if rows == 64 else 430
    keep = torch.rand(1, 1, length, length, generator=generator) < 0.4
    spec = masks.longformer(20, 9) if rule == "longformer" else masks.from_tensor(keep)
    mask = build_block_mask(spec, length, length, (rows, 64))
    q, k, v, grad = torch.randn(4, 1, 2, length, 40, dtype=torch.float64, generator=generator)
    restored = []
    restore = ops_block.from_fragments
    monkeypatch.setattr(
        ops_block, "from_fragments", lambda *words: restored.append(1) or restore(*words)
    )

    def gradients(config, bitmap=None, band=(), fragments=None):
        ctx = SimpleNamespace(needs_input_grad=(True,) * 22)
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        ctx.set_materialize_grads = lambda on: None
        arrays = mask_arrays(mask, config).values()
        numbers = 0.3, 0.0, 0, list(band), list(config), False
        inputs = (q, k, v, *arrays, None, None, *numbers, None, None, bitmap, fragments)
        ops_block._save_with_results(ctx, inputs, (None, None), kernel="block")
        return ops_block.attention_gradient(ctx, grad, None)[:3]

    plain = gradients(BlockConfig(rows))
    hopper = BlockConfig(rows, hopper=3)
    found = [gradients(hopper, mask.bitmap)]
    if mask.band is not None:
        found.append(gradients(hopper, band=mask.band.as_ints()))
    assert not restored
    found.append(gradients(hopper))
    unread = None if rows > 64 else mask.gradient_fragments  # there are none of larger tiles
    found.append(gradients(hopper, fragments=unread))
    assert len(restored) == 2
    assert all(torch.equal(a, b) for one in found for a, b in zip(plain, one, strict=True))
