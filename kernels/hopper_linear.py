"""A linear layer with its epilogue on Hopper GPUs: when it can run, and how its kernel is launched.

y = activation(x @ weight.T + bias) [+ residual], in fp32 and rounded once
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bound_launch import Descriptor, Repeat, launch, layout
from .limits import shared_memory_limit
from .memo import remember
from .operand_checks import check_mark
from .problem import on_device

ACTIVATIONS = ("", "gelu", "gelu_tanh", "relu", "silu")
BLOCK_K = 64
HALF_TYPES = (torch.float16, torch.bfloat16)
TILES = ((128, 128), (64, 256), (64, 128))
# Of a Hopper multiprocessor, without barriers and small tables.
_SHARED_BYTES = shared_memory_limit((9, 0)) - 1024
# Of a thread at the start, and of one that multiplies: two warp groups of them and the warp group
# of the producer have 65,536 in all.
REGISTERS, CONSUMER_REGISTERS = 168, 240


class HopperLinearConfig(NamedTuple):
    """How the kernel is launched; a list of it is the operator's ``config`` argument."""

    block_m: int = 128  # rows of a tile
    block_n: int = 128  # columns of a tile
    stages: int = 5  # depth of the ring of loads
    group_m: int = 8  # tile rows that are computed together


class _Known(NamedTuple):
    """A launch that was checked and has run, and the shape of its result."""

    repeat: Repeat
    shape: torch.Size


_known: dict[tuple[Any, ...], _Known] = {}  # by all that was checked: layouts, names, device


def shared_bytes(config: HopperLinearConfig) -> int:
    """Shared memory of a program: the ring, and a finished tile and a bias of each consumer."""
    block_m, block_n, stages, _ = config
    ring = stages * (block_m + block_n) * BLOCK_K * 2
    return ring + 2 * block_m * block_n * 2 + 2 * block_n * 2


def config_refusal(config: HopperLinearConfig) -> str | None:
    """Why a config cannot be launched, None where it can."""
    if (config.block_m, config.block_n) not in TILES or config.group_m < 1 or config.stages < 2:
        return f"no such tile: {tuple(config)}"
    needed = shared_bytes(config)
    if needed > _SHARED_BYTES:
        return f"{needed} bytes of shared memory, there are {_SHARED_BYTES}"
    return None


@cache
def _kernel_is_there() -> bool:
    """Whether this Triton has the dialect the kernel is written in."""
    try:
        from . import hopper_linear_kernel
    except (ImportError, AttributeError):
        return False
    return hasattr(hopper_linear_kernel, "hopper_linear_kernel")


def hopper_linear_refusal(
    n: int, k: int, dtype: torch.dtype, capability: tuple[int, int], activation: str
) -> str | None:
    """Why the kernel cannot run a problem, None where it can.

    Args:
        n, k: rows and columns of the weight. dtype: of all operands.
        capability: (major, minor) of the device.
        activation: "" or a name.
    """
    if capability[0] != 9 or torch.version.hip is not None:
        return "it needs a Hopper GPU"
    if dtype not in HALF_TYPES:
        return f"it takes fp16 and bf16, not {dtype}"
    if activation not in ACTIVATIONS:
        return f"it has no activation {activation!r}"
    if n % 8 or k % 8 or n < 64 or k < BLOCK_K:
        return f"it takes weights of 64 x 64 and more in steps of 8, not {n} x {k}"
    return None if _kernel_is_there() else "this Triton lacks the dialect it is written in"


