"""The real SmolLM2-135M, 4-bit in a GGUF file, against transformers' own load of that file."""

import pytest
import torch

from thinrank import LLM, convert


@pytest.mark.slow
def test_logits_agree_with_transformers(smollm2_gguf, tmp_path):
    """To 1e-3 with logits of about 30; both dequantise to float32 and sum in different orders."""
    from transformers import AutoModelForCausalLM

    convert(smollm2_gguf, tmp_path / "model", progress=False)
    llm = LLM(tmp_path / "model", device="cpu")
    token_ids = llm.tokenizer.encode("A list and a tuple are two data types. " * 12)
    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(llm.logits(token_ids), expected, atol=1e-3, rtol=0)
    chat = llm.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat[0] == 1  # <|im_start|> is one token
