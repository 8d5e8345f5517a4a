"""The TileLang programs behind the calls of the templates."""

import tilelang.language as T
from stof_compile.kernels.tilelang_activation import ACTIVATIONS, activate
from stof_compile.kernels.tilelang_chain import ChainConfig, ChainProblem, chain_program
from stof_compile.kernels.tilelang_linear import LinearConfig, LinearProblem, linear_program
from stof_compile.kernels.tilelang_linear_norm import (
    NormConfig,
    NormProblem,
    linear_norm_program,
)
from stof_compile.templates.tilelang_rules import rows_of


def program_of(template, recipe, config, capability):
    """What the operator compiles for a call that a template builds, and whether as portable."""
    args = template.build(recipe, config).args
    values = tuple(int(value) for value in config.values())
    single = config["block_k"] >= recipe.operands[args[0].operand].shape[-1]
    rows, dtype, width = rows_of(recipe), recipe.result.dtype, recipe.result.shape[-1]
    depth = recipe.operands[args[0].operand].shape[-1]
    if template.name == "tilelang_linear":
        _, _, bias, residual, activation, kn, _, _ = args
        problem = LinearProblem(
            rows, width, depth, dtype, bias is not None, residual is not None, activation, kn
        )
        return linear_program(problem, LinearConfig(*values), capability), single
    if template.name == "tilelang_linear_norm":
        _, _, bias, residual, norm, scale, shift, eps, kn, _, _ = args
        problem = NormProblem(
            rows, width, depth, dtype, bias is not None, residual is not None, norm,
            scale is not None, shift is not None, eps, kn,
        )  # fmt: skip
        return linear_norm_program(problem, NormConfig(*values), capability), single
    _, w1, bias1, _, bias2, residual, activation, kn1, kn2, _, _ = args
    hidden = recipe.operands[w1.operand].shape[1 if kn1 else 0]
    problem = ChainProblem(
        rows, depth, hidden, width, dtype, bias1 is not None, bias2 is not None,
        residual is not None, activation, kn1, kn2,
    )  # fmt: skip
    return chain_program(problem, ChainConfig(*values), capability), True


def activation_program(length, dtype):
    """All activations of a vector, for the CPU: x [length] to out [activations, length]."""

    @T.prim_func
    def activations(
        x: T.Tensor((length,), "float32"),
        out: T.Tensor((len(ACTIVATIONS), length), "float32"),
    ):
        with T.Kernel(1, threads=1):
            for i in T.serial(length):
                for j, name in enumerate(ACTIVATIONS):
                    out[j, i] = activate(x[i], name, dtype)

    return activations
