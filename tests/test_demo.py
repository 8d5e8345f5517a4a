"""The demo, small: three rows of one function, compared with fp64, and a dump."""

import pytest
import torch
from rich.console import Console
from running import without_flex

from stof_compile.demo import DemoSettings, document, run_demo
from stof_compile.dump import read_dump

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_document_is_text_worth_reading():
    assert len(document()) > 1000


def test_small_demo(tmp_path):
    settings = DemoSettings(
        tokens=160, device="cpu", dump_dir=tmp_path / "dump", layers=2, budget_s=0.05
    )
    console = Console(width=120, record=True)
    with without_flex():
        result = run_demo(settings, console)
    assert [row.name.split(",")[0] for row in result.rows] == ["eager", "torch.compile", "STOF"]
    for row in result.rows:
        # a few layers, no more than the error of attention itself times ten
        assert row.error.rms_rel < 2e-5, row
        assert row.timing.median_us > 0
    assert len(result.explanation.sites) == 2
    assert len(read_dump(tmp_path / "dump")) == 1
    printed = console.export_text()
    for words in ("speed-up", "kernel per site", "encoder.layer.0", str(tmp_path)[:20]):
        assert words in printed


def test_local_model_with_its_own_tokenizer_and_limit(tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    from stof_compile.demo import _model_and_ids

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "mask", "is", "a", "of"]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(words) + "\n")
    BertTokenizerFast(str(vocabulary)).save_pretrained(tmp_path / "model")
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=64,
        max_position_embeddings=48,
    )
    BertModel(config).save_pretrained(tmp_path / "model")
    model, ids = _model_and_ids(DemoSettings(model_dir=tmp_path / "model"))
    assert ids.shape == (1, 48)
    assert ids[0, 0] == words.index("[CLS]")
    with torch.no_grad():
        assert model(input_ids=ids)[0].shape == (1, 48, 32)
