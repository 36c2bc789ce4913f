"""A step of short prompts whose tokens, places and lengths lie in device memory, so that one graph serves them all.

As `prefill`, which looks at its batch from the host and takes as long as the host needs to launch it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import BLOCK_SIZE
from ..kernels.prefill_attention import prefill_attention
from .batch import KVLayer


@dataclass(frozen=True, eq=False)
class PromptState:
    """What a step of up to `tokens` new tokens of `sequences` sequences reads and leaves, in device memory.

    token_ids, positions, slots: int64 [tokens], as in `ForwardBatch`, the sequences one after the other; behind them
    rows that write where nobody reads. query_start: int32 [sequences + 1] and context_lens: int32 [sequences], as in
    `prefill_attention`; a sequence without new tokens is none. block_tables: int32 [sequences, blocks]. last: int64
    [sequences], rows whose logits are wanted. attended: [tokens, heads * head_dim] in the weights' dtype, scratch:
    rows of no sequence keep what they had, which is finite. hidden: float32 [tokens, hidden_size], the residual stream
    after the last layer. logits: float32 [sequences, vocab_size] of the `last` rows.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    last: Tensor
    attended: Tensor
    hidden: Tensor
    logits: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVLayer | None, window: int | None) -> Tensor:
        """`gemm_layers.Rows`: k and v are read from the cache, where they are already."""
        assert cache is not None
        head_dim = cache.keys.shape[3]
        return prefill_attention(
            q.view(len(q), -1, head_dim), cache.keys, cache.values, self.block_tables, self.query_start,
            self.context_lens, max_query_len=len(q), scale=head_dim**-0.5, window=window, out=self.attended,
        )  # fmt: skip

    @staticmethod
    def allocate(
        tokens: int, sequences: int, blocks: int, idle_block: int, attention_width: int, hidden_size: int,
        vocab_size: int, dtype: torch.dtype, device: torch.device,
    ) -> PromptState:  # fmt: skip
        """Without sequences; its rows write into `idle_block`."""

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return PromptState(
            token_ids=numbers(tokens),
            positions=numbers(tokens),
            slots=numbers(tokens).fill_(idle_block * BLOCK_SIZE),
            query_start=numbers(sequences + 1, dtype=torch.int32),
            context_lens=numbers(sequences, dtype=torch.int32),
            block_tables=numbers(sequences, blocks, dtype=torch.int32),
            last=numbers(sequences),
            attended=numbers(tokens, attention_width, dtype=dtype),
            hidden=numbers(tokens, hidden_size, dtype=torch.float32),
            logits=numbers(sequences, vocab_size, dtype=torch.float32),
        )
