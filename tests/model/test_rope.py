"""Frequencies and angles equal Hugging Face's to the last bit, and stay right at far positions."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from thinrank.model.registry import parse_config
from thinrank.model.rope import RotaryEmbedding
from tiny_hf_models import CONFIGS


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("llama")])
def test_rotation_equals_hugging_face(name: str) -> None:
    theirs = LlamaRotaryEmbedding(CONFIGS[name])
    config = parse_config(CONFIGS[name].to_dict())
    ours = RotaryEmbedding.build(config.rope, config.head_dim, torch.device("cpu"))
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling)
    positions = torch.tensor([0, 1, 63, 64, 1000, 131071])
    cos, sin = theirs(torch.empty(1), positions.unsqueeze(0))
    half = config.head_dim // 2
    for ours_, theirs_ in zip(ours.rotation(positions), (cos, sin), strict=True):
        torch.testing.assert_close(ours_, theirs_[0, :, :half], atol=1e-6, rtol=0)


def test_nothing_is_sized_by_the_longest_context() -> None:
    config = parse_config({**CONFIGS["llama-gqa"].to_dict(), "max_position_embeddings": 2**28})
    rope = RotaryEmbedding.build(config.rope, config.head_dim, torch.device("cpu"))
    assert rope.inv_freq.numel() == config.head_dim // 2
