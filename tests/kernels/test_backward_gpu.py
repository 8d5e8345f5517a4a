"""The backward kernels on a GPU, through their operators, against the reference in fp64."""

import pytest
import torch
from close import assert_close
from gradient_checks import (
    BRAIN,
    HALF,
    SINGLE,
    TWO_PRODUCTS,
    check_replays,
    expected_gradients,
    operands,
    rules,
    stored_mask,
)
from stof_compile.kernels import reference

import stof_compile.ops  # noqa: F401  # registers the operators
from stof_compile import masks
from stof_compile.attention.call import honest_config, mask_arrays

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": HALF, "bf16": BRAIN}
SHAPES = {"8x512": (8, 512), "1x4096": (1, 4096), "ragged": (2, 1001)}


def gradients(q, k, v, grad, mask, config, key_keep=None, bias=None, softcap=0.0, band=True):
    """Gradients of q, k and v through stof::attention_block, in poisoned memory."""
    arrays = list(mask_arrays(mask, config).values())
    numbers = list(mask.band.as_ints()) if band and mask.band is not None else []
    out, lse = torch.ops.stof.attention_block(
        q, k, v, *arrays, key_keep, bias, q.shape[3] ** -0.5, softcap, mask.q_offset, numbers,
        list(config), True, *mask.key_lists,
    )  # fmt: skip
    assert lse.requires_grad
    poison = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    del poison
    return out, torch.autograd.grad(out, (q, k, v), grad)


def first_config(q, v, mask):
    """The likely best config with the tiles of the mask."""
    from stof_compile.kernels import attention_blockwise

    capability = torch.cuda.get_device_capability()
    found = attention_blockwise.configs(q.shape[3], q.dtype, capability, value_dim=v.shape[3])
    size = (mask.block_q, mask.block_k)
    return honest_config(mask, next(config for config in found if config[:2] == size), 1)


def check(real, q, k, v, grad, mask, config, **features):
    plain = {name: value for name, value in features.items() if name != "band"}
    _, found = gradients(q, k, v, grad, mask, config, **features)
    expected = expected_gradients(real, q, k, v, grad, mask, **plain)
    for gradient, wanted in zip(found, expected, strict=True):
        assert_close(gradient, wanted, q.dtype, TWO_PRODUCTS)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rule", rules())
def test_bert_shapes(only_kernels, rule, shape, dtype):
    q, k, v, grad = operands(*shape, dtype)
    mask = stored_mask(rules()[rule], q, k)
    check(only_kernels, q, k, v, grad, mask, first_config(q, v, mask))


@pytest.mark.parametrize("block", [(16, 16), (32, 64), (128, 128), (16, 128), (128, 64)], ids=str)
def test_tiles(only_kernels, block):
    q, k, v, grad = operands(2, 500, HALF, heads=4)
    mask = stored_mask(rules()["bigbird"], q, k, block)
    from stof_compile.kernels.attention_blockwise import BlockConfig

    check(only_kernels, q, k, v, grad, mask, BlockConfig(*block, 8 if block[0] > 64 else 4, 2))


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 72, 80, 96, 128, 192, 256])
def test_head_dims(only_kernels, head_dim, dtype):
    q, k, v, grad = operands(1, 200, dtype, heads=2, head_dim=head_dim)
    from stof_compile.kernels import attention_blockwise

    config = attention_blockwise.configs(head_dim, dtype, torch.cuda.get_device_capability())[0]
    mask = stored_mask(rules()["longformer"], q, k, tuple(config[:2]))
    config = honest_config(mask, config, 1)
    check(only_kernels, q, k, v, grad, mask, config)
    check(only_kernels, q, k, v, grad, mask, honest_config(mask, config, 1), band=False)


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize(
    "features",
    [("groups",), ("padding",), ("softcap",), ("bias",), ("groups", "padding", "softcap", "bias")],
    ids="+".join,
)
def test_features(only_kernels, features, dtype):
    group = 4 if "groups" in features else 1
    q, k, v, grad = operands(2, 300, dtype, heads=8, head_dim=64, group=group, value_dim=80)
    keep = torch.rand(2, 8, 300, 300, device="cuda") < 0.2
    keep[:, :, 7] = False  # a row without keys
    keep[:, :, 64:128, 64:192] = True
    mask = stored_mask(masks.from_tensor(keep), q, k, (32, 32))
    from stof_compile.kernels.attention_blockwise import BlockConfig

    given = {}
    if "padding" in features:
        ends = torch.tensor([[300], [111]], device="cuda")
        given["key_keep"] = torch.arange(300, device="cuda") < ends
    if "bias" in features:
        given["bias"] = torch.randn(1, 8, 300, 300, device="cuda")
        given["bias"][:, :, 9] = torch.finfo(torch.float32).min
    if "softcap" in features:
        given["softcap"] = 3.0
    config = BlockConfig(32, 32, 4, 2)
    check(only_kernels, q, k, v, grad, mask, config, **given)
    _, found = gradients(q, k, v, grad, mask, config, **given)
    assert (found[0][:, :, 7] == 0).all()


def test_without_log_sum_exp_the_formula_serves():
    q, k, v, grad = operands(1, 130, SINGLE, heads=2)
    mask = stored_mask(rules()["sliding"], q, k, (32, 32))
    from stof_compile.kernels.attention_blockwise import BlockConfig

    out, _ = torch.ops.stof.attention_block(
        q, k, v, *mask.tensors, None, None, 0.125, 0.0, 0, [], list(BlockConfig(32, 32)), False
    )
    found = torch.autograd.grad(out, (q, k, v), grad)
    real = reference.attention_backward_reference
    for a, b in zip(found, expected_gradients(real, q, k, v, grad, mask), strict=True):
        assert_close(a, b, SINGLE)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_behind_the_hopper_kernel(only_kernels, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from stof_compile.kernels.attention_blockwise import BlockConfig

    q, k, v, grad = operands(1, 1000, dtype)
    mask = stored_mask(rules()["bigbird"], q, k)
    config = honest_config(mask, BlockConfig(num_stages=3, hopper=3), 1)
    check(only_kernels, q, k, v, grad, mask, config, band=False)


def test_every_run_gives_the_same_bits(only_kernels):
    q, k, v, grad = operands(2, 1024, BRAIN, group=4)
    mask = stored_mask(rules()["bigbird"], q, k)
    config = first_config(q, v, mask)
    _, first = gradients(q, k, v, grad, mask, config)
    for _ in range(5):
        _, again = gradients(q, k, v, grad, mask, config)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_replays_in_a_cuda_graph(only_kernels):
    q, k, v, grad = operands(1, 512, HALF)
    mask = stored_mask(rules()["longformer"], q, k)
    config = first_config(q, v, mask)

    def both():
        return gradients(q, k, v, grad, mask, config)[1]

    check_replays(both, only_kernels, (q, k, v, grad), mask)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_operator_under_inductor(only_kernels, mode):
    q, k, v, grad = operands(2, 300, HALF, heads=4)
    mask = stored_mask(rules()["longformer"], q, k)
    config = list(first_config(q, v, mask))
    arrays, lists = list(mask_arrays(mask, config).values()), mask.key_lists

    def attend(q, k, v):
        out, _ = torch.ops.stof.attention_block(
            q * 1.0, k, v, *arrays, None, None, 0.125, 0.0, 0, [], config, True, *lists
        )
        return out * 2.0

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    wanted = [2.0 * t for t in expected_gradients(only_kernels, q, k, v, grad, mask)]
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(compiled(q, k, v), (q, k, v), grad)
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b, HALF, TWO_PRODUCTS)
