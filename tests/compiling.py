"""Compile a Triton kernel for a GPU that is not here and read what it needs there."""

import contextlib
import io
import re
from typing import Any, NamedTuple

import pytest
import torch
import triton
from stof_compile.kernels import attention_blockwise, blockwise_kernel, limits
from stof_compile.kernels.problem import band_flags, next_power_of_two, score_constants
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

POINTERS = {
    "lse": "*fp32",
    "q_scale": "*fp32",
    "k_scale": "*fp32",
    "v_scale": "*fp32",
    "partial": "*fp32",
    "partial_stats": "*fp32",
    "key_keep": "*i1",
    "bitmap": "*i64",
    "plane_map": "*i32",
    "row_ptr": "*i32",
    "full_start": "*i32",
    "col_idx": "*i32",
    "bitmap_id": "*i32",
    "row_order": "*i32",
    "pack_ptr": "*i32",
    "pack_columns": "*i32",
    "pack_id": "*i32",
    "pack_bitmap": "*i64",
    "queue": "*i32",
    "sides": "*i32",
    "stats": "*fp32",
    "inverse": "*fp32",
    "grad_lse": "*fp32",
    "key_ptr": "*i32",
    "key_tiles": "*i32",
}
GFX942 = "gfx942"
E4M3 = torch.float8_e4m3fn
NAMES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", E4M3: "fp8e4nv",
}  # fmt: skip


def attention_constants(
    head_dim: int, block_q: int, block_k: int, **changes: Any
) -> dict[str, Any]:
    """Constants that the attention kernels share, of a problem with nothing but a mask."""
    width = next_power_of_two(head_dim)
    return {
        **score_constants(head_dim**-0.5, 0.0, changes.get("HAS_BIAS", False)),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": head_dim,
        "BLOCK_M": block_q,
        "BLOCK_N": block_k,
        "BLOCK_D": width,
        "BLOCK_DV": width,
        "GROUP": 1,
        "VEC": 8,
        "PRECISION": "ieee",
        "HAS_PADDING": False,
        "HAS_BIAS": False,
        "RETURN_LSE": False,
        "SINGLE_PLANE": True,
        "HEADS_FAST": False,
        **band_flags([]),
        **changes,
    }


class Needs(NamedTuple):
    """Resources of one compiled kernel."""

    shared_bytes: int
    registers: int
    spill_bytes: int


