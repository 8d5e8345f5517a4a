"""Checks for infinities behind products become words that the products' kernels write.

The operators run on the CPU here, as what they are defined to be; the kernels have tests of theirs.
"""

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from pass_backend import PassBackend

import stof_compile.ops_hopper_linear
import stof_compile.ops_linear
from stof_compile.mark_infinities import mark_infinities
from stof_compile.node_ops import operation

fused = torch.ops.stof.fused_linear.default
hopper = torch.ops.stof.hopper_linear.default
CONFIG = [16, 16, 16, 2, 2, 2, 1, 0, 0]
LIMIT = torch.finfo(torch.float16).max


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, fresh_dynamo):
    """The operators by their definition, in any dtype."""

    def plain(x, weight, bias, residual, factor, activation, config):
        assert factor is None and activation in ("", "relu")
        out = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        out = out.relu() if activation else out
        return (out if residual is None else out + residual.float()).to(x.dtype)

    def marking(x, weight, bias, residual, factor, activation, config, marks, mark):
        out = plain(x, weight, bias, residual, factor, activation, config)
        marks.select(0, mark).bitwise_or_(out.isinf().any().int())  # can be traced
        return out

    library = torch.library.Library("stof", "IMPL")
    library.impl("hopper_linear", lambda x, w, b, r, a, c: plain(x, w, b, r, None, a, c), "CPU")
    library.impl(
        "hopper_linear_marked",
        lambda x, w, r, a, c, marks, mark: marking(x, w, None, r, None, a, c, marks, mark),
        "CPU",
    )
    launchers = {"stof::fused_linear": plain, "stof::fused_linear_marked": marking}
    monkeypatch.setattr(stof_compile.ops_linear, "_launcher", launchers.__getitem__)
    yield
    library._destroy()


def marked(fn, *cases, inductor=False):
    """Number of checks that are gone; results are those of the plain calls."""
    backend = PassBackend(lambda gm, facts: mark_infinities(gm), inductor)
    with torch.no_grad():
        compiled = torch.compile(fn, backend=backend, dynamic=False)
        for args in cases:
            wanted = fn(*(a.clone() for a in args))
            for found, expected in zip(tensors(compiled(*args)), tensors(wanted), strict=True):
                if found.is_floating_point():
                    assert_close(found, expected.double(), torch.float16, scale=2.0)
                else:
                    assert torch.equal(found, expected)
    return backend


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def clamped(h):
    """As the T5 of transformers does it."""
    limit = torch.where(torch.isinf(h).any(), LIMIT - 1000, LIMIT)
    return torch.clamp(h, min=-limit, max=limit)


def tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def cases():
    """States without an infinity, with one, and with one and finite values beyond the limit."""
    weights = [tensor(32, 32, seed=i) / 8 for i in (1, 2, 3)]
    plain, one, both = (tensor(2, 9, 32) for _ in range(3))
    one[1, 8, 31] = -torch.inf
    both[0, 0, 0] = torch.inf
    both[1, 3, 5], both[1, 3, 6], both[0, 2, 2] = LIMIT, -LIMIT, torch.nan
    return [(x, *weights) for x in (plain, one, both)]


@pytest.mark.parametrize("inductor", [False, True])
def test_layers_of_a_t5(inductor):
    def layers(x, a, b, c):
        h = clamped(fused(F.rms_norm(x, (32,)), a, None, x, None, "", CONFIG))
        up = fused(F.rms_norm(h, (32,)), b, None, None, None, "relu", CONFIG)
        h = clamped(hopper(up, c, None, h, "", CONFIG[:4]))
        h = clamped(F.linear(F.rms_norm(h, (32,)), a) + h)  # of another kernel
        return F.rms_norm(h, (32,)), h

    backend = marked(layers, *cases(), inductor=inductor)
    assert backend.count == 2
    done = [operation(node) for node in backend.gm.graph.nodes]
    assert done.count("isinf") == 1 and done.count("new_zeros") == 1
    assert done.count("stof::hopper_linear_marked") == done.count("stof::fused_linear_marked") == 1


def test_what_a_view_shows_is_looked_at():
    def fn(x, a, b, c):
        h = fused(x.reshape(18, 32), a, None, x.reshape(18, 32), None, "", CONFIG)
        h = h.view(2, 9, 32)
        seen = h.isinf().any()
        return clamped(h), seen, torch.any(torch.isinf(h.flatten()))

    assert marked(fn, *cases()).count == 3


