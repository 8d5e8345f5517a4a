"""What a graph changes besides giving its result."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

from stof_compile.between import has_effects


def effects_of(fn, *args, **kwargs):
    """Whether each graph that Dynamo captures has effects; nothing is run by a compiler."""
    found = []

    def record(gm, inputs):
        found.append(has_effects(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=record)(*args, **kwargs)
    return found


def small(config, **sizes):
    return config(vocab_size=64, bos_token_id=0, eos_token_id=1, pad_token_id=0, **sizes)


WIDTHS = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
LANGUAGE = {
    "bert": lambda: BertModel(small(BertConfig, **WIDTHS)),
    "gpt2": lambda: GPT2Model(small(GPT2Config, n_embd=32, n_layer=1, n_head=2)),
    "llama": lambda: LlamaModel(small(LlamaConfig, num_key_value_heads=1, **WIDTHS)),
    "t5": lambda: T5EncoderModel(
        small(T5Config, d_model=32, num_layers=1, num_heads=2, d_ff=64, d_kv=16)
    ),
}


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("padded", [False, True])
def test_language_models_change_nothing(fresh_dynamo, name, padded):
    kwargs = {} if name in ("bert", "t5") else {"use_cache": False}
    if padded:
        kwargs["attention_mask"] = torch.tensor([[0] * 3 + [1] * 13, [1] * 16])
    tokens = torch.randint(0, 64, (2, 16))
    assert effects_of(LANGUAGE[name]().eval(), tokens, **kwargs) == [False]


def test_a_vision_model_changes_nothing(fresh_dynamo):
    model = ViTModel(ViTConfig(image_size=16, patch_size=8, **WIDTHS)).eval()
    assert effects_of(model, torch.randn(1, 3, 16, 16)) == [False]


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


X, TABLE = torch.randn(4, 3), torch.randn(9, 3)
ROWS = torch.tensor([1, 2])
EFFECTS = {
    "running statistics": (nn.BatchNorm1d(3).train(), X),
    "rows scaled in place": (lambda i, t: F.embedding(i, t, max_norm=1.0), ROWS, TABLE),
    "rows scaled in place, by position": (
        lambda i, t: F.embedding(i, t, None, 1.0),
        ROWS,
        TABLE,
    ),
    "an input": (lambda x: x.view(-1).relu_() + 1, X),
    "a cache": (lambda cache, x: cache.index_copy_(0, ROWS, x), TABLE, X[:2]),
    "out=": (lambda x, out: torch.mul(x, 2, out=out), X, torch.empty(4, 3)),
    "a buffer": (Counter(), X),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_what_outlives_the_call_is_an_effect(fresh_dynamo, name):
    fn, *args = EFFECTS[name]
    assert effects_of(fn, *(a.clone() for a in args)) == [True]


def test_what_a_graph_writes_to_its_own_memory_is_none(fresh_dynamo):
    def own(x):
        y = torch.zeros_like(x)
        y[0] = 1.0
        return F.relu(x * 2, inplace=True).add_(y)

    assert effects_of(own, X) == [False]
