"""What tests of the Hopper attention kernels share: calls of their launcher on the CPU."""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from close import assert_close, assert_close_lse
from gluon_values import OnGpu, kept_scores, value
from stof_compile.kernels import attention_hopper as module
from stof_compile.kernels import hopper_forms
from stof_compile.kernels.limits import shared_memory_limit
from stof_compile.kernels.reference import attention_reference

from stof_compile import masks

HALF = torch.float16
INSTEAD = {  # the assembly has tests of its own (test_weights_code.py)
    "kept_scores": kept_scores,
    "cleared": lambda x: x,
    "reciprocal": lambda x: 1.0 / x,
    "rescaled": lambda acc, alpha, width: acc * alpha[:, :1],
    **dict.fromkeys(("fragment_layout", "octet_layout", "without"), lambda *arguments: None),
}


def weighed(s, offset, total, mult):
    """(weights, offsets, sums, factor of the former result) of a tile of scores."""
    assert not np.isnan(s).any(), "scores that are not there"
    own = np.minimum(offset, np.floor(-mult * s.max(1, keepdims=True)))
    alpha = np.exp2(own - offset)
    p = np.exp2(mult * s + own[:, :1])
    total = total * alpha
    total[:, 0] += p.sum(1)
    return p, own, total, alpha


def weighed_rows(s, offset, total, mult, dtype):
    """``weighed`` with weights that have a dtype to be stored in."""
    p, *told = weighed(s, offset, total, mult)
    return value(p), *told


def weighed_and_scaled(s, offset, total, acc, mult, dtype):
    """The same and the former result."""
    p, own, total, alpha = weighed_rows(s, offset, total, mult, dtype)
    return p, own, total, alpha, value(acc * alpha[:, :1])


INSTEAD |= {"weighed": weighed_rows, "weighed_and_scaled": weighed_and_scaled}