def hopper_linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    config: Sequence[int],
    marks: Tensor | None = None,
    mark: int = 0,
) -> Tensor:
    """Launch the kernel.

    Args:
        x: [..., K], fp16 or bf16; copied if its strides or address do not suit TMA (16 bytes).
        weight: [N, K], unit stride along K or along N.
        bias: [N] or None. residual: [..., N] with as many rows as x, or None; copied as x is.
        activation: one of :data:`ACTIVATIONS`.
        config: a :class:`HopperLinearConfig`.
        marks, mark: as for the fused linear layer (linear.py); there must be no bias then.
    Returns:
        [..., N], contiguous.
    Raises:
        ValueError: a size, dtype or config that the kernel does not take.
    """
    asked = (*map(layout, (x, weight, bias, residual, marks)), activation, *config)
    known = _known.get(asked)
    if known is not None and known.repeat.here:
        out = x.new_empty(known.shape)
        last = out if residual is None else residual
        if marks is None:
            known.repeat(x, weight, out if bias is None else bias, last, out)
        else:
            known.repeat(x, weight, last, out, marks.narrow(0, mark, 1))
        return out
    n, k = weight.shape
    chosen = HopperLinearConfig(*config)
    if not x.is_cuda:
        raise ValueError(f"Hopper linear kernel: it runs on a GPU, not on {x.device}")
    capability = torch.cuda.get_device_capability(x.device)
    refusal = hopper_linear_refusal(n, k, x.dtype, capability, activation)
    refusal = refusal or config_refusal(chosen)
    if refusal is None and x.shape[-1] != k:
        refusal = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
    dtypes = {t.dtype for t in (x, weight, bias, residual) if t is not None}
    if refusal is None and len(dtypes) > 1:
        refusal = f"operands of several dtypes: {sorted(map(str, dtypes))}"
    if refusal is None and bias is not None and bias.numel() != n:
        refusal = f"a bias of shape {tuple(bias.shape)}; it has to have {n} elements"
    if refusal is None and 1 not in weight.stride():
        refusal = f"a weight with strides {weight.stride()}"
    if refusal is None and marks is not None and bias is not None:
        refusal = "it marks infinities of products without a bias only"
    if refusal is not None:
        raise ValueError(f"Hopper linear kernel: {refusal}")
    if marks is not None:
        check_mark(marks, mark, x, "stof::hopper_linear_marked")
    rows = prod(x.shape[:-1])
    out = x.new_empty((*x.shape[:-1], n))
    if out.numel() == 0:
        return out
    flat = _for_tma(x.reshape(rows, k))
    added = None if residual is None else _for_tma(residual.reshape(rows, n))
    weight_kn = weight.stride(1) != 1
    held = _for_tma(weight.t() if weight_kn else weight)
    biases = bias
    if bias is not None and (bias.data_ptr() % 16 or not bias.is_contiguous()):
        biases = bias.clone(memory_format=torch.contiguous_format)
    operands = flat, held, biases, added
    with on_device(x):
        word = None if marks is None else marks.narrow(0, mark, 1)
        repeat = _launch(*operands, out.view(rows, n), activation, chosen, weight_kn, word)
    given = x, weight, bias, residual
    copied = any(
        a.data_ptr() != b.data_ptr()
        for a, b in zip(given, operands, strict=True)
        if a is not None and b is not None
    )
    if repeat is not None and not copied:
        remember(_known, asked, _Known(repeat, out.shape))
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str,
    config: HopperLinearConfig,
    weight_kn: bool,
    word: Tensor | None,
) -> Repeat | None:
    from .hopper_linear_kernel import hopper_linear_kernel, hopper_linear_marking_kernel

    (rows, k), n = x.shape, out.shape[1]
    block_m, block_n, stages, group_m = config
    tiles, vector = _layouts()
    weight_block = (BLOCK_K, block_n) if weight_kn else (block_n, BLOCK_K)
    half = (block_m, block_n // 2)  # a tile is finished by halves
    biases = out if bias is None else bias
    added = out if residual is None else residual
    operands = [
        Descriptor(x, x.shape, x.stride(), (block_m, BLOCK_K), tiles),
        Descriptor(weight, weight.shape, weight.stride(), weight_block, tiles),
        Descriptor(biases, (1, n), (n, 1), (1, half[1]), vector),
        Descriptor(added, (rows, n), added.stride(), half, tiles),
        Descriptor(out, (rows, n), (n, 1), half, tiles),
    ]
    tiles_m, tiles_n = -(-rows // block_m), -(-n // block_n)
    workers = torch.cuda.get_device_properties(x.device).multi_processor_count
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": BLOCK_K,
        "STAGES": stages,
        "ACTIVATION": activation,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "WEIGHT_KN": weight_kn,
        "REGISTERS": CONSUMER_REGISTERS,
    }
    kernel, others = hopper_linear_kernel, []
    if word is not None:
        kernel, others = hopper_linear_marking_kernel, [word]
        del operands[2], constants["HAS_BIAS"]
    return launch(
        kernel,
        min(workers, tiles_m * tiles_n),
        [*operands, *others, tiles_m, tiles_n, group_m, -(-k // BLOCK_K)],
        constants,
        {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True},
    )


@cache
def _layouts() -> tuple[Any, Any]:
    """Shared-memory layouts of a tile and of a bias."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(0, 16, rank=2)


def _for_tma(tensor: Tensor) -> Tensor:
    """The matrix, or a copy of it if TMA cannot address it: 16-byte rows and address."""
    suits = (
        tensor.stride(1) == 1
        and tensor.stride(0) % 8 == 0
        and tensor.stride(0) > 0
        and tensor.data_ptr() % 16 == 0
    )
    return tensor if suits else tensor.clone(memory_format=torch.contiguous_format)
