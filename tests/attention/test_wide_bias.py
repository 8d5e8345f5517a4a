"""A bias of fp32 beside operands of fp16 or bf16 keeps its bits, whatever kernel attends."""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from stof_compile.kernels.biased_sdpa import bias_dtype, operand_dtype

from stof_compile import attention_kernel, explain, masks, sparse_attention

LENGTH = 96
KEEP = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(params=HALF, ids=str)
def operands(request):
    """q, k, v and ALiBi a thousand above 0, which the softmax does not see and rounding would."""
    q, k, v = torch.randn(3, 1, 2, LENGTH, 32).to(request.param)
    bias = torch.arange(LENGTH) * torch.tensor([0.7, 0.3])[:, None] + 1000.0
    return q, k, v, bias[None, :, None]


def exact(q, k, v, bias):
    scores = q.double() @ k.double().mT * 32**-0.5 + bias.double()
    return scores.masked_fill(~KEEP, -torch.inf).softmax(-1) @ v.double()


@pytest.mark.parametrize("kernel", [None, "sdpa", "gather"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_by_hand(operands, kernel, with_lse):
    q, k, v, bias = operands

    def attend():
        return sparse_attention(q, k, v, masks.causal(), bias=bias, return_lse=with_lse)

    if kernel is None:
        found = attend()
    else:
        with attention_kernel(kernel):
            found = attend()
    assert_close(found[0] if with_lse else found, exact(*operands), q.dtype)


def test_by_hand_without_a_mask(operands):
    q, k, v, bias = operands
    whole = bias.expand(1, 2, LENGTH, LENGTH).masked_fill(~KEEP, -torch.inf)
    assert_close(sparse_attention(q, k, v, bias=whole), exact(*operands), q.dtype)


@pytest.mark.parametrize("budget", [0, 2])
@pytest.mark.parametrize("spelling", ["softmax", "sdpa", "function"])
def test_compiled(operands, spelling, budget, fresh_dynamo, tmp_path):
    def softmax(q, k, v, bias):
        scores = q @ k.mT * 32**-0.5 + bias
        return scores.masked_fill(~KEEP, -torch.inf).softmax(-1).to(q.dtype) @ v

    def sdpa(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(1, 2, LENGTH, LENGTH))

    def function(q, k, v, bias):
        return sparse_attention(q, k, v, masks.causal(), bias=bias)

    attend = {"softmax": softmax, "sdpa": sdpa, "function": function}[spelling]
    options = {"tune_budget_s": budget, "cache_dir": str(tmp_path)}
    if spelling == "sdpa":
        options["mask"] = masks.causal()
    found = torch.compile(attend, backend="stof", options=options)(*operands)
    # scores that a model keeps in fp16 or bf16 until then are its own
    assert_close(found, exact(*operands), operands[0].dtype, scale=4.0)


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "gather"])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_compiled_under_autocast(operands, inside, kernel, fresh_dynamo):
    """Autocast rounds the mask that SDPA is given; scores by hand it leaves as they are."""

    def softmax(q, k, v, bias):
        return (q @ k.mT * 32**-0.5 + bias).softmax(-1).to(q.dtype) @ v

    def under(*given):
        with torch.autocast("cpu", given[0].dtype):
            return softmax(*given)

    options = {"tune_budget_s": 0, "attention": kernel, "mask": masks.causal()}
    fast = torch.compile(under if inside else softmax, backend="stof", options=options)
    with torch.autocast("cpu", operands[0].dtype, enabled=not inside):
        found = fast(*operands)
    assert_close(found, exact(*operands), operands[0].dtype, scale=4.0)
    assert [site.status for site in explain(fast).sites] == ["rewritten"]


def test_gradients(operands):
    q, k, v, bias = (t.detach().requires_grad_() for t in operands)
    sparse_attention(q, k, v, masks.causal(), bias=bias).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in operands]
    exact(*wide).sum().backward()
    assert bias.grad.dtype == torch.float32
    for found, wanted in zip((q, k, v), wide, strict=False):
        assert_close(found.grad, wanted.grad, q.dtype, scale=4.0)


@pytest.mark.parametrize(
    ("q", "bias", "added"),
    [
        (torch.float16, torch.float16, torch.float16),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.float32),
        (torch.float32, torch.float64, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_dtypes(q, bias, added):
    assert bias_dtype(q, bias) == added
    assert operand_dtype(q, added, "cpu") == q
    assert operand_dtype(q, added, "cuda") == added  # what its kernels take beside the bias
