"""Cases of ``sanitize.py``: attention, forward and backward."""

from functools import partial
from unittest import mock

import torch
from sanitize_case import as_on_gpu, forms, on_gpu

RAGGED = {"q_len": 130, "k_len": 201, "head_dim": 64, "value_dim": 64, "block": (64, 64)}
"""Three rows of four tiles, the last of them not full."""
FEATURES = {
    "rule": "random", "batch": 2, "heads": 4, "group": 2, "padding": True, "bias": "full",
    "softcap": 1.5,
}  # fmt: skip
"""A mask, its own for each head, and all that is done to scores, for two heads of keys."""


def _block(case, config=None):
    import attention_cases
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    case = attention_cases.Case(**{"dtype": torch.float16, **case})
    config = BlockConfig(*case.block, 4, 2)._replace(**(config or {}))
    attention_cases.check(on_gpu(attention_block_forward), config, case)


def _again(case):
    import attention_cases
    from stof_compile.kernels.attention_blockwise import BlockConfig
    from stof_compile.kernels.blockwise_again import attention_block_again

    def thrice(*given, **named):
        for _ in range(2):
            attention_block_again(*given, **named)
        return attention_block_again(*given, **named)  # on a GPU a launch that is known

    case = attention_cases.Case(**{"dtype": torch.float16, **case})
    attention_cases.check(on_gpu(thrice), BlockConfig(*case.block, 4, 2), case)


def _lazy(rule, block_k, loops, registers):
    import test_hopper
    from close import assert_close
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward
    from stof_compile.kernels.reference import attention_reference
    from torch._library.triton import set_wrap_triton_enabled

    from stof_compile.masks import build_block_mask

    spec, shape = test_hopper.rules()[rule], (2, 4, 330, 64)
    mask = build_block_mask(spec, 330, 330, (64, block_k), batch=2, heads=4)
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, *shape, generator=generator).to(torch.bfloat16)
    q *= 16  # maxima that grow beyond the slack, tile after tile
    config = BlockConfig(64, block_k, 4, 3, loops, 1, registers=registers)
    with set_wrap_triton_enabled(False):  # a limit of registers, as where no trace is taken
        out, _ = on_gpu(attention_block_forward)(
            q, k, v, list(mask.tensors), None, None, 0.125, 0.0, 0, [], config, False
        )
    keep = mask.to_dense()
    assert_close(
        out, attention_reference(q.double(), k.double(), v.double(), keep, None, None, 0.125)
    )


def _row(case):
    import attention_cases
    from stof_compile.kernels.attention_rowwise import RowConfig, attention_row_forward

    case = attention_cases.Case(**{"dtype": torch.float16, "q_len": 9, **case})
    config = RowConfig(*case.block, 1, 2, 2)
    attention_cases.check(on_gpu(attention_row_forward), config, case)


def _gather(case, config=None):
    import attention_cases
    from stof_compile.kernels.attention_gather import GatherConfig

    case = attention_cases.Case(**{"dtype": torch.float16, **case})
    config = GatherConfig(*case.block, 4, 3)._replace(**(config or {}))
    packed = tuple(attention_cases.stored_mask(case).packed)
    attention_cases.check(partial(on_gpu(attention_cases.gather), packed), config, case)


def _fp8(case, config=None):
    import attention_cases
    import test_fp8
    from stof_compile.kernels import attention_fp8 as module
    from stof_compile.kernels.attention_blockwise import BlockConfig

    case = attention_cases.Case(**{"dtype": torch.float16, **case})
    config = BlockConfig(*case.block, 4, 2)._replace(**(config or {}))
    name = "attention_fp8_forward"  # operands are rounded on the CPU
    with mock.patch.object(module, name, on_gpu(getattr(module, name))), as_on_gpu():
        attention_cases.check(test_fp8.launch, config, case, fp8=True)


def _backward(case):
    import test_backward
    from close import assert_close
    from stof_compile.kernels import attention_backward as module

    name = "attention_backward_blockwise"
    case = test_backward.Case(**{"dtype": torch.float16, **case})
    looser = partial(assert_close, scale=2.0)  # weights are rounded before a second product
    with (
        mock.patch.object(module, name, on_gpu(getattr(module, name))),
        mock.patch.object(test_backward, "assert_close", looser),
    ):
        test_backward.check(case)


