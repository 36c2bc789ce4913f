"""Calibration text that the model writes itself, for want of any other (as in LLM-QAT, arXiv 2305.17888).

Sampled from the model's own distribution at temperature 1. The only step of a compression that holds the whole
model in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..checkpoint.load import OpenCheckpoint
from ..config import BLOCK_SIZE, ModelConfig
from ..model.batch import ForwardBatch, KVLayer, PagedContext
from ..model.decoder import Decoder
from .statistics import VERSION, source_key, weights_of
from .store import computed, fingerprint

#: Sequences that are written together.
ROWS = 32


def self_generated(
    checkpoint: OpenCheckpoint,
    samples: int,
    length: int,
    seed: int,
    root: Path,
    device: torch.device,
    progress: bool,
) -> Tensor:
    """Token ids, int64 [samples, length], kept in `root`.

    Each sequence starts with BOS, or a random token where there is none, and goes on past any EOS. Equal seeds
    give equal text on a CPU.
    """
    key = fingerprint(VERSION, source_key(checkpoint), samples, length, seed, device.type)
    folder = root / f"text-{key}"
    folder.mkdir(parents=True, exist_ok=True)

    def write() -> dict[str, Tensor]:
        return {"token_ids": _write(checkpoint, samples, length, seed, device, progress)}

    return computed(folder / "tokens.safetensors", write)["token_ids"].read()


def _write(
    checkpoint: OpenCheckpoint, samples: int, length: int, seed: int, device: torch.device, progress: bool
) -> Tensor:
    decoder = Decoder.build(checkpoint.config, weights_of(checkpoint, device))
    generator = torch.Generator().manual_seed(seed)
    parts = []
    with tqdm(desc="Writing text", total=samples * length, unit="token", disable=not progress) as bar:
        for rows in torch.arange(samples).split(ROWS):
            parts.append(_generate(decoder, len(rows), length, generator, bar))
    return torch.cat(parts)


def _generate(decoder: Decoder, rows: int, length: int, generator: torch.Generator, bar: tqdm[Any]) -> Tensor:
    config, device = decoder.config, decoder.device
    blocks = -(-length // BLOCK_SIZE)
    tables = torch.arange(rows * blocks, device=device).view(rows, blocks)
    caches = [_empty_cache(config, rows * blocks, device) for _ in range(config.num_hidden_layers)]
    if config.bos_token_id is None:
        token = torch.randint(config.vocab_size, (rows,), generator=generator)
    else:
        token = torch.full((rows,), config.bos_token_id)
    tokens = [token]
    for position in range(length - 1):
        slots = tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        paged = PagedContext((position + 1,) * rows, tables, slots)
        positions = torch.full((rows,), position, device=device)
        batch = ForwardBatch(token.to(device), positions, (1,) * rows, paged)
        probabilities = decoder(batch, caches).softmax(-1).cpu()
        token = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        tokens.append(token)
        bar.update(rows)
    return torch.stack(tokens, dim=1)


def _empty_cache(config: ModelConfig, blocks: int, device: torch.device) -> KVLayer:
    shape = blocks, config.num_key_value_heads, BLOCK_SIZE, config.head_dim
    return KVLayer(torch.zeros(shape, device=device), torch.zeros(shape, device=device))
