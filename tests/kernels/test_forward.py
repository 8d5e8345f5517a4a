"""Both forward kernels in Triton's interpreter, against the reference in fp64.

bf16 is left out: the interpreter multiplies bf16 tiles as integers. The GPU tests cover it.
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, Case, check, rule_of

from stof_compile import masks

pytestmark = pytest.mark.interpreter


BLOCK_CONFIGS = {
    "split": {},
    "one loop": {"loops": 4},
    "one loop, branch": {"loops": 5, "prefetch": 1},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_block(case):
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    check(attention_block_forward, BlockConfig(*case.block, 4, 2), case)


@pytest.mark.parametrize("how", BLOCK_CONFIGS.values(), ids=BLOCK_CONFIGS)
def test_block_loops_without_part_tiles(how):
    """There is no bitmap then that a loop over all tiles could read."""
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    case = Case(q_len=32, k_len=48, rule="dense")
    check(attention_block_forward, BlockConfig(*case.block, 4, 2, **how), case)


@pytest.mark.parametrize("how", BLOCK_CONFIGS.values(), ids=BLOCK_CONFIGS)
@pytest.mark.parametrize("rule", ["causal longformer", "random"])
def test_block_loops(rule, how):
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    case = Case(rule=rule, band=rule != "random", block=(16, 32))
    config = BlockConfig(16, 32, 4, 2, heads_fast=1, heavy_first=0)._replace(**how)
    check(attention_block_forward, config, case)


COMPUTED_CASES = {
    "sliding": Case(band=True),
    "longformer": Case(rule="longformer", band=True),
    "causal longformer": Case(rule="causal longformer", band=True),
    "causal, fewer keys": Case(q_len=40, k_len=21, q_offset=0, rule="causal", band=True),
    "causal, fewer queries": Case(q_len=21, k_len=90, rule="causal", band=True),
    "dense": Case(q_len=33, k_len=50, rule="dense", band=True),
    "wide heads": Case(rule="longformer", band=True, head_dim=152, value_dim=136),
    "groups": Case(rule="causal", heads=4, group=4, q_len=21, k_len=37, band=True),
    "decode": Case(q_len=1, heads=4, group=2, rule="sliding", band=True),
    "padding": Case(rule="longformer", batch=2, padding=True, band=True),
}


@pytest.mark.parametrize("loops", [6, 7])
@pytest.mark.parametrize("block", [(16, 16), (16, 32), (32, 16)])
@pytest.mark.parametrize("name", COMPUTED_CASES)
def test_block_tiles_computed_from_the_band(name, block, loops):
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    case = replace(COMPUTED_CASES[name], block=block)
    offset = case.k_len - case.q_len if case.q_offset is None else case.q_offset
    stored = masks.build_block_mask(
        rule_of(case), case.q_len, case.k_len, block, q_offset=offset, batch=case.batch
    )
    if not stored.is_band:
        pytest.skip("no band for this tile")
    check(attention_block_forward, BlockConfig(*block, 4, 2, loops), case)


@pytest.mark.parametrize(("rule", "loops"), [("sliding", 1), ("dense", 2)])
def test_block_of_one_kind_of_tile(rule, loops):
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    case = Case(q_len=48, k_len=48, rule=rule)
    check(attention_block_forward, BlockConfig(16, 16, 4, 2, loops), case)


ROW_CASES = (
    "sliding", "sliding band", "causal longformer bitmap", "random planes", "padding",
    "-inf bias", "lowest bias", "softcap", "odd head dims", "groups", "groups and planes",
    "decode", "packed", "half",
)  # fmt: skip


@pytest.mark.parametrize("name", ROW_CASES)
def test_row(name):
    from stof_compile.kernels.attention_rowwise import RowConfig, attention_row_forward

    case = CASES[name]
    short = replace(case, q_len=min(case.q_len, 9))
    if case.packed:
        short = replace(short, k_len=9)
    check(attention_row_forward, RowConfig(*case.block, 1, 2, 2), short)


def test_empty_batch_and_no_keys():
    from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward

    for batch, k_len in ((0, 16), (2, 0)):
        q, k = torch.randn(batch, 2, 5, 16), torch.randn(batch, 2, k_len, 16)
        stored = masks.build_block_mask(masks.dense(), 5, k_len, 16)
        out, lse = attention_block_forward(
            q, k, k, stored.tensors, None, None, 1.0, 0.0, 0, [], list(BlockConfig(16, 16)), True
        )
        assert torch.equal(out, torch.zeros(batch, 2, 5, 16))
        assert torch.isneginf(lse).all()