def _hopper_attention(
    rule, head_dim, programs, group=1, dtype=torch.bfloat16, lengths=(330, 330), heavy=0, pieces=1,
    stages=2, tile=(64, 64), shifted=False,
):  # fmt: skip
    import test_hopper
    from close import assert_close, assert_close_lse
    from stof_compile.kernels.attention_hopper import attention_hopper_forward
    from stof_compile.kernels.reference import attention_reference

    from stof_compile.masks import build_block_mask

    batch, heads, (q_len, k_len) = 2, 4, lengths
    spec = test_hopper.rules()[rule]
    mask = build_block_mask(spec, q_len, k_len, tile, batch=batch, heads=heads)
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator)
    q = draw(batch, q_len, heads, head_dim).to(dtype).transpose(1, 2)  # strided, as in models
    k, v = draw(2, batch, heads // group, k_len, head_dim).to(dtype)
    scale = head_dim**-0.5
    out, lse = on_gpu(attention_hopper_forward)(
        q, k, v, list(mask.shifted_tensors if shifted else mask.hopper_tensors), scale,
        programs, stages, heavy, pieces, heavy > 0, True, shifted,
    )  # fmt: skip
    wanted, wanted_lse = attention_reference(
        q.double(), k.double(), v.double(), mask.to_dense(), None, None, scale, 0.0, True
    )
    assert_close(out, wanted, dtype)
    assert_close_lse(lse, wanted_lse)


def _hopper_backward(
    rule, head_dim=64, group=1, dtype=torch.float16, lengths=(330, 330), of_lse=False, heads=4
):
    import hopper_gradients
    import test_hopper
    from close import assert_close
    from stof_compile.kernels.attention_hopper_backward import attention_hopper_backward

    from stof_compile.masks import build_block_mask

    spec, scale = test_hopper.rules()[rule], head_dim**-0.5
    mask = build_block_mask(spec, *lengths, 64, batch=2, heads=heads)
    given = hopper_gradients.operands(2, heads, *lengths, head_dim, group, dtype)
    q, k, v, grad_out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in given)
    out, lse = hopper_gradients.forward(q, k, v, mask, scale)
    grad_lse = torch.ones_like(lse) if of_lse else None
    found = on_gpu(attention_hopper_backward)(
        grad_out, grad_lse, q, k, v, out, lse, list(mask.tensors), *mask.key_lists,
        mask.gradient_fragments, scale,
    )  # fmt: skip
    wanted = hopper_gradients.wanted_gradients(q, k, v, grad_out, mask, grad_lse, scale)
    for gradient, expected in zip(found, wanted, strict=True):
        assert_close(gradient, expected, dtype, scale=2.0)


