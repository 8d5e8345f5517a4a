"""What tests of gradients on a GPU share: masks, operands, the reference, replays."""

import torch
from close import assert_close

from stof_compile import masks
from stof_compile.masks import build_block_mask

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
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


def expected_gradients(real, q, k, v, grad, mask, key_keep=None, bias=None, softcap=0.0):
    dense = mask.to_dense()
    wide = [t.detach().double() for t in (grad, q, k, v)]
    return real(
        wide[0], None, *wide[1:], lambda first, last: dense[:, :, first:last], key_keep,
        None if bias is None else bias.double(), q.shape[3] ** -0.5, softcap, strip=512,
    )[:3]  # fmt: skip


def assert_same_gradients(found, wanted, dtype):
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, dtype, TWO_PRODUCTS)


def check_replays(both, real, leaves, mask):
    """Gradients in a CUDA graph of both passes, for the contents that ``leaves`` have at a replay.

    Args:
        both: () -> gradients of q, k and v. real: the reference. leaves: q, k, v and that of the
            output, half types.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    for _ in range(2):
        with torch.no_grad():
            for t in leaves:
                t.copy_(torch.randn_like(t))
        graph.replay()
        assert_same_gradients(found, expected_gradients(real, *leaves, mask), leaves[0].dtype)
