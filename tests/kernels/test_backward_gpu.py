"""The backward kernels on a GPU, through their operators, against the reference in fp64."""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from stof_compile.kernels import reference

import stof_compile.ops  # noqa: F401  # registers the operators
from stof_compile import explain, masks, sparse_attention
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.attention.functional import attention_kernel
from stof_compile.errors import StofMaskError
from stof_compile.masks import build_block_mask

pytestmark = pytest.mark.gpu

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = {"fp16": HALF, "bf16": BRAIN}
SHAPES = {"8x512": (8, 512), "1x4096": (1, 4096), "ragged": (2, 1001)}
# weights and their gradients are rounded before a second product
TWO_PRODUCTS = 2.0


def rules():
    return {
        "bigbird": masks.bigbird(window=32, global_tokens=16, random_fill=0.1),
        "longformer": masks.longformer(32, 16),
        "sliding": masks.sliding_window(100, causal=True),
        "causal": masks.causal(),
        "dilated": masks.dilated(4, 3),
        "documents": masks.block_diagonal(150),
    }


@pytest.fixture
def only_kernels(monkeypatch):
    """Fail where the reference formula gives the gradients instead of the kernels."""

    def refuse(*arguments, **options):
        raise AssertionError("the reference formula was used")

    real = reference.attention_backward_reference
    monkeypatch.setattr(reference, "attention_backward_reference", refuse)
    return real


def operands(batch, length, dtype, heads=12, head_dim=64, group=1, value_dim=None):
    torch.manual_seed(2)
    value_dim = value_dim or head_dim
    q = torch.randn(batch, length, heads, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
    k = torch.randn(batch, heads // group, length, head_dim, device="cuda", dtype=dtype)
    v = torch.randn(batch, heads // group, length, value_dim, device="cuda", dtype=dtype)
    grad = torch.randn(batch, length, heads, value_dim, device="cuda", dtype=dtype).transpose(1, 2)
    return [*(t.requires_grad_() for t in (q, k, v)), grad]


def stored_mask(spec, q, k, block=(64, 64)):
    return build_block_mask(
        spec, q.shape[2], k.shape[2], block, batch=q.shape[0], heads=q.shape[1], device="cuda"
    )


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


def expected_gradients(real, q, k, v, grad, mask, key_keep=None, bias=None, softcap=0.0):
    dense = mask.to_dense()
    wide = [t.detach().double() for t in (grad, q, k, v)]
    return real(
        wide[0], None, *wide[1:], lambda first, last: dense[:, :, first:last], key_keep,
        None if bias is None else bias.double(), q.shape[3] ** -0.5, softcap, strip=512,
    )[:3]  # fmt: skip


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


def test_learned_bias_has_its_gradient_from_the_formula():
    q, k, v, grad = operands(2, 200, SINGLE, heads=2)
    bias = torch.randn(1, 2, 200, 200, device="cuda", requires_grad=True)
    found_out = sparse_attention(q, k, v, masks.sliding_window(20), bias=bias)
    found = torch.autograd.grad(found_out, (q, k, v, bias), grad)
    keep = build_block_mask(masks.sliding_window(20), 200, 200, 64, device="cuda").to_dense()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    wanted = reference.attention_reference(*wide[:3], keep, None, wide[3])
    expected = torch.autograd.grad(wanted, wide, grad.double())
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, SINGLE, TWO_PRODUCTS)


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


@pytest.mark.parametrize("kernel", ["block", "row", "gather"])
def test_eager_function_and_the_gradient_of_its_log_sum_exp(only_kernels, kernel):
    q, k, v, grad = operands(2, 190, SINGLE, heads=4, group=2)
    rule = masks.longformer(9, 5)
    with attention_kernel(kernel):
        out, lse = sparse_attention(q, k, v, rule, enable_gqa=True, return_lse=True)
    lse_grad = torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v), (grad, lse_grad))
    keep = build_block_mask(rule, 190, 190, 64, device="cuda").to_dense()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = reference.attention_reference(*wide, keep, return_lse=True)
    expected = torch.autograd.grad(wanted, wide, (grad.double(), lse_grad.double()))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, SINGLE, TWO_PRODUCTS)


WAYS = {"eager": None, "inductor": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
LENGTH_OF = {"eager": 1001, "inductor": 1003, "reduce-overhead": 1005}  # no mask is there already


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize("rule", ["bigbird", "longformer", "dilated"])
def test_the_function_has_the_gradients_of_the_kernels(only_kernels, rule, dtype, way):
    q, k, v, grad = operands(2, LENGTH_OF[way], dtype, heads=4)
    spec = rules()[rule]

    def attend(q, k, v):
        return sparse_attention(q, k, v, spec) * 2.0

    torch._dynamo.reset()
    if WAYS[way] is not None:
        attend = torch.compile(attend, fullgraph=True, **WAYS[way])
    mask = stored_mask(spec, q, k)
    wanted = [2.0 * t for t in expected_gradients(only_kernels, q, k, v, grad, mask)]
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b, dtype, TWO_PRODUCTS)