def compile_source(source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
    """Compile as Triton does; ``report`` of the result is what the assembler said.

    It is empty where the kernel was in Triton's cache.
    """
    said = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    compiled.report = said.getvalue()
    return compiled


def with_defaults(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """The constants of a kernel, those that have a default and are not given included."""
    held = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
    return held | constants


def signature_of(
    kernel: Any, dtype: str, constants: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """Types of the arguments, and which are multiples of 16: pointers and strides."""
    signature = {name: _type(name, dtype, constants) for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride")
    }
    return signature, attributes


def compile_kernel(
    kernel: Any,
    target: int | str,
    dtype: str,
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    registers: int = 0,
) -> Any:
    """Compile for an sm number or "gfx942"; every integer argument is a 16-byte multiple.

    Args:
        registers: of a thread at most, 0: as many as the compiler wants.
    """
    constants = with_defaults(kernel, constants)
    signature, attributes = signature_of(kernel, dtype, constants)
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    gpu = GPUTarget("hip", target, 64) if target == GFX942 else GPUTarget("cuda", target, 32)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile_source(source, gpu, options | ({"maxnreg": registers} if registers else {}))


def compile_gluon(
    kernel: Any, target: int, descriptors: dict[str, str], constants: dict[str, Any], maxnreg: int
) -> Any:
    """Compile a Gluon kernel of four consumer warps for an sm number.

    Args:
        descriptors: type of each TMA descriptor argument, ``tensordesc<...>``.
        maxnreg: registers of a thread at the start. dtype: Triton's name of that of the matrices.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {
        name: descriptors.get(name) or POINTERS.get(name) or _type(name, "fp16", constants)
        for name in names
    }
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs={})
    options = {"num_warps": 4, "maxnreg": maxnreg}
    return compile_source(source, GPUTarget("cuda", target, 32), options)


def compile_descriptors(
    kernel: Any,
    target: int,
    blocks: dict[str, tuple[int, int, Any]],
    pointers: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    maxnreg: int,
    dtype: str = "fp16",
) -> Any:
    """Compile a Gluon kernel over matrices for an sm number.

    Args:
        blocks: (rows, columns, layout) of the block of each TMA descriptor argument.
        pointers: types of the pointer arguments; all others are i32.
        maxnreg: registers of a thread at the start.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "i32" for name in names}
    for name, (rows, columns, layout) in blocks.items():
        signature[name] = f"tensordesc<{dtype}[{rows},{columns}],{layout!r}>"
    signature |= pointers
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs={})
    options = {"num_warps": num_warps, "maxnreg": maxnreg}
    return compile_source(source, GPUTarget("cuda", target, 32), options)


def needs(compiled: Any, target: int | str) -> Needs:
    """Shared memory, registers and spilled bytes of a compiled kernel."""
    if target == GFX942:
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        spills = _number(r"\.vgpr_spill_count:\s+(\d+)", text) * 4
    else:
        text = assembler_report(compiled, int(target))
        registers = _number(r"Used (\d+) registers", text)
        spills = _number(r"(\d+) bytes spill stores", text)
    return Needs(compiled.metadata.shared, registers, spills)


def assembler_report(compiled: Any, target: int) -> str:
    """What the assembler said of a compiled kernel, or says now if that was in Triton's cache."""
    said = compiled.report
    return said if "registers" in said else _assemble(compiled, target)


def _type(name: str, dtype: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in ("out", "bias") and dtype == NAMES[E4M3]:  # of the model's type
        return "*fp16"
    if name in ("q", "k", "v", "out", "bias", "grad", "dq", "dk", "dv"):
        return f"*{dtype}"
    return POINTERS.get(name, "i32")


def _assemble(compiled: Any, target: int) -> str:
    """What the assembler says about the kernel when Triton runs it, with the options of its own."""
    backend = make_backend(GPUTarget("cuda", target, 32))
    fields = compiled.metadata._asdict()
    if fields["num_warps"] & (fields["num_warps"] - 1):  # with the warps of its other partitions
        fields["num_warps"] = 4  # the assembler reads it from the code
    options = backend.parse_options(fields)
    report = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(report):
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(compiled.asm["ptx"], {}, options, target)
    return report.getvalue()


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} not in the compiler's report"
    return int(found.group(1))


# -- the block-wise kernel ------------------------------------------------------------------------


def compile_block(target, head_dim, dtype, config, value_dim=None, **changes):
    changes = {"EVEN_Q": True, "EVEN_K": True, "HEAVY_FIRST": bool(config.heavy_first), **changes}
    values = attention_constants(head_dim, config.block_q, config.block_k, **changes)
    values |= {"LOOPS": config.loops, "PREFETCH": bool(config.prefetch)}
    lazy = config.registers > 0 and 32 < head_dim <= 64  # as the launcher has it
    values |= {"REGISTERS": config.registers, "LAZY": lazy}
    values["PRECISION"] = limits.PRECISIONS[config.tf32]
    capability = (9, 4) if target == GFX942 else divmod(target, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4" if target == GFX942 else None)
        width, tail = limits.product_widths(head_dim, capability, dtype.itemsize)
        of_values = value_dim or head_dim, capability, dtype.itemsize
        value_width, value_tail = limits.product_widths(*of_values)
    values |= {"BLOCK_D": width, "TAIL_D": tail, "VALUE_DIM": value_dim or head_dim}
    values |= {"BLOCK_DV": value_width, "TAIL_DV": value_tail}
    if dtype == E4M3:
        values |= {"FP8": True, "VEC": 16, "BLOCK_D": max(32, width)}
    compiled = compile_kernel(
        blockwise_kernel.attention_block_kernel, target, NAMES[dtype], values,
        config.num_warps, config.num_stages, config.registers,
    )  # fmt: skip
    return compiled, needs(compiled, target)


def assert_fits(found, target):
    limit = 65536 if target == GFX942 else limits.shared_memory_limit(divmod(target, 10))
    assert found.shared_bytes <= limit
    assert found.spill_bytes == 0, f"{found.spill_bytes} bytes spilled"


def offered_on(target, head_dim, dtype, module=attention_blockwise, **facts):
    """What a kernel offers on a target, without heads_fast, which changes no code.

    A build of torch for ROCm reports gfx942 as capability 9.4.
    """
    with pytest.MonkeyPatch.context() as patch:
        if target == GFX942:
            patch.setattr(torch.version, "hip", "6.4")
        capability = (9, 4) if target == GFX942 else divmod(target, 10)
        found = module.configs(head_dim, dtype, capability, **facts)
    return list(dict.fromkeys(config._replace(heads_fast=0) for config in found))
