"""Tiny random models, and the ways in which compressors take them apart. Shared by the tests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from thinrank.model.registry import parse_config

Tensors = dict[str, torch.Tensor]


def tiny_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of a model with two layers and odd sizes."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return {
        "architectures": [f"{names.get(model_type, 'Other')}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """All tensors of the dense model, float32, drawn so that activations stay of order one."""
    generator = torch.Generator().manual_seed(seed)
    parsed = parse_config(config)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {
        name: draw(*shape, scale=1.0) if "embed" in name else 1 + draw(*shape, scale=0.1)
        for name, shape in parsed.other_tensors().items()
    }
    for module, shape in parsed.linears().items():
        tensors[f"{module}.weight"] = draw(
            shape.out_features, shape.in_features, scale=shape.in_features**-0.5
        )
        if shape.bias:
            tensors[f"{module}.bias"] = draw(shape.out_features, scale=0.2)
    return tensors


def low_rank(
    tensors: Tensors, ranks: dict[str, int]
) -> tuple[Tensors, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Give some modules a product as weight; returns the dense tensors and (factor_in, factor_out)."""
    dense, factors = dict(tensors), {}
    for number, (module, rank) in enumerate(ranks.items()):
        out_features, in_features = tensors[f"{module}.weight"].shape
        generator = torch.Generator().manual_seed(1000 + number)
        factor_in = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        factor_out = torch.randn(out_features, rank, generator=generator) * rank**-0.5
        factors[module] = factor_in, factor_out
        dense[f"{module}.weight"] = factor_out @ factor_in
    return dense, factors


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A Hugging Face folder with config.json and model.safetensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def transformers_logits(config: dict[str, Any], tensors: Tensors, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [sequences, tokens, vocab]: the same dense model in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **settings), attn_implementation="eager"
    ).float()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and all("rotary" in name or name == "lm_head.weight" for name in missing)
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(token_ids).logits
    return logits
