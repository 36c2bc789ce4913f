"""Perplexity against transformers on the same windows."""

import math

import pytest
import torch

from thinrank import LLM, ThinrankError
from thinrank.eval.perplexity import perplexity
from tiny_models import random_tensors, tiny_config, transformers_logits, write_folder
from tiny_tokenizers import save_byte_level

TEXT = "Honest numbers need a protocol: text, split, window, stride, and what is scored. " * 8


@pytest.fixture
def model(tmp_path):
    config = tiny_config(vocab_size=300)
    tensors = random_tensors(config)
    folder = save_byte_level(write_folder(tmp_path / "model", config, tensors))
    return LLM(folder, device="cpu"), config, tensors


@pytest.mark.parametrize("max_windows", [None, 2])
def test_agrees_with_transformers(model, max_windows):
    llm, config, tensors = model
    result = perplexity(llm, TEXT, window=32, max_windows=max_windows, progress=False)
    tokens = torch.tensor(llm.tokenizer.encode(TEXT, add_special_tokens=False))
    windows = tokens[: len(tokens) // 32 * 32].view(-1, 32)[:max_windows]
    logits = transformers_logits(config, tensors, windows)[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
    assert result.value == pytest.approx(math.exp(expected.item()), rel=1e-4)
    assert (result.windows, result.window, result.predictions) == (len(windows), 32, len(windows) * 31)


@pytest.mark.parametrize(
    ("window", "message"), [(10**6, "one window takes"), (300, "longer than the model's 256")]
)
def test_impossible_windows(model, window, message):
    with pytest.raises(ThinrankError, match=message):
        perplexity(model[0], TEXT * 10, window=window, progress=False)
