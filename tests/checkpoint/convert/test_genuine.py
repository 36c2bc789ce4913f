"""Checkpoints written by the public compressors, and the logits that their own code computes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from conftest import CHECKPOINTS
from thinrank import LLM, convert

#: What each one must be recognised as; folder names are irrelevant to the converter.
FAMILIES = {
    "asvd-mha-80": "asvd",
    "base-llama-gqa": "hf-dense",
    "base-llama-mha": "hf-dense",
    "basis_sharing-share2-20": "basis-sharing",
    "dobisvd-noremap-0.6": "dobi-svd",
    "dobisvd-remap-0.6": "dobi-svd",
    "lowrankarena-ablinear-svdllm-whitening-0.8": "lowrank-arena",
    "svdllm_v1-mistral-gqa-whitening_only-0.8": "svd-llm",
    "svdllm_v1-whitening_only-0.8": "svd-llm",
    "svdllm_v2-hetero-0.6": "svd-llm",
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_agree_with_the_public_code(name, checkpoints, converted):
    """To 1e-4 with logits of about 12: float32 rounding, summed in another order."""
    expected = load_file(checkpoints / name / "expected.safetensors")
    logits = LLM(converted(name), device="cpu", dtype="float32").logits(expected["input_ids"])
    # Dobi-SVD's own logits carry RoPE tables that were rounded to float16.
    reference = expected.get("logits_exact_rope", expected["logits"])
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_family_is_recognised_by_content(name, checkpoints, tmp_path):
    disguised = tmp_path / "a-dense-opt-dobi-gptq-model"
    disguised.symlink_to(checkpoints / name)
    report = convert(disguised, tmp_path / "out", progress=False)
    assert report.family == FAMILIES[name]
    assert report.sha256 and report.parameters <= report.dense_parameters


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_ranks_match_the_public_model(name, checkpoints, converted):
    about = json.loads((checkpoints / name / "ABOUT.json").read_text())
    config = json.loads((converted(name) / "config.json").read_text())
    modules = config.get("quantization_config", {}).get("modules", {})
    expected = about.get("ranks_factored_in_loaded_model")
    if expected is not None:
        assert {module: entry["rank"] for module, entry in modules.items()} == expected


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_text_is_tokenised_as_by_the_base(name, checkpoints, converted):
    from thinrank.text import Tokenizer

    text = "The quick brown fox: é, 世界, 12345."
    base = Tokenizer(checkpoints / "base-llama-mha")
    assert Tokenizer(converted(name)).encode(text) == base.encode(text)


def test_shared_bases_are_stored_once(converted):
    folder = converted("basis_sharing-share2-20")
    tied = json.loads((folder / "config.json").read_text())["quantization_config"]["tied_factors"]
    assert len(tied) == 10  # q, k, v, gate, up of layers 1 and 3
    assert not set(tied) & set(load_file(folder / "model.safetensors"))


def test_padding_token_outside_the_vocabulary_is_dropped(converted):
    config = json.loads((converted("basis_sharing-share2-20") / "tokenizer_config.json").read_text())
    assert "pad_token" not in config
