"""What sparse_attention and attention_kernel refuse, eagerly and compiled, and in which words."""

from collections.abc import Callable

import pytest
import torch

from stof_compile import attention_kernel, sparse_attention
from stof_compile.errors import StofError, StofMaskError, StofOptionError, StofUnsupportedError
from tests.functional_operands import WINDOW, operands


def test_forced_kernel_is_refused_with_a_reason() -> None:
    q, k, v = operands()
    with (
        pytest.raises(StofOptionError, match="valid: row, block, gather, flex, sdpa"),
        attention_kernel("fast"),
    ):
        pass
    with (
        attention_kernel("block"),
        pytest.raises(StofUnsupportedError, match="valid there: gather"),
    ):
        sparse_attention(q, k, v, WINDOW, enable_gqa=True)
    with attention_kernel("sdpa"), pytest.raises(StofUnsupportedError, match="softcap"):
        sparse_attention(q, k, v, WINDOW, softcap=1.0, enable_gqa=True)
    with attention_kernel("flex"), pytest.raises(StofUnsupportedError, match="log-sum-exp"):
        sparse_attention(q, k, v, WINDOW, enable_gqa=True, return_lse=True)


LEARNED = torch.nn.Parameter(torch.tensor(0.5))
WRONG: dict[str, tuple[type[Exception], str, Callable[..., object]]] = {
    "three dimensions": (StofError, "4 dimensions", lambda q, k, v: sparse_attention(q[0], k, v)),
    "gqa not asked for": (StofError, "enable_gqa=True", lambda q, k, v: sparse_attention(q, k, v)),
    "heads": (
        StofError,
        "multiple",
        lambda q, k, v: sparse_attention(q[:, :3], k, v, enable_gqa=True),
    ),
    "dtype": (StofError, "one float dtype", lambda q, k, v: sparse_attention(q, k.double(), v)),
    "lengths": (StofError, "must agree", lambda q, k, v: sparse_attention(q, k, v[:, :, 1:])),
    "padding": (
        StofError,
        "key_keep is bool",
        lambda q, k, v: sparse_attention(q, k, v, key_keep=torch.ones(2, 3), enable_gqa=True),
    ),
    "bias": (
        StofError,
        "bias is a float",
        lambda q, k, v: sparse_attention(q, k, v, bias=torch.ones(3, 70), enable_gqa=True),
    ),
    "scale of words": (
        StofError,
        "scale is a number",
        lambda q, k, v: sparse_attention(q, k, v, scale="0.5", enable_gqa=True),
    ),
    "scale of nothing": (
        StofError,
        "scale is a finite number, got nan",
        lambda q, k, v: sparse_attention(q, k, v, scale=float("nan"), enable_gqa=True),
    ),
    "softcap": (
        StofError,
        "softcap is a finite number of at least 0",
        lambda q, k, v: sparse_attention(q, k, v, softcap=-1.0, enable_gqa=True),
    ),
    "scale to be learned": (
        StofError,
        "scale is a constant, .* multiply q by it",
        lambda q, k, v: sparse_attention(q, k, v, WINDOW, scale=LEARNED, enable_gqa=True),
    ),
    "softcap to be learned": (
        StofError,
        "softcap is a constant, .* would be lost",
        lambda q, k, v: sparse_attention(q, k, v, WINDOW, softcap=LEARNED, enable_gqa=True),
    ),
    "no mask": (
        StofMaskError,
        "mask is a rule",
        lambda q, k, v: sparse_attention(q, k, v, 7, enable_gqa=True),
    ),
    "mask of other lengths": (
        StofMaskError,
        "give a rule",
        lambda q, k, v: sparse_attention(q, k, v, torch.ones(5, 5).bool(), enable_gqa=True),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case: str) -> None:
    error, text, call = WRONG[case]
    with pytest.raises(error, match=text):
        call(*operands())


def test_a_learned_scale_is_refused_where_its_gradient_is_wanted(fresh_dynamo):
    def attend(q, k, v, scale):
        return sparse_attention(q, k, v, WINDOW, scale=scale, enable_gqa=True)

    for run in (attend, torch.compile(attend, backend="eager")):
        with pytest.raises(StofError, match="multiply q by it"):
            run(*operands(), LEARNED)
    with torch.no_grad():
        found = attend(*operands(), LEARNED)
    q, k, v = operands()
    out = attend(q * LEARNED, k, v, 1.0)  # what the error says to do
    torch.testing.assert_close(found, out)
    assert torch.autograd.grad(out.square().sum(), LEARNED)[0] != 0


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(70, 70),
        torch.ones(70, 70, dtype=torch.int32),
        torch.ones(1, 70, dtype=torch.bool),
        torch.ones(70, 69, dtype=torch.bool),
        torch.ones(70, dtype=torch.bool),
        torch.ones(3, 1, 70, 70, dtype=torch.bool),
        torch.ones(3, 70, 70, dtype=torch.bool),
        torch.ones(1, 2, 4, 70, 70, dtype=torch.bool),
    ],
    ids=lambda mask: f"{mask.dtype}{list(mask.shape)}",
)
@pytest.mark.parametrize("backend", [None, "eager"])
def test_mask_tensors_that_do_not_fit(mask, softcap, backend, fresh_dynamo):
    """Compiled as eagerly: SDPA would add a float mask and broadcast one that is too small."""

    def attend(q, k, v, mask):
        return sparse_attention(q, k, v, mask, softcap=softcap, enable_gqa=True)

    run = attend if backend is None else torch.compile(attend, backend=backend)
    with pytest.raises(StofError, match="mask"):
        run(*operands(), mask)


def test_a_refusal_is_caught_in_compiled_code(fresh_dynamo):
    """Dynamo traces the error as well: no graph break, which fullgraph would not allow."""

    def attend(q, k, v):
        try:
            return sparse_attention(q, k, v[..., :3, :])
        except StofError:
            return q + 1

    q, k, v = operands()
    out = torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(out, q + 1)


def test_head_dim_0_is_refused():
    q, k, v = (x[..., :0] for x in operands())
    with pytest.raises(StofError, match="head dim 0"):
        sparse_attention(q, k, v, enable_gqa=True)


def test_a_device_without_kernels_is_refused():
    q = torch.empty(1, 2, 8, 16, device="meta")
    with pytest.raises(StofUnsupportedError, match="no kernel for device 'meta'"):
        sparse_attention(q, q, q, WINDOW)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vjp])
def test_gradients_of_torch_func_are_refused(transform):
    def attend(q):
        return sparse_attention(q, q, q, WINDOW).sum()

    q, k, v = operands()
    with pytest.raises(StofUnsupportedError, match=r"torch\.autograd\.grad"):
        transform(attend)(q) if transform is not torch.func.vjp else transform(attend, q)
    # a call that SDPA answers, and a transform that takes no gradient
    assert torch.func.grad(lambda q: sparse_attention(q, k, v, enable_gqa=True).sum())(q).any()
    rows = torch.vmap(lambda q: sparse_attention(q, q, q, WINDOW))(torch.stack([q, -q]))
    torch.testing.assert_close(rows[0], sparse_attention(q, q, q, WINDOW))
