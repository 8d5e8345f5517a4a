"""Gradients on Hopper GPUs: what their kernels compile to, what they read of a mask, when they are
chosen. Their results: test_hopper_gradients_protocol.py, test_hopper_gradients_gpu.py."""

import pytest
import torch
from hopper_gradients import BRAIN, HALF, hopper_gradients, launches, operands
from stof_compile.kernels.attention_blockwise import BlockConfig
from stof_compile.kernels.attention_hopper_backward import FORMS, hopper_gradient_refusal
from stof_compile.kernels.bound_launch import Descriptor
from stof_compile.kernels.limits import shared_memory_limit

from stof_compile import masks
from stof_compile.attention.call import gradient_arrays
from stof_compile.masks import bitmap
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.masks.fragments import both_ways, from_fragments, to_fragments
from stof_compile.ops_hopper_attention import gradient_fragments

pytest.importorskip("triton.experimental.gluon")

HOPPER = (9, 0)


def of_heads(heads, q_len, k_len):
    """Of every head its own, with part tiles."""
    draw = torch.Generator().manual_seed(3)
    return masks.from_tensor(torch.rand(1, heads, q_len, k_len, generator=draw) < 0.5)


# -- mask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 37])
def test_fragments_both_ways_are_of_the_tiles_and_of_these_transposed(count):
    tiles = torch.rand(count, 64, 64, generator=torch.Generator().manual_seed(11)) < 0.4
    words = bitmap.pack(tiles)
    found = both_ways(words)
    assert found.shape == (2, count, 128) and found.dtype == torch.int32 and found.is_contiguous()
    assert torch.equal(found[0], to_fragments(words))
    assert torch.equal(from_fragments(found[0], 64), words)
    assert torch.equal(from_fragments(found[1], 64), bitmap.pack(tiles.mT.contiguous()))


def test_more_tiles_than_are_unpacked_at_once(monkeypatch):
    from stof_compile.masks import fragments

    words = bitmap.pack(torch.rand(10, 64, 64) < 0.5)
    whole = both_ways(words)
    monkeypatch.setattr(fragments, "_CHUNK", 3)
    assert torch.equal(both_ways(words), whole)


def test_the_transposed_mask_holds_the_same_tiles_the_other_way():
    """By way of the lists: of each part tile of a column what the tile of the row has."""
    keep = of_heads(3, 150, 210)
    mask = build_block_mask(keep, 150, 210, 64, heads=3)
    turned = build_block_mask(masks.from_tensor(mask.to_dense().mT), 210, 150, 64, heads=3)
    key_ptr, key_tiles = mask.key_lists
    assert torch.equal(key_ptr[0], turned.row_ptr)
    assert torch.equal(key_ptr[1, :-1], turned.full_start)
    assert torch.equal(key_tiles[0], turned.col_idx)
    part = key_tiles[1] >= 0
    assert part.any() and torch.equal(part, turned.bitmap_id >= 0)
    assert torch.equal(
        mask.gradient_fragments[1][key_tiles[1][part].long()],
        turned.fragments[turned.bitmap_id[part].long()],
    )


def test_fragments_are_made_once_and_can_be_kept_for_gradients():
    with torch.inference_mode():
        mask = build_block_mask(masks.causal(), 128, 128, 64)
        made = mask.gradient_fragments
    assert made is mask.gradient_fragments and not made.is_inference()
    none = build_block_mask(masks.dense(), 128, 128, 64).gradient_fragments
    assert none.shape == (2, 0, 128) and none.dtype == torch.int32


# -- choice ---------------------------------------------------------------------------------------

FITS = {
    "head_dim": 64, "value_dim": 64, "dtype": HALF, "capability": HOPPER, "units": 4096,
    "plain": True, "tile": (64, 64), "grouped_planes": False,
}  # fmt: skip


@pytest.mark.parametrize("head_dim", range(40, 129, 8))
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_problems_that_are_taken(head_dim, dtype):
    facts = {"head_dim": head_dim, "value_dim": head_dim, "dtype": dtype}
    assert hopper_gradient_refusal(**FITS | facts) is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"tile": (64, 128)}, "64 x 64 elements, not 64 x 128"),
        ({"tile": (128, 64)}, "64 x 64 elements, not 128 x 64"),
        ({"tile": (32, 32)}, "64 x 64 elements, not 32 x 32"),
        ({"head_dim": 136, "value_dim": 136}, "to 128"),
        ({"grouped_planes": True}, "share their mask"),
        ({"capability": (8, 0)}, "needs a Hopper GPU"),
        ({"capability": (10, 0)}, "needs a Hopper GPU"),
        ({"dtype": torch.float32}, "fp16 and bf16"),
        ({"value_dim": 48}, "equal head dims"),
        ({"head_dim": 32, "value_dim": 32}, "40 to"),
        ({"head_dim": 44, "value_dim": 44}, "steps of 8"),
        ({"plain": False}, "no padding, bias or softcap"),
        ({"units": 2**31 - 2**20}, "units"),
        ({"units": 0}, "units"),
    ],
    ids=str,
)
def test_refusal_names_the_reason(facts, message):
    assert message in hopper_gradient_refusal(**FITS | facts)