def _cases():
    causal, longformer = {"rule": "causal"}, {"rule": "causal longformer"}
    band, single, parts = {"band": True}, {"dtype": torch.float32}, {"tf32": 2}
    yield from forms("block", "attention_blockwise", _block, {
        "rule": (RAGGED | causal | band, {"loops": 6}),
        "rule-branch": (RAGGED | causal | band | {"padding": True}, {"loops": 7}),
        "rule-of-part-tiles": (RAGGED | {"rule": "longformer"} | band, {"loops": 6}),
        "band": (RAGGED | longformer | band, {}),
        "bitmap": (RAGGED | longformer, {}),
        "bitmap-one-loop": (RAGGED | longformer, {"loops": 4, "heavy_first": 0}),
        "pieces": (RAGGED | longformer | {"batch": 2}, {"heavy_rows": 2, "pieces": 3}),
        "pieces-of-wide-heads": (
            RAGGED | FEATURES | {"head_dim": 192, "value_dim": 160}, {"heavy_rows": 9, "pieces": 2},
        ),
        "bitmap-prefetch": (RAGGED | longformer, {"loops": 5, "prefetch": 1, "heads_fast": 1}),
        "features": (RAGGED | FEATURES, {}),
        "features-of-odd-heads": (RAGGED | FEATURES | {"head_dim": 72, "value_dim": 40}, {}),
        "wide-heads": (RAGGED | FEATURES | {"head_dim": 192, "value_dim": 160}, {}),
        "part-only": (RAGGED | {"rule": "sliding"}, {"loops": 1}),
        "full-only": (RAGGED | {"rule": "dense", "q_len": 128, "k_len": 192}, {"loops": 2}),
        "no-part-tiles": (RAGGED | {"rule": "dense", "q_len": 128, "k_len": 192}, {"loops": 4}),
        "packed": (RAGGED | {"k_len": 130, "batch": 2, "packed": True}, {}),
        "more-queries": (RAGGED | causal | band | {"k_len": 70, "q_offset": 0}, {}),
        "decode": ({"q_len": 1, "heads": 4, "group": 2, **band}, {}),
        "fp32": (FEATURES | single, {}),
        "fp32-parts": (RAGGED | FEATURES | single | {"block": (64, 64)}, parts),
        "fp32-parts-of-odd-heads": (
            RAGGED | FEATURES | single | {"head_dim": 72, "value_dim": 40, "block": (64, 32)},
            parts,
        ),
        "fp32-parts-of-wide-heads": (
            RAGGED | FEATURES | single | {"head_dim": 192, "value_dim": 160, "block": (16, 32)},
            parts,
        ),
        "small-tiles": (longformer | {"block": (16, 32), "head_dim": 24, "value_dim": 40}, {}),
    })  # fmt: skip
    yield from forms("row", "attention_rowwise", _row, {
        "band": longformer | band,
        "bitmap": {"q_len": 33, **longformer},
        "features": FEATURES,
        "odd-heads": {"rule": "random", "head_dim": 24, "value_dim": 40},
        "decode": {"q_len": 1, "heads": 4, "group": 2, **band},
        "fp32": single | {"rule": "random"},
    })  # fmt: skip
    yield from forms("gather", "attention_gather", _gather, {
        "bitmap": (RAGGED | longformer, {}),
        "features": (RAGGED | FEATURES, {"heads_fast": 1}),
        "odd-heads": (RAGGED | FEATURES | {"head_dim": 72, "value_dim": 40}, {}),
        "full-only": (RAGGED | {"rule": "dense", "q_len": 128, "k_len": 192}, {}),
        "packed": (RAGGED | {"k_len": 130, "batch": 2, "packed": True}, {}),
        "decode": ({"q_len": 1, "heads": 4, "group": 2}, {}),
        "fp32": (FEATURES | single, {}),
        "fp32-parts": (RAGGED | FEATURES | single, parts),
        "low-tiles": (RAGGED | longformer | {"block": (16, 64)}, {}),
    })  # fmt: skip
    yield from forms("fp8", "attention_fp8", _fp8, {
        "rule": (RAGGED | causal | band, {"loops": 6}),
        "bitmap-prefetch": (RAGGED | longformer, {"loops": 5, "prefetch": 1, "heads_fast": 1}),
        "pieces": (RAGGED | longformer | {"batch": 2}, {"heavy_rows": 2, "pieces": 3}),
        "features": (RAGGED | FEATURES, {}),
        "features-of-odd-heads": (RAGGED | FEATURES | {"head_dim": 72, "value_dim": 40}, {}),
        "full-only": (RAGGED | {"rule": "dense", "q_len": 128, "k_len": 192}, {"loops": 2}),
        "decode": ({"q_len": 1, "heads": 4, "group": 2, "block": (16, 32), **band}, {}),
    }, "e4m3")  # fmt: skip
    pieces = RAGGED | {"piece": (64, 64)}
    yield from forms("backward", "attention_backward", _backward, {
        "band": pieces | longformer | band,
        "bitmap": RAGGED | longformer | {"piece": (32, 64)},
        "features": pieces | FEATURES | {"grad_lse": True},
        "odd-heads": {"q_len": 21, "head_dim": 72, "value_dim": 40, "scale": 0.1},
        "groups": causal | band | {"heads": 4, "group": 4, "q_len": 21, "k_len": 37},
        "strided": {"k_len": 33, "batch": 2, "strided": True},
        "decode": {"q_len": 1, "heads": 4, "group": 2, **band},
        "fp32": FEATURES | single,
    })  # fmt: skip
    yield from forms("block-again", "blockwise_again", _again, {
        "plain": RAGGED | longformer | band,
        "features": RAGGED | FEATURES,
    })  # fmt: skip
    yield from forms("lazy-block", "attention_blockwise", _lazy, {
        "narrow": ("bigbird", 32, 5, 88),
        "narrow-loops": ("planes", 32, 3, 88),
        "square": ("bigbird", 64, 5, 128),
    }, "hopper")  # fmt: skip
    square = 64, 64
    yield from forms("hopper-attention", "attention_hopper", _hopper_attention, {
        "planes": ("planes", 64, 3, 4, torch.bfloat16, (330, 330), 2),
        "bigbird": ("bigbird", 128, 2),
        "causal": ("causal", 40, 3, 1, torch.float16, (330, 201)),
        "dense": ("dense", 64, 4, 4, torch.float16, (192, 320)),
        "more-keys": ("sliding", 72, 2, 1, torch.float16, (70, 200)),
        "halves": ("bigbird", 128, 3, 1, torch.float16, (330, 330), 2, 2, 1),
        "tiles": ("tiles only", 96, 1),
        "pieces": ("planes", 96, 2, 2, torch.float16, (330, 330), 3, 2),
        # more tile rows than workers: they take several of them
        "several": ("bigbird", 64, 1, 4, torch.float16, (1210, 1210), 2),
        "pairs": ("planes", 128, 1, 4, torch.bfloat16, (330, 330), 2, 1, 2, (64, 128)),
        "pairs-narrow": ("bigbird", 64, 1, 1, torch.float16, (330, 201), 0, 1, 2, (64, 128)),
        "pairs-several": ("bigbird", 104, 1, 1, torch.float16, (2420, 2420), 2, 1, 2, (64, 128)),
        "shifted": ("sliding", 64, 1, 4, torch.bfloat16, (1210, 1210), 0, 1, 2, square, True),
        "shifted-halves": ("sliding", 128, 3, 1, torch.float16, (330, 201), 0, 1, 1, square, True),
        "shifted-pieces": ("bigbird", 96, 2, 2, torch.float16, (330, 330), 3, 2, 2, square, True),
        "several-halves": ("bigbird", 128, 1, 1, torch.float16, (2420, 2420), 2, 1, 1),
        "shared": ("planes", 128, 1, 4, torch.bfloat16, (330, 330), 2, 1, 4, (192, 64)),
        "shared-keys": ("bigbird", 104, 1, 1, torch.float16, (330, 201), 0, 1, 4, (192, 64)),
        "shared-several": ("bigbird", 128, 1, 1, torch.float16, (4900, 1930), 2, 1, 4, (192, 64)),
        "wide-pairs": ("bigbird", 160, 2, 1, torch.float16, (330, 201)),
        "wide": ("planes", 192, 2, 4, torch.bfloat16, (330, 330), 2, 1, 1),
        "wide-pieces": ("bigbird", 256, 2, 1, torch.float16, (330, 201), 3, 2, 1),
        "wide-several": ("bigbird", 256, 1, 1, torch.float16, (2420, 1210), 2, 1, 1),
        "shared-wide": ("planes", 256, 1, 4, torch.bfloat16, (330, 330), 2, 1, 2, (128, 64)),
        "shared-wide-several": (
            "bigbird", 200, 1, 1, torch.float16, (4900, 1210), 2, 1, 2, (128, 64),
        ),
        "shared-narrow": ("planes", 64, 2, 4, torch.bfloat16, (330, 330), 2, 1, 4, (128, 64)),
        "shared-narrow-several": (
            "bigbird", 40, 2, 1, torch.float16, (4900, 1930), 2, 1, 4, (128, 64),
        ),
    }, "hopper")  # fmt: skip
    yield from forms("hopper-backward", "attention_hopper_backward", _hopper_backward, {
        "planes": ("planes", 64, 1, torch.bfloat16, (330, 330), True),
        "bigbird": ("bigbird", 40),
        "groups": ("causal", 64, 4, torch.bfloat16, (330, 201), True),
        "dense": ("dense", 56, 1, torch.float16, (192, 320)),
        "more-keys": ("sliding", 48, 2, torch.float16, (70, 200)),
        "wide": ("planes", 128, 1, torch.float16, (330, 330), True),
        "wide-groups": ("bigbird", 72, 4, torch.bfloat16, (330, 201)),
        # more tile rows and columns than workers: they take several of them
        "several": ("bigbird", 64, 1, torch.float16, (1930, 2420), False, 12),
        "wide-several": ("bigbird", 128, 1, torch.float16, (1930, 2420), False, 12),
    }, "hopper")  # fmt: skip


CASES = tuple(_cases())
