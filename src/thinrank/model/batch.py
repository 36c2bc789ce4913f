"""What one forward pass works on: tokens of several sequences, packed one after the other.

Knows nothing about requests or sampling. `KVLayer` is the cache of one layer as the model sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError


class KVLayer(NamedTuple):
    """Keys and values of one layer: [blocks, kv_heads, BLOCK_SIZE, head_dim] each, in the weights' dtype."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class PagedContext:
    """Where the sequences of a batch lie in the KV cache.

    context_lens: tokens of each sequence that attention reads, this batch's included.
    block_tables: int64 [sequences, blocks], the blocks of each sequence in order; shorter rows are padded.
    slots: int64 [tokens], block * BLOCK_SIZE + row, where the keys and values of this batch go.
    """

    context_lens: tuple[int, ...]
    block_tables: Tensor
    slots: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """Input of one forward pass.

    token_ids, positions: int64 [tokens]. query_lens: how many of the tokens belong to each sequence.
    paged: None for whole sequences that attend to themselves, without a cache.
    """

    token_ids: Tensor
    positions: Tensor
    query_lens: tuple[int, ...]
    paged: PagedContext | None = None

    @staticmethod
    def whole_sequences(sequences: Sequence[Tensor], device: torch.device) -> ForwardBatch:
        """Sequences without history or cache. sequences: int64 [tokens] each; equal lengths run fastest."""
        lengths = tuple(len(sequence) for sequence in sequences)
        return ForwardBatch(
            torch.cat(list(sequences)).to(device),
            torch.cat([torch.arange(length, device=device) for length in lengths]),
            lengths,
        )


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError for an empty list or an id outside [0, vocab_size)."""
    if not token_ids:
        raise RequestError("the prompt is empty", "give at least one token")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token id {token_id} is outside the vocabulary of {vocab_size}",
                "was the text encoded with another model's tokenizer?",
            )
