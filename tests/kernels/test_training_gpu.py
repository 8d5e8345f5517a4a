"""Training on a GPU through ``sparse_attention`` and the backend, against the reference in fp64."""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from gradient_checks import (
    BRAIN,
    HALF,
    SINGLE,
    TWO_PRODUCTS,
    assert_same_gradients,
    check_replays,
    expected_gradients,
    operands,
    rules,
    stored_mask,
)
from stof_compile.kernels import reference
from torch.fx.experimental.proxy_tensor import make_fx

from stof_compile import explain, masks, sparse_attention
from stof_compile.attention import functional
from stof_compile.attention.functional import attention_kernel
from stof_compile.errors import StofMaskError
from stof_compile.masks import build_block_mask

pytestmark = pytest.mark.gpu


def test_learned_bias_has_its_gradient_from_the_formula():
    q, k, v, grad = operands(2, 200, SINGLE, heads=2)
    bias = torch.randn(1, 2, 200, 200, device="cuda", requires_grad=True)
    found_out = sparse_attention(q, k, v, masks.sliding_window(20), bias=bias)
    found = torch.autograd.grad(found_out, (q, k, v, bias), grad)
    keep = build_block_mask(masks.sliding_window(20), 200, 200, 64, device="cuda").to_dense()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    wanted = reference.attention_reference(*wide[:3], keep, None, wide[3])
    expected = torch.autograd.grad(wanted, wide, grad.double())
    assert_same_gradients(found, expected, SINGLE)


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
    assert_same_gradients(found, expected, SINGLE)


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
        assert_same_gradients(found, wanted, dtype)


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

    check_replays(both, only_kernels, (q, k, v, grad), stored_mask(spec, q, k))


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
    assert_same_gradients(found, expected_gradients(only_kernels, q, k, v, grad, mask), HALF)


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


@pytest.mark.parametrize("length", [1500, 300])
def test_what_records_an_eager_call_meets_the_operator_with_a_gradient(length, monkeypatch):
    q, k, v = torch.randn(3, 8, 12, length, 64, device="cuda", dtype=HALF)
    direct = []
    attend_directly = functional.attend_without_gradient
    monkeypatch.setattr(
        functional,
        "attend_without_gradient",
        lambda *given: direct.append(1) or attend_directly(*given),
    )

    def attend(*operands):
        return sparse_attention(
            *operands, masks.sliding_window(64)
        )  # by hand the grid's tiles, too

    out = attend(q, k, v)
    assert direct == [1]
    traced = make_fx(attend)(q, k, v)
    assert "stof.attention_block" in traced.code
    trained = attend(q, k, v.clone().requires_grad_())
    assert direct == [1] and trained.requires_grad
    assert torch.equal(traced(q, k, v), out)
    assert_close(trained, out.double(), HALF)
