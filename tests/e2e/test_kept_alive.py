"""What a compiled model keeps alive, and whether its tensors can be swapped: as with Inductor."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from running import without_inductor
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch_templates import templates_win

from stof_compile import attention_kernel, explain, masks
from stof_compile.verdict import FastestForm

LENGTH, SHORTER, WIDTH = 64, 48, 32
QUICK = {"tune_budget_s": 0, "attention": "gather"}
WINDOW = masks.sliding_window(8)


class Layer(nn.Module):
    """Attention with three projections, and a mask in a buffer if asked for."""

    def __init__(self, masked: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mask", torch.rand(LENGTH, LENGTH) > 0.2 if masked else None)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = None if self.mask is None else self.mask[: x.shape[1], : x.shape[1]]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def called(fast, length=LENGTH, backward=False):
    """Call with an input that has a history; the input and what that has saved, both weakly."""
    with torch.enable_grad():
        x = torch.randn(2, length, WIDTH, requires_grad=True).exp()
    saved = StorageWeakRef(x.grad_fn._saved_result.untyped_storage())
    x = x * 1.0
    out = fast(x)
    if backward:
        out.sum().backward()
    return weakref.ref(x), saved


def swap_all(model):
    """As ``load_state_dict`` with ``torch.__future__.set_swap_module_params_on_conversion``."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        new = tensor.detach().clone()
        new = nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new
        try:
            torch.utils.swap_tensors(tensor, new)
        except RuntimeError as refusal:
            yield f"{name} cannot be swapped: {refusal}"


def leftovers(
    *, grad=False, backward=False, masked=False, lengths=(), change=None, kernel=None,
    packed=False, **how,
):  # fmt: skip
    """What a compiled layer keeps alive, and what stands in the way of swapping, in words.

    Args:
        grad: mode of the calls; backward: gradients are taken. lengths: of further calls.
        change: changes the layer before it is called once more. kernel: asked for at a call.
        packed: whether projections are expected to be packed. how: the layer is compiled.
    """
    torch._dynamo.reset()
    gc.collect()
    found, model = [], Layer(masked)
    fast = torch.compile(model, **how)
    with torch.set_grad_enabled(grad):
        first, saved = called(fast, backward=backward)
        for length in lengths:
            called(fast, length, backward)
        with attention_kernel(kernel) if kernel else nullcontext():
            called(fast, backward=backward)
        if change is not None:
            change(model)
            called(fast, backward=backward)
    if how["backend"] == "stof":
        assert explain(fast).sites and str(explain(fast))
        assert any(pack.packed for pack in explain(fast).packs) == packed
    model.zero_grad()
    gc.collect()
    found += ["the first input"] if first() is not None else []
    found += ["what its history has saved"] if not saved.expired() else []
    found += swap_all(model)
    replaced = StorageWeakRef(model.q.weight.untyped_storage())
    model.q.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    with torch.set_grad_enabled(grad):
        called(fast)
    gc.collect()
    found += ["a replaced parameter"] if not replaced.expired() else []
    state = model.state_dict().items()
    held = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in state}
    del state, fast, model
    gc.collect()
    return found + [f"{name} of a deleted model" for name, it in held.items() if not it.expired()]


def new_mask(model):
    model.mask = ~model.mask


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"tune_budget_s": 0}, {}),
        ({**QUICK, "mask": WINDOW}, {"grad": True, "backward": True, "kernel": "sdpa"}),
        (QUICK, {"masked": True, "change": new_mask}),
        (QUICK, {"masked": True, "dynamic": True, "lengths": (SHORTER,)}),
    ],
    ids=["plain", "kernels and gradients", "mask buffers", "lengths"],
)
def test_no_more_than_with_inductor(options, how, tmp_path, fresh_dynamo):
    options = {**options, "cache_dir": tmp_path}
    found = leftovers(backend="stof", options=options, **how)
    assert found == leftovers(backend="inductor", **how) == []


def test_no_more_where_projections_are_packed(tmp_path, monkeypatch, fresh_dynamo):
    """The copies are the compiled model's own; it does not keep the originals, nor does a plan."""
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", without_inductor)
    monkeypatch.setattr("stof_compile.forms.fastest_form", lambda *given: FastestForm(None))
    options = {"attention": "gather", "cache_dir": tmp_path / "store", "pack_memory": 1.0}
    options["dump_dir"] = tmp_path / "dump"
    with templates_win():
        assert leftovers(backend="stof", options=options, packed=True) == []
        (plan,) = (tmp_path / "dump").rglob("plan.json")
        options = {**options, "plan": plan, "dump_dir": None}
        assert leftovers(backend="stof", options=options, packed=True) == []
    assert leftovers(backend="aot_eager") == []