def sides_of_programs(seed):
    """The halves of the L2 cache of 64 multiprocessors, a program on each."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(2, (64,), dtype=torch.int32, generator=draw)


@contextmanager
def launches(monkeypatch, launch, workers, seed=0):
    """``attention_hopper_forward`` meets a GPU of so many multiprocessors, and launches by
    ``launch`` of (kernel, programs, arguments, constants, options)."""
    properties = SimpleNamespace(multi_processor_count=workers, L2_cache_size=2**16)
    queue = torch.zeros(2, dtype=torch.int32)
    sides = sides_of_programs(seed)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(module, "launch", launch)
        patch.setattr(module, "new_queue", lambda device: queue)
        patch.setattr(module, "l2_sides", lambda device: sides)
        yield


def hopper_attention(q, k, v, mask, *numbers):
    """(result, log-sum-exp) of the launcher for tensors on the CPU.

    Args:
        numbers: programs, stages, heavy_rows, pieces, uneven, return_lse, shifted.
    """
    shifted = numbers[6:] == (True,)
    arrays = list(mask.shifted_tensors if shifted else mask.hopper_tensors)
    found = module.attention_hopper_forward(q.as_subclass(OnGpu), k, v, arrays, 0.125, *numbers)
    return tuple(t.as_subclass(torch.Tensor) for t in found)


def operands(batch, heads, q_len, k_len, head_dim, group=1):
    """q, k and v."""
    draw = torch.Generator().manual_seed(q_len)
    q = torch.randn(batch, heads, q_len, head_dim, generator=draw).to(HALF)
    k, v = torch.randn(2, batch, heads // group, k_len, head_dim, generator=draw).to(HALF)
    return q, k, v


def check(attend, q, k, v, mask, seed=0, workers=3, **how):
    """``attend(seed, workers, q, k, v, mask, **how)`` against the reference."""
    out, lse = attend(seed, workers, q, k, v, mask, **how)
    expected, expected_lse = attention_reference(
        q.double(), k.double(), v.double(), mask.to_dense(), None, None, 0.125, 0.0, True
    )
    assert_close(out, expected, HALF)
    if lse.numel():
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def check_on_gpu(attend, mask, shape, kv_heads, dtype):
    """``attend(q, k, v, return_lse)`` of new inputs on the GPU, six times, against the reference.

    Workers race for units; with and without a log-sum-exp the third launch is a repeated one.

    Args:
        shape: (batch, heads, queries, keys, head dim).
    """
    batch, heads, q_len, k_len, head_dim = shape
    keep = mask.to_dense()
    for number in range(6):
        return_lse = number % 2 == 0
        packed = torch.randn(batch, q_len, heads, head_dim, device=mask.device, dtype=dtype)
        packed *= 16 if number > 2 else 1  # maxima that grow beyond the slack, tile after tile
        q = packed.transpose(1, 2)  # strided, as models have it
        k, v = torch.randn(
            2, batch, kv_heads, k_len, head_dim, device=mask.device, dtype=dtype
        )  # fmt: skip
        expected, expected_lse = attention_reference(
            q.double(), k.double(), v.double(), keep, None, None, head_dim**-0.5, 0.0, True
        )
        poison = torch.full_like(packed, float("nan"))
        del poison
        out, lse = attend(q, k, v, return_lse)
        assert_close(out, expected, dtype)
        if return_lse:
            assert_close_lse(lse, expected_lse)
        else:
            assert lse.numel() == 0


def signals_unguarded(ptx):
    """What arrivals at barriers have in front of them in place of a barrier of their threads: one
    of these signals for all, which must have read what is given back by then."""
    seen, found = "", []
    for line in ptx.splitlines():
        word = re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)", line)
        name = word[1] if word else ""
        if name.startswith("mbarrier.arrive.shared") and not seen.startswith("bar."):
            found.append(seen)
        if name.startswith(("bar.", "ld.shared", "st.shared", "ldmatrix", "wgmma", "cp.async")):
            seen = name
    return found


def compiled_alone(
    head_dim, programs, stages, dtype, whole=False, has_part=True, shifted=False, most_spilled=0
):  # fmt: skip
    """PTX of the kernel of one tile row at a time, after checks of what it needs.

    Args:
        whole: with planes, groups, a log-sum-exp and long rows in pieces.
        most_spilled: bytes of a thread.
    """
    from compiling import compile_gluon, needs
    from stof_compile.kernels.hopper_kernel import attention_hopper_kernel
    from triton.experimental.gluon import language as gl

    block_d, tail_d = hopper_forms.widths(head_dim, programs)
    width = block_d + tail_d

    def tile(rows, columns):
        layout = gl.NVMMASharedLayout(min(2 * columns, 128), 16, rank=4)
        return f"tensordesc<{dtype}[1, 1, {rows}, {columns}],{layout!r}>" if columns else "i32"

    types = {"word_desc": f"tensordesc<i32[1, 128],{gl.NVMMASharedLayout(0, 32, rank=2)!r}>"}
    for name in "qkvo":
        types |= {f"{name}_desc": tile(64, block_d), f"{name}_tail_desc": tile(64, tail_d)}
    for name in "kv":
        short = tile(32, block_d), tile(32, tail_d)
        types[f"{name}_short_desc"], types[f"{name}_short_tail_desc"] = (
            short if shifted else ("i32", "i32")
        )
    constants = {
        "MULT": 0.18,
        "BLOCK_D": block_d,
        "TAIL_D": tail_d,
        "RING": hopper_forms.ring(stages, width),
        "Q_SLOTS": hopper_forms.query_slots(width, programs),
        "GROUP": 4 if whole else 1,
        "SINGLE_PLANE": not whole,
        "HAS_PART": has_part,
        "RETURN_LSE": whole,
        "SPLIT": whole,
        "SHIFTED": shifted,
    }
    registers = hopper_forms.registers_of(programs, width)
    compiled = compile_gluon(attention_hopper_kernel, 90, types, constants, maxnreg=registers)
    found = needs(compiled, 90)
    assert found.spill_bytes <= most_spilled
    assert found.registers * 256 * programs <= 65536
    # a multiprocessor has 228 KB; each program takes 1 KB more than it asks for
    assert (found.shared_bytes + 1024) * programs <= 228 * 1024
    assert found.shared_bytes <= shared_memory_limit((9, 0))
    text = compiled.asm["ptx"]
    assert not signals_unguarded(text)
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text
    assert "setmaxnreg" in text
    return text


def short_rules():
    """Masks with part tiles that are laid anew, some of them as short ones."""
    draw = torch.Generator().manual_seed(5)
    keep = torch.zeros(2, 3, 330, 400, dtype=torch.bool)
    for plane in keep.flatten(0, 1)[:-1]:
        for row in range(0, 330, 66):
            start = int(torch.randint(0, 380, (), generator=draw))
            plane[row : row + 66, start : start + 30] = True
            plane[row, torch.randint(0, 400, (2,), generator=draw)] = True
    keep[0, :, 128:192, 64:256] = True  # full tiles
    keep[1, :, 64:130] = False  # rows without keys
    return {
        "one short tile": masks.sliding_window(3),
        "sliding": masks.sliding_window(40),
        "longformer": masks.longformer(window=45, global_tokens=45),
        "bigbird": masks.bigbird(window=24, global_tokens=17, random_fill=0.2),
        "planes": masks.from_tensor(keep),
        "its last row only": masks.causal(),
        "nothing to shift": masks.block_diagonal(64),
    }
