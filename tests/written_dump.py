"""The record of a GPU dump, written by hand: layers, fused operators, moves, a picture."""

from dataclasses import replace
from functools import cache

from stof_compile import masks
from stof_compile.dump import Record, SiteRecord, versions
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.plan import (
    AttentionPlan,
    Candidate,
    ChainPlan,
    MovePlan,
    PackPlan,
    SegmentPlan,
)

HOSTILE = "<script>alert('x')</script>\"&"
LAYERS = 3


def source(line, code):
    return f"        # File: /home/me/model.py:{line} in forward, code: {code}\n"


def graph_texts(layers=LAYERS):
    """The captured and the rewritten graph of a small encoder."""
    head = (
        "class GraphModule(torch.nn.Module):\n"
        '    def forward(self, L_x_: "f16[4, 8]", L_w_: "f16[8, 8]"):\n'
        "        l_x_ = L_x_\n        l_w_ = L_w_\n" + source(3, "mask = arange(4) >= 0")
    )
    before = (
        head + '        arange: "i64[4]" = torch.arange(4)\n        mask: "b8[4]" = arange >= 0\n'
    )
    after, x = head, "l_x_"
    y = "l_x_"
    for i in range(layers):
        lines = (
            source(10, "q = self.q(x)")
            + f'        q_{i}: "f16[4, 8]" = torch._C._nn.linear(@X, l_w_, None)\n'
            + f'        view_{i}: "f16[1, 4, 8]" = q_{i}.view(1, 4, 8);  q_{i} = None\n'
        )
        attention = source(11, "a = sdpa(q, q, q, mask)")
        out = source(12, "x = self.norm(x + a)")
        before += (
            lines.replace("@X", x)
            + attention
            + f'        a_{i}: "f16[1, 4, 8]" = torch._C._nn.scaled_dot_product_attention('
            f"view_{i}, view_{i}, view_{i}, attn_mask = mask)\n"
            + out
            + f'        sum_{i}: "f16[1, 4, 8]" = {x} + a_{i};  {x} = a_{i} = None\n'
            + f'        norm_{i}: "f16[1, 4, 8]" = torch.nn.functional.layer_norm(sum_{i}, (8,))\n'
        )
        after += (
            lines.replace("@X", y)
            + attention
            + f"        attention_block_{i} = torch.ops.stof.attention_block.default(view_{i}, "
            f"view_{i}, view_{i}, [64, 64])\n"
            + f'        getitem_{i}: "f16[1, 4, 8]" = attention_block_{i}[0]\n'
            + out
            + f'        fused_norm_{i}: "f16[1, 4, 8]" = torch.ops.stof.fused_norm.default('
            f"{y}, None, getitem_{i}, 'layer_norm', 1e-12, [2, 4])\n"
            + f'        reshape_{i}: "f16[1, 4, 8]" = fused_norm_{i}.reshape((1, 4, 8))\n'
        )
        x, y = f"norm_{i}", f"reshape_{i}"
    before += f"        return ({x},)\n"
    after += f"        return ({y},)\n"
    return before, after


@cache
def bigbird():
    return build_block_mask(masks.bigbird(window=32, global_tokens=32, random_fill=0.1), 512, 512)


def make_record(layers=LAYERS) -> Record:
    before, after = graph_texts(layers)
    mask = bigbird()
    choice = AttentionPlan(
        "block", (64, 64, 4, 2), "measured", "fastest of 3 measured",
        (
            Candidate("block", (64, 64, 4, 2), "measured", 10.0, 9.5, 11.0, 1e-4),
            Candidate("sdpa", (), "measured", 30.0, 29.0, 31.0, 1e-4),
            Candidate("row", (), "refused", reason=f"more than 32 keys {HOSTILE}"),
        ),
    )  # fmt: skip
    shape = {"batch": 2, "q_heads": 8, "kv_heads": 8, "q_len": 512, "k_len": 512, "head_dim": 64}
    site = SiteRecord(
        "", "sdpa", "rewritten", "block", "/home/me/model.py:11 in forward",
        {**shape, "dtype": "float16"}, f"bigbird(window=32) {HOSTILE}", mask.statistics(), choice,
        picture="mask_0",
    )  # fmt: skip
    sites = [replace(site, name=f"encoder.layer.{i}") for i in range(layers)]
    kept = SiteRecord(
        f"head.{HOSTILE}", "softmax", "kept", "softmax", notes=["its output has another user"]
    )
    chain = ChainPlan(
        ("linear", "attention", "residual_add", "layer_norm"), "4", "5",
        (
            SegmentPlan(0, 1, "inductor", (), 12.0, 12.0, 2 * 10**9, 10**6),
            SegmentPlan(1, 2, "inductor"),
            SegmentPlan(
                2, 4, "triton_norm", (("num_warps", 2), ("rows", 4)), 4.0, 8.0, 10**5, 4 * 10**6,
                (("triton_norm num_warps=2, rows=4", 4.0), ("triton_norm rows=8", None)), 9,
            ),
        ),
        "measured", layers, 90.0, 60.0, "initial scheme 5, 90.0 us against 60.0 us",
        moves=(
            MovePlan("expand", "5", "4", 20.0, 16.0, "kept"),
            MovePlan("expand", "4", "3", 16.0, 21.0, "rolled back"),
            MovePlan("seize", "4", "0", None, None, "illegal", f"no {HOSTILE} template"),
        ),
        moves_left_out=7,
    )  # fmt: skip
    record = Record(
        versions=versions(),
        device={"kind": "cuda", "name": "Some GPU"},
        options={"mask": "bigbird(window=32)", "dump_dir": "somewhere"},
        sites=[*sites, kept],
        graphs={"captured": before, "normalized": before, "rewritten": after},
        timings_s={"stof": 1.25},
        chains=[chain],
        packs=[PackPlan(False, (8, 8, 8), "measured", 9.0, 9.5, "9.0 us apart", layers)],
        notes=[
            "whole graph: fused 100.0 us, as torch.compile runs it 150.0 us; kept: fused (store)"
        ],
        masked=["layer.0"],
        pictures={"mask_0": mask.tile_map},
    )
    record.add_fallback(f"head.{HOSTILE}", "its output has another user")
    record.add_near_miss("pool", "softmax_3", f"no matmul {HOSTILE}")
    return record
