"""Hugging Face models under the attention "stof", against their own eager attention."""

import subprocess
import sys

import pytest
import torch
from models_hugging_face import (
    hf_bert,
    hf_distilbert,
    hf_gemma2,
    hf_gpt2,
    hf_llama,
    hf_mistral,
    hf_t5,
    hf_vit,
)

import stof_compile
from stof_compile import StofMaskError, StofUnsupportedError, masks
from stof_compile.integrations import transformers as integration
from stof_compile.integrations.transformers import attend, set_mask

TOLERANCE = 5e-6
FAMILIES = {
    "bert": hf_bert,
    "distilbert": hf_distilbert,
    "gpt2": hf_gpt2,
    "llama": hf_llama,
    "mistral": hf_mistral,
    "gemma2": lambda implementation, padded: hf_gemma2(padded),
    "t5": hf_t5,
    "vit": lambda implementation, padded: hf_vit(implementation),
}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
IDS = torch.randint(2, 96, (2, 12), generator=torch.Generator().manual_seed(3))
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[0, :5] = 0


def causal_lm(name):
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        names = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
        config = transformers.GPT2Config(
            vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, **names
        )
        return transformers.GPT2LMHeadModel(config).eval()
    more = {
        "llama": {},
        "mistral": {"sliding_window": 8},
        "gemma2": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 16},
    }[name]
    prefix = name.capitalize()
    config = getattr(transformers, f"{prefix}Config")(**SMALL, **more)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def hidden(model, inputs):
    """Last hidden states of tokens that are no padding."""
    with torch.no_grad():
        out = model(**inputs)[0]
    keep = inputs.get("attention_mask")
    return out if keep is None or keep.shape != out.shape[:2] else out[keep.bool()]