@torch.no_grad()
def test_a_mask_that_changes_between_calls_is_no_part_of_a_cuda_graph():
    q, k, v, _ = operands(1, 640, HALF, heads=4)
    documents = torch.arange(640, device="cuda") // 100

    def attend(q, k, v, documents):
        return sparse_attention(q + 1.0, k, v, masks.document(documents)) * 2.0

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for width in (100, 100, 100, 37, 200):
        documents.copy_(torch.arange(640, device="cuda") // width)
        keep = documents[:, None] == documents
        wide = (q.double() + 1.0, k.double(), v.double())
        expected = 2.0 * reference.attention_reference(*wide, keep, None, None, 0.125)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(compiled(q, k, v, documents), expected, HALF, TWO_PRODUCTS)


@pytest.mark.parametrize("rule", ["bigbird", "longformer"])
def test_both_passes_of_the_function_replay_in_a_cuda_graph(only_kernels, rule):
    q, k, v, grad = operands(8, 1024, HALF)
    spec = rules()[rule]

    def both():
        return torch.autograd.grad(sparse_attention(q, k, v, spec), (q, k, v), grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    mask = stored_mask(spec, q, k)
    for _ in range(2):
        with torch.no_grad():
            for t in (q, k, v, grad):
                t.copy_(torch.randn_like(t))
        graph.replay()
        for a, b in zip(found, expected_gradients(only_kernels, q, k, v, grad, mask), strict=True):
            assert_close(a, b, HALF, TWO_PRODUCTS)


def test_a_first_call_inside_a_capture_is_refused_in_words():
    q, k, v, _ = operands(1, 456, HALF, heads=2)
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(StofMaskError, match="call the function once with these lengths")
    with torch.cuda.graph(graph), refused:
        sparse_attention(q, k, v, masks.sliding_window(31))
    sparse_attention(q, k, v, masks.sliding_window(31))


def test_a_forced_kernel_trains_by_kernels(only_kernels):
    q, k, v, grad = operands(2, 700, HALF, heads=4)
    spec = rules()["bigbird"]
    torch._dynamo.reset()
    options = {"attention": "block", "strict": True}
    attend = torch.compile(lambda *t: sparse_attention(*t, spec), backend="stof", options=options)
    found = torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
    mask = stored_mask(spec, q, k)
    for a, b in zip(found, expected_gradients(only_kernels, q, k, v, grad, mask), strict=True):
        assert_close(a, b, HALF, TWO_PRODUCTS)


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
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(q, k, v, grad, mask, config)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, found = gradients(q, k, v, grad, mask, config)
    for _ in range(2):
        with torch.no_grad():
            for t in (q, k, v, grad):
                t.copy_(torch.randn_like(t))
        graph.replay()
        for a, b in zip(found, expected_gradients(only_kernels, q, k, v, grad, mask), strict=True):
            assert_close(a, b, HALF, TWO_PRODUCTS)


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


class Attention(torch.nn.Module):
    """Self-attention as a model has it."""

    def __init__(self, width=256, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return x + self.out(y.transpose(1, 2).reshape(b, s, w))


def training_step(forward, module, x):
    """Output and gradients of the parameters."""
    module.zero_grad()
    out = forward(x)
    out.square().sum().backward()
    return [out.detach()] + [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN], ids=str)
def test_training_step_of_the_backend(dtype):
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Attention().cuda()
    x = torch.randn(2, 512, 256, device="cuda")
    mask = masks.longformer(32, 16)
    keep = build_block_mask(mask, 512, 512, 64, device="cuda").to_dense()

    wide = Attention().cuda()
    wide.load_state_dict(model.state_dict())
    model = model.to(dtype)
    wide.load_state_dict(model.state_dict())
    wide.double().mask = keep
    expected = training_step(wide, wide, x.to(dtype).double())
    model.mask = None
    fast = torch.compile(model, backend="stof", options={"attention": "block", "mask": mask})
    for _ in range(2):
        found = training_step(fast, model, x.to(dtype))
    assert {site.choice.kernel for site in explain(fast).sites} == {"block"}
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, dtype, 4.0)  # five products behind each other


@pytest.mark.parametrize("rule", ["bigbird", "longformer"])
def test_training_with_symbolic_lengths(only_kernels, rule):
    torch._dynamo.reset()
    torch.manual_seed(1)
    spec = rules()[rule]
    model = Attention().cuda()
    wide = Attention().cuda()
    wide.load_state_dict(model.state_dict())
    wide.double()
    model.mask = None
    fast = torch.compile(model, backend="stof", dynamic=True, options={"mask": spec})
    for length in (512, 300, 777):
        x = torch.randn(2, length, 256, device="cuda")
        wide.mask = build_block_mask(spec, length, length, 64, device="cuda").to_dense()
        expected, found = (
            training_step(forward, module, t)
            for forward, module, t in ((wide, wide, x.double()), (fast, model, x))
        )
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, SINGLE, 4.0)  # five products behind each other
    assert {site.kernel for site in explain(fast).sites} == {"rule"}
