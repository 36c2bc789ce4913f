"""The same model with heads of twice the width, because vLLM's attention on a CPU has none of 16.

A head's 16 dimensions go among 32, the others being zero. Rotary embeddings turn dimension i with i + width / 2, by the
angle theta^(-2i / width) a token: halves go to the beginnings of halves, and theta^2 gives them the same angles. Scores
are divided by sqrt(width), so queries are multiplied by sqrt(2). What is computed stays the same but for rounding.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from thinrank.checkpoint.load import open_checkpoint
from tiny_models import write_folder


def with_wider_heads(source: Path, folder: Path) -> Path:
    """A copy in float32, without tokenizer."""
    checkpoint = open_checkpoint(source)
    width = checkpoint.config.head_dim
    tensors = {}
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name, torch.device("cpu"), "float32")
        module, _, leaf = name.partition("_proj.")
        letter = module.rpartition(".")[2]
        if tensor.numel() and letter in ("q", "k", "v") and leaf != "factor_in.weight":
            tensor = wider(tensor, width) * (2**0.5 if letter == "q" else 1)
        elif tensor.numel() and letter == "o" and leaf in ("weight", "factor_in.weight"):
            tensor = wider(tensor.T, width).T
        tensors[name] = tensor
    config = json.loads((source / "config.json").read_text())
    config |= {"head_dim": 2 * width, "rope_theta": checkpoint.config.rope.rope_theta**2, "dtype": "float32"}
    config.pop("torch_dtype", None)
    return write_folder(folder, config, tensors)


def wider(tensor: Tensor, width: int) -> Tensor:
    """[heads * width, ...] -> [heads * 2 * width, ...]."""
    halves = tensor.reshape(-1, width // 2, *tensor.shape[1:])
    return torch.cat([halves, torch.zeros_like(halves)], 1).reshape(-1, *tensor.shape[1:])