@pytest.fixture
def hopper(monkeypatch):
    """A device that says it is a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    return torch.device("cuda")


def test_a_mask_gives_its_fragments_where_the_kernels_can_run(hopper, monkeypatch):
    causal = build_block_mask(masks.causal(), 130, 200, 64)
    planes = build_block_mask(of_heads(8, 130, 200), 130, 200, 64, heads=8)
    wide = build_block_mask(masks.causal(), 130, 200, (64, 128))

    def asked(mask, heads=8, kv_heads=8, dim=64, dtype=HALF, device=hopper, plain=True):
        shapes = (1, heads, 130, dim), (1, kv_heads, 200, dim)
        return gradient_fragments(mask, *shapes, dtype, device, plain)

    assert asked(causal) is causal.gradient_fragments
    assert asked(causal, kv_heads=2) is causal.gradient_fragments
    assert asked(planes) is planes.gradient_fragments
    assert asked(planes, kv_heads=2) is None
    assert asked(wide) is None
    assert asked(causal, plain=False) is None
    assert asked(causal, dim=136) is None
    assert asked(causal, dtype=torch.float32) is None
    assert asked(causal, heads=0) is None
    assert asked(causal, device=torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert asked(causal) is None


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_units_are_counted_by_rows_or_columns_whichever_are_more(rows, hopper):
    lengths = (6400, 64) if rows else (64, 6400)
    mask = build_block_mask(masks.dense(), *lengths, 64)
    batch = (2**31 - 2**20) // 800 + 1
    for count, expected in ((batch, None), (batch - 1, mask.gradient_fragments)):
        shapes = (count, 8, lengths[0], 64), (count, 8, lengths[1], 64)
        found = gradient_fragments(mask, *shapes, HALF, hopper, True)
        assert found is expected


@pytest.mark.parametrize("hopper_programs", [0, 3])
@pytest.mark.parametrize("rule", ["band", "tensor"])
def test_what_a_call_keeps(rule, hopper_programs):
    spec = masks.causal() if rule == "band" else of_heads(1, 130, 200)
    mask = build_block_mask(spec, 130, 200, 64)
    assert (mask.band is None) == (rule == "tensor")
    config = BlockConfig(hopper=hopper_programs)
    lists = {"key_ptr": mask.key_lists[0], "key_tiles": mask.key_lists[1]}
    # the order is that of the operator's last arguments
    both = gradient_arrays(mask, "block", config, mask.gradient_fragments)
    assert list(both) == ["key_ptr", "key_tiles", "bitmap", "gradient_fragments"]
    schema = torch.ops.stof.attention_block.default._schema.arguments
    assert [a.name for a in schema[-4:]] == [
        "key_ptr", "key_tiles", "plain_bitmap", "gradient_fragments",
    ]  # fmt: skip
    assert both["bitmap"] is None and both["gradient_fragments"] is mask.gradient_fragments
    for kernel in ("row", "gather"):
        assert gradient_arrays(mask, kernel, config, mask.gradient_fragments) == lists
    more = {"bitmap": mask.bitmap} if hopper_programs and rule == "tensor" else {}
    assert gradient_arrays(mask, "block", config, None) == lists | more


# -- code -----------------------------------------------------------------------------------------

FEATURES = {
    "part tiles": {"rule": masks.causal()},
    "full tiles": {"rule": masks.dense()},
    "groups": {"rule": masks.causal(), "group": 4, "grad_lse": True},
    "planes": {"rule": of_heads(8, 320, 256), "grad_lse": True},
}


def launched(monkeypatch, head_dim, dtype, rule, group=1, grad_lse=False):
    """The launches for a problem that fills a GPU of one multiprocessor."""
    found = []
    q, k, v, grad_out = operands(1, 8, 320, 256, head_dim, group, dtype)
    mask = build_block_mask(rule, 320, 256, 64, heads=8)
    with launches(monkeypatch, lambda *launch: found.append(launch)):
        of_lse = torch.zeros(1, 8, 320) if grad_lse else None
        hopper_gradients(q, k, v, grad_out, mask, of_lse)
    return found


def type_of(argument):
    """Triton's name of the type of an argument."""
    names = {HALF: "fp16", BRAIN: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    if isinstance(argument, Descriptor):
        shape = ", ".join(map(str, argument.block_shape))
        return f"tensordesc<{names[argument.base.dtype]}[{shape}],{argument.layout!r}>"
    return f"*{names[argument.dtype]}" if isinstance(argument, torch.Tensor) else "i32"


@pytest.mark.compile_only
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("head_dim", FORMS)
@pytest.mark.parametrize("number", [0, 1], ids=["query", "key"])
def test_compiles_without_spills(number, head_dim, features, dtype, monkeypatch):
    from compiling import assembler_report, compile_gluon, needs

    launch = launched(monkeypatch, head_dim, dtype, **FEATURES[features])[number]
    kernel, programs, arguments, constants, options = launch
    assert constants["HAS_PART"] == (features != "full tiles")
    assert constants["GROUP"] == (4 if features == "groups" else 1)
    assert constants["SINGLE_PLANE"] == (features != "planes")
    assert list(kernel.arg_names) == [*kernel.arg_names[: len(arguments)], *constants]
    assert options["num_warps"] == 4
    types = dict(zip(kernel.arg_names, map(type_of, arguments), strict=False))
    compiled = compile_gluon(kernel, 90, types, constants, options["maxnreg"])
    found = needs(compiled, 90)
    assert found.spill_bytes == 0
    assert found.registers * 256 * programs <= 65536
    # a multiprocessor has 228 KB; each program takes 1 KB more than it asks for
    assert (found.shared_bytes + 1024) * programs <= 228 * 1024
    assert found.shared_bytes <= shared_memory_limit(HOPPER)
    assert "C75" not in assembler_report(compiled, 90), "products wait for each other"
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text
    assert "setmaxnreg" in text
