"""The real SmolLM2-135M, one of its layers low-rank, in transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import thinrank.integrations.transformers  # noqa: F401 (registers)
from thinrank import LLM, compress, convert


@pytest.mark.slow
def test_logits_are_the_references(smollm2_gguf, tmp_path):
    """To 1e-4, with logits of about 30."""
    convert(smollm2_gguf, tmp_path / "dense", progress=False)
    layer = {"modules": "model.layers.3.*", "keep_ratio": 0.8}
    compress(tmp_path / "dense", tmp_path / "model", method="svd", device="cpu", progress=False, **layer)
    llm = LLM(tmp_path / "model", device="cpu", dtype="float32")
    token_ids = llm.tokenizer.encode("A list and a tuple are two data types. " * 12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits, llm.logits(token_ids), atol=1e-4, rtol=0)
