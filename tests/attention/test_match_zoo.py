"""Every model of the zoo: sites, near misses and mask parts, and the reference in place of every
site computes the model."""

import pytest
import torch
from e2e.models import CASES, ModelCase


def first_tensor(output):
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.last_hidden_state


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: ModelCase, recorder):
    with torch.set_grad_enabled(case.train):
        model, inputs = case.build()
        found = first_tensor(torch.compile(model, backend=recorder)(**inputs))
        model, inputs = case.build()
        wanted = first_tensor(model(**inputs))
    attended = inputs.get("attention_mask")
    if (
        attended is not None and found.shape[:2] == attended.shape
    ):  # padded query positions are nobody's result
        found, wanted = found[attended.bool()], wanted[attended.bool()]
    torch.testing.assert_close(found, wanted, atol=5e-6, rtol=1e-5)
    assert len(recorder) == 1
    assert not any(recorder[0].again.values()), "a second normalisation rewrites nothing"
    sites, misses, parts = recorder.sites(), recorder.misses(), recorder.parts()
    assert len(sites) == case.sites, [(m.name, m.reason) for m in misses]
    assert len(misses) == case.near_misses
    assert all(miss.reason for miss in misses)
    assert sum(part.static is not None for part in parts) == case.static
    assert sum(part.padding is not None for part in parts) == case.padding
    assert sum(part.bias is not None for part in parts) == case.bias
    assert sum(part.dynamic is not None for part in parts) == case.dynamic, [
        p.reasons for p in parts
    ]
    assert sum(part.is_causal for part in parts) == case.causal
    assert sum(site.cross for site in sites) == case.cross
    names = [site.name for site in sites]
    assert len(set(names)) == len(names)
    if case.names:
        assert tuple(names) == case.names
    facts = recorder[0].facts
    assert facts.place.path_known and facts.place.whole_model
    modules = {name for name, _ in model.named_modules()}
    assert {".".join(site.path) for site in sites} <= modules
    for site, part in zip(sites, parts, strict=True):
        check_shapes(site, part)


def check_shapes(site, part):
    """Operands fit together and every part has the shape its consumer reads."""
    q, k, v, out = (n.meta["example_value"] for n in (site.q, site.k, site.v, site.output))
    k_len = k.shape[-1] if site.k_transposed else k.shape[-2]
    assert q.dim() == k.dim() == v.dim() == out.dim() == 4
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert v.shape[2] == k_len and q.shape[1] % k.shape[1] == 0
    assert site.enable_gqa == (q.shape[1] != k.shape[1])
    if part.static is not None:
        assert part.static.dtype == torch.bool and part.static.shape[2:] == (q.shape[2], k_len)
        assert not part.static_empty_rows
    if part.padding is not None:
        keep = part.padding.meta["example_value"]
        assert keep.dtype == torch.bool and keep.shape == (q.shape[0], k_len)
    for node in (part.bias, part.dynamic):
        if node is not None:
            shape = node.meta["example_value"].shape
            assert len(shape) == 4
            torch.broadcast_shapes(shape, (q.shape[0], q.shape[1], q.shape[2], k_len))
