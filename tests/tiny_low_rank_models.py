"""Folders of tiny low-rank models in our format, each with something that a reader may get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from thinrank.model.registry import parse_config
from tiny_models import Tensors, low_rank, random_tensors, tiny_config, write_folder

#: Heads of 32, which every attention kernel takes.
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}

#: Names of projections as in config.json of a compressed model: all of them in both layers have this rank.
UNIFORM = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 24)


def every_layer(ranks: dict[str, int], layers: tuple[int, ...] = (0, 1)) -> dict[str, int]:
    """Ranks by full module names, from ranks by the names of projections."""
    return {
        f"model.layers.{layer}.{'mlp' if name in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{name}": rank
        for layer in layers
        for name, rank in ranks.items()
    }


def tied(*modules: str) -> dict[str, str]:
    """Ties the factor_in of these modules in layer 1 to those of layer 0."""
    return {
        f"model.layers.1.{module}.factor_in.weight": f"model.layers.0.{module}.factor_in.weight"
        for module in modules
    }


#: Name -> config, ranks, ties.
MODELS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, str]]] = {
    "mha": (tiny_config(**SIZES, num_key_value_heads=4), every_layer(UNIFORM), {}),
    "gqa": (tiny_config(**SIZES), every_layer(UNIFORM), {}),
    "heterogeneous": (
        tiny_config("qwen3", **SIZES, tie_word_embeddings=True),
        every_layer({"q_proj": 40, "k_proj": 7, "v_proj": 17, "o_proj": 33, "gate_proj": 8, "up_proj": 51})
        | every_layer({"q_proj": 1, "down_proj": 45}, layers=(1,)),
        {},
    ),
    "biased": (tiny_config("qwen2", **SIZES), every_layer(UNIFORM | {"k_proj": 9}), {}),
    "mixed": (  # dense modules inside fused layers, dense layers, a bias everywhere, one key-value head
        tiny_config(**SIZES, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
        every_layer({"q_proj": 20, "v_proj": 31, "o_proj": 19, "up_proj": 24}, layers=(0,))
        | every_layer({"gate_proj": 24, "down_proj": 26}, layers=(1,)),
        {},
    ),
    "head": (tiny_config("mistral", **SIZES), every_layer(UNIFORM) | {"lm_head": 37}, {}),
    "tied": (  # everything of q, k and v; one of gate and up; a row parallel layer
        tiny_config(**SIZES),
        every_layer(UNIFORM),
        tied("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
}


def low_rank_tensors(config: dict[str, Any], ranks: dict[str, int], ties: dict[str, str]) -> Tensors:
    """What such a folder stores."""
    tensors, factors = low_rank(random_tensors(config), ranks)
    for module, (factor_in, factor_out) in factors.items():
        tensors |= {f"{module}.factor_in.weight": factor_in, f"{module}.factor_out.weight": factor_out}
        tensors[f"{module}.weight"] = torch.empty(0)
        if parse_config(config).linears()[module].bias:
            tensors[f"{module}.factor_out.bias"] = tensors.pop(f"{module}.bias")
    return {name: tensor for name, tensor in tensors.items() if name not in ties}


def write_low_rank(folder: Path, name: str) -> Path:
    """One of `MODELS` as a folder."""
    config, ranks, ties = MODELS[name]
    section = {
        "quant_method": "thinrank",
        "format_version": 1,
        "modules": {module: {"rank": rank} for module, rank in ranks.items()},
        "tied_factors": ties,
        "source": {"family": "test"},
    }
    return write_folder(
        folder, config | {"quantization_config": section}, low_rank_tensors(config, ranks, ties)
    )