def generated(model, **options):
    options = {"attention_mask": LEFT_PADDED, "max_new_tokens": 10, "do_sample": False} | options
    out = model.generate(IDS, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.stack(out.logits)


def close(out, wanted):
    torch.testing.assert_close(out, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_eager_attention(family, padded):
    model, inputs = FAMILIES[family]("eager", padded)
    wanted = hidden(model, inputs)
    model.set_attn_implementation("stof")
    assert model.config._attn_implementation == "stof"
    close(hidden(model, inputs), wanted)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2"])
def test_generates_the_same(family, padded, cache):
    """Mistral's and Gemma2's window of 8 is shorter than the 12 tokens of the prompt."""
    model = causal_lm(family)
    options = {"attention_mask": LEFT_PADDED if padded else None, "cache_implementation": cache}
    model.set_attn_implementation("eager")
    tokens, logits = generated(model, **options)
    model.set_attn_implementation("stof")
    tokens_of_stof, logits_of_stof = generated(model, **options)
    assert torch.equal(tokens_of_stof, tokens)
    close(logits_of_stof, logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_second_turn_with_a_cache(family, cache):
    """Several queries behind a cache: the offset is that of the cache."""
    from transformers import DynamicCache, StaticCache

    model = causal_lm(family)

    def second(implementation):
        model.set_attn_implementation(implementation)
        kept = {"config": model.config} | ({"max_cache_len": 32} if cache == "static" else {})
        past = (StaticCache if cache == "static" else DynamicCache)(**kept)
        with torch.no_grad():
            model(IDS[:, :7], past_key_values=past)
            return model(IDS[:, 7:], past_key_values=past).logits

    close(second("stof"), second("eager"))


@pytest.mark.parametrize(
    "spec",
    [
        masks.sliding_window(4, causal=True),
        masks.global_tokens(3) | masks.block_diagonal(5),
        masks.per_head([masks.dense(), masks.sliding_window(2)] * 2),
        lambda b, h, q, k: (q - k) % 3 != 1,
    ],
    ids=["window", "blocks", "per_head", "mask_mod"],
)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_set_mask_holds_while_decoding(family, spec):
    model = causal_lm(family)
    model.set_attn_implementation("stof")
    plain = generated(model)[1]
    set_mask(model, spec)
    whole = generated(model, use_cache=False)[1]
    assert (whole - plain).abs().max() > 1e-3
    close(generated(model)[1], whole)
    close(generated(model, cache_implementation="static")[1], whole)
    set_mask(model, None)
    close(generated(model)[1], plain)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_set_mask_equals_a_dense_mask(family, padded):
    model, inputs = FAMILIES[family]("eager", padded)
    spec = masks.longformer(6, 2)
    batch, length = inputs["input_ids"].shape
    keep = spec.keep(*(torch.zeros(1, dtype=torch.long),) * 2, *positions(length))
    keep = keep.expand(batch, 1, length, length).clone()
    if family == "llama":
        keep &= torch.ones(length, length, dtype=torch.bool).tril()
    if padded:
        keep &= inputs["attention_mask"].bool()[:, None, None, :]
    dense = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        wanted = model(inputs["input_ids"], attention_mask=dense)[0]
    model.set_attn_implementation("stof")
    with torch.no_grad():  # masks of four dimensions are honoured as well, bool and float
        for given in (keep, dense):
            out = model(inputs["input_ids"], attention_mask=given)[0]
            rows = keep[:, 0].any(-1)
            close(out[rows], wanted[rows])
    set_mask(model, spec)
    if padded:
        wanted = wanted[inputs["attention_mask"].bool()]
    close(hidden(model, inputs), wanted)


def positions(length):
    index = torch.arange(length)
    return index[:, None], index[None]


def with_rules(modules):
    """Names of the modules that `set_mask` gave a rule."""
    return [n for n, one in modules.items() if getattr(one, "_stof_mask", None) is not None]


def test_set_mask_by_path():
    model, inputs = hf_t5("stof", True)
    plain = hidden(model, inputs)
    far = masks.sliding_window(2)
    set_mask(model, {"encoder.block.1": far})
    attention = dict(model.named_modules())
    masked = with_rules(attention)
    assert masked == ["encoder.block.1.layer.0.SelfAttention"]
    assert (hidden(model, inputs) - plain).abs().max() > 1e-3
    set_mask(model, far)
    masked = with_rules(attention)
    assert len(masked) == 4 and not any("EncDec" in name for name in masked)
    set_mask(model, {"decoder.block.*.layer.1.EncDecAttention": far})
    masked = with_rules(attention)
    assert len(masked) == 2 and all("EncDec" in name for name in masked)
    set_mask(model, None)
    close(hidden(model, inputs), plain)


def test_packed_sequences():
    """Positions that begin anew say where a sequence begins; there is no mask for them to fit."""
    model, inputs = hf_llama("eager", False)
    length = inputs["input_ids"].shape[1]
    inputs["position_ids"] = torch.cat([torch.arange(9), torch.arange(length - 9)])[None]
    wanted = hidden(model, inputs)
    model.set_attn_implementation("stof")
    close(hidden(model, inputs), wanted)


def test_gradients():
    model, inputs = hf_llama("eager", True)
    for _ in range(2):
        model.zero_grad()
        out = model(**inputs)[0][inputs["attention_mask"].bool()]
        out.square().sum().backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        if model.config._attn_implementation == "eager":
            wanted = [one.clone() for one in grads]
            model.set_attn_implementation("stof")
    for one, ref in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, ref, atol=1e-4, rtol=1e-4)


def test_block_masks_are_shared_by_layers_and_calls(monkeypatch):
    from stof_compile.masks import mask_cache

    built = []
    build = mask_cache.build_block_mask
    monkeypatch.setattr(
        mask_cache, "build_block_mask", lambda *a, **k: (built.append(a[0]), build(*a, **k))[1]
    )
    mask_cache._recent.cache_clear()
    model, inputs = hf_llama("stof", True)
    set_mask(model, lambda b, h, q, k: (q - k) % 3 != 1)
    for _ in range(3):
        hidden(model, inputs)
    assert len(built) == 1


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "mistral", "gemma2", "t5"])
def test_no_graph_break(family, fresh_dynamo):
    model, inputs = FAMILIES[family]("eager", True)
    wanted = hidden(model, inputs)
    model.set_attn_implementation("stof")
    close(hidden(torch.compile(model, backend="eager", fullgraph=True), inputs), wanted)


def test_backend_sees_the_sites(fresh_dynamo, monkeypatch):
    monkeypatch.setattr("stof_compile.backend.compile_with_inductor", lambda gm, *_: gm.forward)
    model, inputs = hf_llama("stof", True)
    set_mask(model, {"layers.1": masks.sliding_window(4, causal=True)})
    wanted = hidden(model, inputs)
    fast = torch.compile(model, backend="stof", options={"tune_budget_s": 0})
    close(hidden(fast, inputs), wanted)
    sites = {site.name: site.mask for site in stof_compile.explain(fast).sites}
    assert sites == {
        "layers.0.self_attn": "causal() & padding",
        "layers.1.self_attn": "(causal() & sliding_window(4, causal=True)) & padding",
    }


