"""A model on a GPU that is not the current one: right results, and the current one stays so."""

import pytest
import torch
from close import assert_close
from models import hf_bert

from stof_compile import explain, masks, sparse_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("attention", ["block", "row", "auto"])
def test_model_on_the_second_gpu(attention, fresh_dynamo, tmp_path):
    model, inputs = hf_bert("sdpa", False)
    inputs = {name: value.to("cuda:1") for name, value in inputs.items()}
    model = model.to("cuda:1")
    rule = masks.sliding_window(4)
    options = {"mask": rule, "attention": attention, "cache_dir": str(tmp_path)}
    with torch.no_grad():
        fast = torch.compile(model, backend="stof", options=options)
        found = fast(**inputs).last_hidden_state
        length = inputs["input_ids"].shape[1]
        keep = rule.keep(0, 0, torch.arange(length)[:, None], torch.arange(length)[None, :])
        expected = model(
            **{**inputs, "attention_mask": keep.expand(len(found), 1, -1, -1).to("cuda:1")}
        ).last_hidden_state
    assert found.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert len(explain(fast).sites) == 2
    assert_close(found, expected.double(), torch.float32, scale=4.0)


def test_sparse_attention_on_the_second_gpu():
    q, k, v = torch.randn(3, 8, 12, 1500, 64, device="cuda:1", dtype=torch.float16)
    rule = masks.longformer(40, 20)  # on Hopper large enough for its own kernel
    out = sparse_attention(q, k, v, rule)
    i = torch.arange(1500, device="cuda:1")
    keep = rule.keep(0, 0, i[:, None], i[None, :])
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:1].double(), k[:1].double(), v[:1].double(), attn_mask=keep
    )
    assert torch.cuda.current_device() == 0
    assert_close(out[:1], expected, torch.float16)
