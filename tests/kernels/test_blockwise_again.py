"""Block-wise attention by hand: a launch that has run is run again on other tensors."""

import pytest
import torch
from close import assert_close
from stof_compile.kernels import attention_blockwise, blockwise_again
from stof_compile.kernels.attention_blockwise import BlockConfig, attention_block_forward
from stof_compile.kernels.blockwise_again import attention_block_again
from stof_compile.kernels.reference import attention_reference
from torch._library.triton import is_wrap_triton_enabled

from stof_compile import masks, ops_by_hand, sparse_attention
from stof_compile.attention.call import honest_config, mask_arrays
from stof_compile.masks.block_mask import build_block_mask
from stof_compile.ops_by_hand import attend_without_gradient

HALF = torch.float16


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(blockwise_again, "_known", {})


def problem(
    length=100, rule=None, device="cpu", dtype=torch.float32, config=None, heads=2, k_len=None
):
    """Arguments of ``attention_block_again`` by name, and the block mask."""
    config = BlockConfig(32, 32, num_stages=2) if config is None else config
    rule = masks.longformer(9, 5) if rule is None else rule
    tile = config.block_q, config.block_k
    k_len = length if k_len is None else k_len
    mask = build_block_mask(rule, length, k_len, tile, heads=heads, device=device)
    config = list(honest_config(mask, config, 2 * heads))
    q = torch.randn(2, heads, length, 32, device=device, dtype=dtype)
    k, v = torch.randn(2, 2, heads, k_len, 32, device=device, dtype=dtype).unbind()
    given = {
        "q": q,
        "k": k,
        "v": v,
        "mask": list(mask_arrays(mask, config).values()),
        "key_keep": None,
        "bias": None,
        "scale": 0.2,
        "softcap": 0.0,
        "q_offset": 0,
        "band": [] if mask.band is None else mask.band.as_ints(),
        "config": config,
        "return_lse": False,
    }
    return given, mask


class Recorder:
    """A kernel that keeps the tensors it is launched with, and gives itself for the next launch."""

    here = True

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **named):
        assert not (named and is_wrap_triton_enabled())  # else it would be taken for a trace
        self.launches.append([a for a in arguments if isinstance(a, torch.Tensor)])
        return self


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(attention_blockwise, "launchable", lambda *_: found)
    return found


@pytest.mark.parametrize("features", ["plain", "key_keep and bias", "return_lse"])
def test_the_second_launch_has_the_tensors_of_the_first_in_their_places(recorder, features):
    given, _ = problem()
    if "key_keep" in features:
        given["key_keep"] = torch.ones(2, 100, dtype=torch.bool)
        given["bias"] = torch.randn(2, 1, 100, 100)
    given["return_lse"] = "return_lse" in features
    attention_block_again(**given)
    out, lse = attention_block_again(**given)
    first, second = recorder.launches
    written = 6, 7  # out, lse
    for place, (a, b) in enumerate(zip(first, second, strict=True)):
        if place in written:
            assert a.shape == b.shape and a.dtype == b.dtype
        else:
            assert a is b, place
    assert second[6].transpose(1, 2).data_ptr() == out.data_ptr() and second[7] is lse


def test_a_known_launch_has_results_of_the_same_shape(recorder):
    given, _ = problem()
    given |= {"v": torch.randn(2, 2, 100, 16), "return_lse": True}
    shapes = [[t.shape for t in attention_block_again(**given)] for _ in range(2)]
    assert shapes[0] == shapes[1] == [(2, 2, 100, 16), (2, 2, 100)]


def test_the_operator_hands_its_arguments_on(recorder, monkeypatch):
    given, _ = problem()
    seen = []
    monkeypatch.setattr(
        blockwise_again, "attention_block_again", lambda *given: seen.append(given) or given[:2]
    )
    flat = [given["q"], given["k"], given["v"], *given["mask"], *list(given.values())[4:]]
    ops_by_hand._attention_block_by_hand(*flat)
    ((q, k, v, mask, *rest),) = seen
    assert q is given["q"] and k is given["k"] and v is given["v"]
    assert all(a is b for a, b in zip(mask, given["mask"], strict=True))
    assert rest == list(given.values())[4:]


