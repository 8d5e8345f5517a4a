"""What tests of the Hopper kernels of the gradient share: calls of their launcher on the CPU."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from gluon_values import OnGpu
from hopper_attention import sides_of_programs
from stof_compile.kernels import attention_hopper_backward as module
from stof_compile.kernels.reference import attention_backward_reference, attention_reference

HALF, BRAIN = torch.float16, torch.bfloat16


@contextmanager
def launches(monkeypatch, launch, capability=(9, 0), seed=0):
    """``attention_hopper_backward`` meets a GPU of one multiprocessor, and launches by ``launch``
    of (kernel, programs, arguments, constants, options)."""
    properties = SimpleNamespace(multi_processor_count=1, L2_cache_size=2**16)
    queue = torch.zeros(2, dtype=torch.int32)  # of both kernels
    sides = sides_of_programs(seed)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(module, "on_device", lambda tensor: nullcontext())
        patch.setattr(module, "launch", launch)
        patch.setattr(module, "new_queue", lambda device: queue)
        patch.setattr(module, "l2_sides", lambda device: sides)
        yield


def operands(batch, heads, q_len, k_len, head_dim, group=1, dtype=HALF):
    """q, k, v and the gradient of the output."""
    draw = torch.Generator().manual_seed(q_len)
    q, grad_out = torch.randn(2, batch, heads, q_len, head_dim, generator=draw).to(dtype)
    k, v = torch.randn(2, batch, heads // group, k_len, head_dim, generator=draw).to(dtype)
    return q, k, v, grad_out


def forward(q, k, v, mask, scale=0.125):
    """Result and log-sum-exp as a forward kernel leaves them, on the CPU."""
    wide = (t.double() for t in (q, k, v))
    out, lse = attention_reference(*wide, mask.to_dense(), None, None, scale, 0.0, True)
    return out.to(q.dtype), lse.float()


def hopper_gradients(
    q, k, v, grad_out, mask, grad_lse=None, scale=0.125, mask_arrays=None, **changes
):
    """(dq, dk, dv) of the launcher for tensors on the CPU.

    Args:
        mask_arrays: in place of those of the mask. changes: of other arguments, by name.
    """
    out, lse = (None, None) if "lse" in changes else forward(q, k, v, mask, scale)
    given = {
        "grad_out": grad_out, "grad_lse": grad_lse, "q": q.as_subclass(OnGpu), "k": k, "v": v,
        "out": out, "lse": lse, "mask": mask_arrays or list(mask.tensors),
        "key_ptr": mask.key_lists[0], "key_tiles": mask.key_lists[1],
        "fragments": mask.gradient_fragments, "scale": scale,
    }  # fmt: skip
    found = module.attention_hopper_backward(**given | changes)
    return tuple(t.as_subclass(torch.Tensor) for t in found)


def wanted_gradients(q, k, v, grad_out, mask, grad_lse=None, scale=0.125):
    """The same by the reference, in fp64."""
    keep = mask.to_dense()
    grad_lse = None if grad_lse is None else grad_lse.double()
    wide = (t.double() for t in (q, k, v))
    return attention_backward_reference(
        grad_out.double(), grad_lse, *wide, lambda first, last: keep[:, :, first:last], None, None,
        scale, 0.0, strip=512,
    )[:3]  # fmt: skip