def test_a_new_mask_is_a_new_graph(fresh_dynamo):
    model, inputs = hf_llama("stof", True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for mask in (None, masks.sliding_window(4), masks.sliding_window(2), None):
        set_mask(model, mask)
        close(hidden(compiled, inputs), hidden(model, inputs))


def test_compiled_without_a_mask_or_a_cache(fresh_dynamo):
    """transformers then cannot tell whether sequences are packed: the mask stays a tensor."""
    model, inputs = hf_mistral("stof", False)
    set_mask(model, {"layers.1": masks.global_tokens(4)})
    wanted = hidden(model, inputs)
    close(hidden(torch.compile(model, backend="eager", fullgraph=True), inputs), wanted)


def test_compiled_decoding(fresh_dynamo):
    model = causal_lm("llama")
    model.set_attn_implementation("stof")
    set_mask(model, masks.sliding_window(4, causal=True))
    wanted = generated(model, max_new_tokens=3)[1]
    model.forward = torch.compile(model.forward, backend="eager")
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 3, "cache_implementation": cache, "disable_compile": True}
        close(generated(model, **options)[1], wanted)


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_attentions": True}, "output_attentions=True.*eager"),
        ({"head_mask": torch.ones(2, 4)}, "head_mask=a Tensor"),
        ({"is_causal": True}, "is_causal=True.*config.is_causal"),
        ({"something": 1}, "BertSelfAttention of layer None: something=1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_refused(given, message):
    model, inputs = hf_bert("stof", False)
    with pytest.raises(StofUnsupportedError, match=message.replace("None", r"\w+")):
        hidden(model, inputs | given)


def test_dropout_is_refused():
    model, inputs = hf_bert("stof", False)
    with pytest.raises(StofUnsupportedError, match=r"dropout=0\.1.*eval\(\)"):
        hidden(model.train(), inputs)


def test_sinks_and_unknown_offsets_are_refused():
    from transformers import masking_utils

    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 6, 16)
    with pytest.raises(StofUnsupportedError, match="s_aux=a Tensor"):
        attend(torch.nn.Identity(), q, q, q, None, s_aux=torch.ones(2))
    with pytest.raises(StofUnsupportedError, match="unknown offset"):
        attend(torch.nn.Identity(), q, k, k, None)
    module = torch.nn.Identity()
    module.__dict__["_stof_mask"] = masks.causal()
    with pytest.raises(StofUnsupportedError, match="leaves the query offset open"):
        attend(module, q, k, k, torch.ones(1, 1, 4, 6, dtype=torch.bool))
    function = masking_utils.causal_mask_function
    mask = integration.layer_mask(1, 4, 8, q_offset=0, kv_offset=0, mask_function=function)
    with pytest.raises(StofUnsupportedError, match="mask of 4 x 8 with tokens"):
        attend(module, q, k, k, mask)


def test_set_mask_refuses():
    with pytest.raises(StofUnsupportedError, match=r"PreTrainedModel.*Linear"):
        set_mask(torch.nn.Linear(2, 2), masks.causal())
    model, _ = hf_bert("sdpa", False)
    with pytest.raises(StofUnsupportedError, match=r"set_attn_implementation\('stof'\) first"):
        set_mask(model, masks.causal())
    model.set_attn_implementation("stof")
    with pytest.raises(StofMaskError, match=r"'encoder.layer.7' matches no.*encoder\.layer\.1"):
        set_mask(model, {"encoder.layer.7": masks.causal()})
    with pytest.raises(StofMaskError, match="a mask is a rule"):
        set_mask(model, 3)


def test_models_with_attention_of_their_own_are_refused():
    from transformers import BloomConfig, BloomModel

    model = BloomModel(BloomConfig(vocab_size=96, hidden_size=64, n_layer=1, n_head=4))
    model.set_attn_implementation("stof")  # warns
    with pytest.raises(StofUnsupportedError, match="whose attention can be set, got BloomModel"):
        set_mask(model, masks.causal())


# -- registration ---------------------------------------------------------------------------------


def run(script):
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_import_is_lazy():
    run("import sys, stof_compile; assert not {'transformers', 'torch'} & set(sys.modules)")
    run(
        "import sys, torch\n"
        "from transformers import BertConfig, BertModel\n"
        "import stof_compile\n"
        "integration = 'stof_compile.integrations.transformers'\n"
        "assert integration not in sys.modules\n"
        "model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1,\n"
        "    num_attention_heads=2, intermediate_size=8, attn_implementation='stof')).eval()\n"
        "ids = torch.ones(1, 4, dtype=torch.long)\n"
        "torch.compile(model, backend='eager', fullgraph=True)(ids)\n"
        "assert integration in sys.modules\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n"
        "from stof_compile.integrations.transformers import attend\n"
        "assert ALL_ATTENTION_FUNCTIONS['stof'] is attend\n"
        "model(ids)\n"
    )
