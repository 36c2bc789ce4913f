"""Tiny random models of every architecture, as Hugging Face runs them and as our decoder does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers import PreTrainedConfig as HFConfig

from thinrank.model.decoder import Decoder
from thinrank.model.registry import parse_config

VOCAB = 199

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def _config(kind: type[HFConfig], **settings: Any) -> HFConfig:
    return kind(**{**_SIZES, **settings})


def _rope(**settings: Any) -> HFConfig:
    return _config(LlamaConfig, rope_parameters={"rope_theta": 10000.0, **settings})


CONFIGS = {
    "llama-gqa": _config(LlamaConfig),
    "llama-mha-tied": _config(LlamaConfig, num_key_value_heads=4, tie_word_embeddings=True),
    "llama-head-dim": _config(LlamaConfig, head_dim=24, attention_bias=True, mlp_bias=True),
    "llama-linear": _rope(rope_type="linear", factor=4.0),
    "llama-llama3": _rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "llama-yarn": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
    "llama-yarn-mscale": _rope(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=64,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=1.0,
        mscale_all_dim=0.5,
        truncate=False,
    ),
    "llama-yarn-factor": _rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.3
    ),
    "mistral-window": _config(MistralConfig, sliding_window=37),
    "qwen2": _config(Qwen2Config),
    "qwen2-window": _config(Qwen2Config, use_sliding_window=True, sliding_window=37, max_window_layers=1),
    "qwen3": _config(Qwen3Config, head_dim=32, tie_word_embeddings=True),
}


def hf_model(config: HFConfig, seed: int = 0) -> Any:
    """A float32 model whose biases and norms are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = None
    return model


def decoder_of(model: Any) -> Decoder:
    """Our decoder with a Hugging Face model's weights."""
    return Decoder.build(parse_config(model.config.to_dict()), model.state_dict().__getitem__)


def low_rank_pair(config: HFConfig, ranks: dict[str, int], tied: dict[str, str]) -> tuple[Any, Decoder]:
    """A decoder of low-rank modules and the Hugging Face model whose weights are the products."""
    model = hf_model(config)
    ours = parse_config(config.to_dict(), ranks=ranks, tied_factors=tied)
    tensors: dict[str, Tensor] = dict(model.state_dict())
    shapes = ours.linears()
    for module, rank in ranks.items():
        out_features, in_features, has_bias = shapes[module]
        if f"{module}.factor_in.weight" not in tied:
            tensors[f"{module}.factor_in.weight"] = torch.randn(rank, in_features) / in_features**0.5
        tensors[f"{module}.factor_out.weight"] = torch.randn(out_features, rank) / rank**0.5
        if has_bias:
            tensors[f"{module}.factor_out.bias"] = tensors[f"{module}.bias"]
    with torch.no_grad():
        for module in ranks:
            name = f"{module}.factor_in.weight"
            factor_in = tensors[tied.get(name, name)]
            weight = model.get_submodule(module).weight
            weight.copy_(tensors[f"{module}.factor_out.weight"] @ factor_in)
            tensors[f"{module}.weight"] = torch.empty(0)  # the guard
    return model, Decoder.build(ours, tensors.__getitem__)


def random_ids(length: int, seed: int = 0) -> list[int]:
    """Token ids other than the special ones."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return ids
