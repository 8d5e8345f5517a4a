"""The packed graph: results with memory of their own, shared copies, and graphs that are copied."""

import torch
import torch.nn.functional as F
from e2e import models
from packed_projections import WIDTH, Three, packed, rows
from torch import nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from stof_compile.capture import read_capture
from stof_compile.graph_copy import copy_graph
from stof_compile.packing import apply_packs, packs_bytes, search_packs


def test_layers_that_share_weights_share_the_copy(fresh_dynamo):
    model = Three()
    backend, result = packed(lambda x: model(torch.tanh(model(x))), rows())
    assert len(backend.packs) == 2 and len(backend.guard.slices) == 6
    assert packs_bytes(backend.packs) == 3 * (WIDTH + 1) * WIDTH * 4
    with torch.no_grad():
        torch.testing.assert_close(result, model(torch.tanh(model(rows()))))


def test_views_of_the_results(fresh_dynamo):
    def across(q, k, v, x):  # view(-1) of a slice fails: that result is copied
        return q.view(-1) * k.reshape(-1) + v.view(2, 5, 4, 4).transpose(1, 2).flatten()

    backend, result = packed(model := Three(across), rows())
    assert [p.copied for p in backend.packs] == [(True, False, False)]
    with torch.no_grad():
        torch.testing.assert_close(result, model(rows()))


def test_returned_results_have_memory_of_their_own(fresh_dynamo):
    model = Three(lambda q, k, v, x: (q, k.view(2, 5, 4, 4).transpose(1, 2), v + 1))
    backend, (q, k, v) = packed(model, rows())
    assert [p.copied for p in backend.packs] == [(True, True, False)]
    plain = model(rows())
    for out, ref in zip((q, k, v), plain, strict=True):
        assert out.stride() == ref.stride()
        torch.testing.assert_close(out, ref.detach())
    assert len({t.untyped_storage().data_ptr() for t in (q, k, v)}) == 3


def test_one_row_is_copied_too(fresh_dynamo):
    """Slices of a single row count as contiguous; they share memory all the same."""
    _, (q, k, _) = packed(Three(lambda q, k, v, x: (q, k, v + 1)), rows(1, 1))
    assert q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()
    q.zero_()
    assert k.abs().sum() > 0


def test_caches_do_not_share_memory(fresh_dynamo):
    """A cache that is filled returns keys and values, which must be tensors of their own."""
    model, inputs = models.hf_llama_prefill("sdpa")
    backend, result = packed(model, **inputs)
    assert len(backend.packs) == 4
    caches = [t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)]
    addresses = [t.untyped_storage().data_ptr() for t in caches]
    assert len(set(addresses)) == len(caches) == 4


def test_a_kernel_of_the_user_gets_contiguous_memory(fresh_dynamo):
    @torch.library.custom_op("stof_test::opaque", mutates_args=())
    def opaque(t: torch.Tensor) -> torch.Tensor:
        assert t.is_contiguous()
        return t + 1

    opaque.register_fake(torch.empty_like)
    backend, _ = packed(Three(lambda q, k, v, x: opaque(q) + k + v), rows())
    assert [p.copied for p in backend.packs] == [(True, False, False)]


def test_attributes_of_the_graph(fresh_dynamo):
    """Parameters that are no inputs: read from the graph module itself."""
    linear = Three()

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = linear.q, linear.k

        def forward(self, x):
            return F.linear(x, self.q.weight, self.q.bias) * F.linear(x, self.k.weight)

    gm = torch.fx.symbolic_trace(Root())
    x = rows()
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(gm, mode).propagate(x)
    for node in gm.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    with torch.no_grad():
        facts = read_capture(gm, [x])
        packs, _ = search_packs(gm, facts)
        assert [p.sizes for p in packs] == [(WIDTH, WIDTH)]
        guard = apply_packs(gm, facts, packs)
        gm.recompile()
        linear.k.weight.mul_(2.0)
        assert guard.refresh([x]) == 1
        torch.testing.assert_close(gm(x), linear.q(x) * F.linear(x, linear.k.weight))


def test_copies_of_a_graph_are_packed_by_name(fresh_dynamo):
    results = []

    def backend(gm, inputs):
        facts = read_capture(gm, inputs)
        packs, _ = search_packs(gm, facts)
        twin = copy_graph(gm)
        apply_packs(twin, facts, packs)
        twin.recompile()
        results.append((gm(*inputs), twin(*inputs)))
        return gm.forward

    with torch.no_grad():
        torch.compile(Three(), backend=backend)(rows())
    ((plain,), (other,)) = results[0]
    torch.testing.assert_close(plain, other)