def test_what_differs_is_another_launch(recorder):
    given, _ = problem()
    attention_block_again(**given)
    assert len(blockwise_again._known) == 1

    def turned(tensor):
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    def shifted(tensor):  # by an address that is no multiple of 16
        return torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    keys = problem(100, masks.sliding_window(4), k_len=64)[0]
    planes = problem(100, masks.per_head([masks.causal(), masks.sliding_window(4)]))[0]["mask"]
    other = problem(100, masks.sliding_window(4))[0]["mask"]
    assert [a.shape for a in other] != [a.shape for a in given["mask"]]
    for change in (
        *({name: turned(given[name])} for name in "qkv"),
        *({name: shifted(given[name])} for name in "qkv"),
        {name: given[name].half() for name in "qkv"},
        {name: keys[name] for name in ("k", "v", "mask")},
        {"v": torch.randn(2, 2, 100, 16)},
        {"mask": planes},
        {"mask": other},
        {"scale": 0.3},
        {"softcap": 2.0},
        {"q_offset": 3},
        {"band": [-1, 1, 0, 0, 50]},
        {"return_lse": True},
        {"config": [*given["config"][:2], 8, *given["config"][3:]]},
        {"key_keep": torch.ones(2, 100, dtype=torch.bool)},
        {"bias": torch.zeros(1, 1, 1, 100)},
    ):
        before = len(blockwise_again._known)
        attention_block_again(**(given | change))
        assert len(blockwise_again._known) == before + 1, change
    attention_block_again(**given)
    assert len(blockwise_again._known) == before + 1


def test_on_another_device_the_launch_is_made_anew(recorder, monkeypatch):
    given, _ = problem()
    attention_block_again(**given)
    monkeypatch.setattr(Recorder, "here", False)
    checked = []
    monkeypatch.setattr(
        blockwise_again, "attention_block_forward", lambda *a, **how: checked.append(a)
    )
    attention_block_again(**given)
    assert len(checked) == 1


def test_by_hand_the_hopper_kernel_takes_no_more_than_a_mask():
    given, _ = problem()
    given["config"] = list(BlockConfig(hopper=2))
    for more in (
        {"key_keep": torch.ones(2, 100, dtype=torch.bool)},
        {"bias": torch.zeros(1, 1, 1, 100)},
        {"softcap": 3.0},
    ):
        with pytest.raises(ValueError, match="no padding, bias or softcap"):
            attend_without_gradient(**(given | more))


def test_what_is_copied_is_not_remembered(recorder):
    given, _ = problem()
    strided = torch.randn(2, 2, 32, 100).transpose(2, 3)  # the kernel wants unit strides
    attention_block_again(**(given | {"q": strided}))
    keep = torch.ones(100, 2, dtype=torch.bool).t()
    attention_block_again(**(given | {"key_keep": keep}))
    assert not blockwise_again._known


def test_arguments_are_checked_the_first_time(recorder):
    given, _ = problem()
    with pytest.raises(ValueError, match="k must be fp16"):
        attention_block_again(**(given | {"k": given["k"].double()}))
    assert not recorder.launches


RULES = {
    "longformer": masks.longformer(40, 20),
    "part tiles": masks.bigbird(window=24, global_tokens=17, random_fill=0.2),
    "long rows": masks.longformer(3, 120),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("features", ["plain", "padding", "bias", "lse", "offset"])
def test_gpu(rule, features):
    config = BlockConfig(64, 64, num_stages=2)
    given, mask = problem(700, RULES[rule], "cuda", HALF, config)
    if rule == "long rows":
        given["config"][10], given["config"][12] = 2, 3
    dense = mask.to_dense()
    for turn in range(4):
        q, k, v = torch.randn(3, 2, 2, 700, 40, device="cuda", dtype=HALF)[..., 8:].unbind()
        if features == "offset":  # aligned as before, and once not
            q = torch.randn(2, 2, 700, 33, device="cuda", dtype=HALF)[..., turn % 2 : 32 + turn % 2]
        change = {"q": q, "k": k, "v": v, "return_lse": features == "lse"}
        if features == "padding":
            change["key_keep"] = torch.rand(2, 700, device="cuda") < 0.8
        if features == "bias":
            change["bias"] = torch.randn(1, 2, 1, 700, device="cuda", dtype=HALF)
        poison = [torch.full((2, 700, 2, 32), float("nan"), device="cuda", dtype=HALF)] * 3
        del poison
        found = attention_block_again(**(given | change))
        keep, bias = change.get("key_keep"), change.get("bias")
        wide = [t.double() for t in (q, k, v)]
        wanted = attention_reference(
            *wide, dense, keep, None if bias is None else bias.double(), 0.2, 0.0, True
        )
        assert_close(found[0], wanted[0], HALF)
        if features == "lse":
            torch.testing.assert_close(found[1].double(), wanted[1], atol=1e-2, rtol=1e-2)
        checked = attention_block_forward(**(given | change))
        assert torch.equal(found[0], checked[0])
    assert len(blockwise_again._known) == (0 if rule == "long rows" else 1 + (features == "offset"))


@pytest.mark.gpu
def test_gpu_by_hand_in_a_cuda_graph():
    q, k, v = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=HALF).unbind()
    rule = masks.sliding_window(20)
    for _ in range(3):
        sparse_attention(q, k, v, rule)
    assert blockwise_again._known
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_attention(q, k, v, rule)
    dense = build_block_mask(rule, 300, 300, 64, device="cuda").to_dense()
    for _ in range(3):
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
        graph.replay()
        wanted = attention_reference(q.double(), k.double(), v.double(), dense, None, None, 0.125)
        assert_close(out, wanted, HALF)