def other(x, a, b, c):
    h = fused(x, a, None, x, None, "", CONFIG)
    return torch.isinf(h).any(-1), torch.isinf(h).any(dim=0, keepdim=True), torch.isinf(h).all()


def part(x, a, b, c):
    h = fused(x, a, None, x, None, "", CONFIG)
    return torch.isinf(h[0]).any(), torch.isnan(h).any(), torch.isinf(h + 1).any()


def written(x, a, b, c):
    h = fused(x, a, None, x, None, "", CONFIG)
    h[0, 0, 0] = torch.inf
    return torch.isinf(h).any()


def with_bias(x, a, b, c):
    h = hopper(x, a, b[0], x, "", CONFIG[:4])
    return torch.isinf(h).any()


def check_written(x, a, b, c):
    h = fused(x, a, None, x, None, "", CONFIG)
    one = torch.isinf(h)
    one[0, 0, 0] = True
    two = torch.isinf(h)
    two.logical_not_()
    three = torch.isinf(h)
    three[:, 0].fill_(False)
    return one.any(), two.any(), torch.any(three)


def other_dtype(x, a, b, c):
    h = fused(x, a, None, x, None, "", CONFIG)
    return torch.isinf(h.view(torch.bfloat16)).any(), torch.isinf(h.view(torch.float32)).any()


@pytest.mark.parametrize("fn", [other, part, written, with_bias, check_written, other_dtype])
def test_what_stays(fn):
    assert marked(fn, *cases()).count == 0


def test_a_write_behind_the_check_is_none_before_it():
    def fn(x, a, b, c):
        h = fused(x, a, None, x, None, "", CONFIG)
        seen = torch.isinf(h).any()
        h[0, 0, 0] = torch.inf
        return seen, h

    assert marked(fn, *cases()).count == 1


def test_checks_in_another_order_than_their_products():
    def fn(x, a, b, c):
        h = fused(x, a, None, x, None, "", CONFIG)
        g = fused(h, b, None, None, None, "relu", CONFIG)
        last = torch.isinf(g).any()
        return last, torch.isinf(h).any(), g

    assert marked(fn, *cases()).count == 2


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("inside_first", [False, True])
def test_words_are_not_shared_across_regions(inside_first, inductor):
    def product(x, a):
        h = fused(x, a, None, x, None, "", CONFIG)
        return torch.isinf(h).any()

    def fn(x, a, b, c):
        seen = [] if inside_first else [product(x, b)]
        with torch.inference_mode():
            seen.append(product(x, a).clone())
        seen += [product(x, b)] if inside_first else []
        return [one.logical_not() for one in seen]

    backend = marked(fn, *cases(), inductor=inductor)
    assert backend.count == 2
    assert [operation(n) for n in backend.gm.graph.nodes].count("new_zeros") == 2


def test_words_are_on_the_device_of_their_product():
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    results = []
    with mode:
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            number = len(results)
            x, weight = graph.placeholder(f"x{number}"), graph.placeholder(f"w{number}")
            x.meta["example_value"] = torch.empty(16, 32, dtype=torch.float16, device=device)
            weight.meta["example_value"] = torch.empty(32, 32, dtype=torch.float16, device=device)
            h = graph.call_function(fused, (x, weight, None, None, None, "", CONFIG))
            h.meta["example_value"] = torch.empty(16, 32, dtype=torch.float16, device=device)
            infinite = graph.call_function(torch.isinf, (h,))
            infinite.meta["example_value"] = torch.empty(16, 32, dtype=torch.bool, device=device)
            seen = graph.call_method("any", (infinite,))
            seen.meta["example_value"] = torch.empty((), dtype=torch.bool, device=device)
            results.append(seen)
    graph.output(tuple(results))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert mark_infinities(gm) == 3
    gm.graph.lint()
    made = [n.meta["example_value"] for n in gm.graph.nodes if operation(n) == "new_zeros"]
    assert [(str(words.device), words.numel()) for words in made] == [
        ("cuda:0", 32),
        ("cuda:1", 16),
    ]


def test_notes_tell_how_many():
    from stof_compile.dump import Record
    from stof_compile.fusion_result import FusionResult
    from stof_compile.record_fusion import notes_without_fusion, record_fusion

    record = Record()
    record_fusion(FusionResult(marked=60), record)
    assert "checks for infinities done by the kernels of products: 60" in record.notes
    assert notes_without_fusion(record.notes) == []
