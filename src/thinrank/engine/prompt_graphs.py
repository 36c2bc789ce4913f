"""CUDA graphs of short prompts: one launch where the host would need longer than the device.

A LLaMA-7B takes some 500 launches and two calls of cuBLAS's heuristics a matrix; on an H200 the host needs 13 to 26 ms
for that, whatever the number of tokens, and the device 5 ms for 64 of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from ..config import BLOCK_SIZE
from ..device import upload
from ..kernels.compilation import compile_kernels
from ..model.batch import KVLayer
from ..model.packed_decoder import PackedDecoder
from ..model.prompt_step import PromptState
from .chunks import Chunks
from .graph import capture

#: New tokens that a graph is captured for; fewer are padded. Above, the device has enough to do.
PROMPT_TOKENS = (64, 128, 256, 512)

#: Sequences that share a step at most.
PROMPT_SEQUENCES = 8


class PromptGraph:
    """The captured step of one number of tokens."""

    def __init__(
        self,
        decoder: PackedDecoder,
        kv_cache: Rows[KVLayer],
        state: PromptState,
        idle_block: int,
        pool: object,
    ):
        """Capture. Raises ThinrankError, with the reason, when CUDA refuses."""
        self.state, self._idle_slot = state, idle_block * BLOCK_SIZE
        self._graph = capture(lambda: decoder.prompt_step(state, kv_cache), decoder.device, pool)

    @property
    def tokens(self) -> int:
        return len(self.state.token_ids)

    def run(self, chunks: Chunks, last: list[int]) -> tuple[Tensor, Tensor]:
        """The residual stream of the chunks' tokens after the last layer, float32 [tokens, hidden_size], and the logits
        of the rows `last`, float32 [len(last), vocab_size]. Both until the next run."""
        self.load(chunks, last)
        self._graph.replay()
        return self.state.hidden[: len(chunks.token_ids)], self.state.logits[: len(last)]

    def load(self, chunks: Chunks, last: list[int]) -> None:
        """Put the chunks into the state. Does not wait for the device."""
        state, idle = self.state, self.tokens - len(chunks.token_ids)
        device, sequences = state.token_ids.device, len(state.context_lens)
        rows = upload(
            [
                chunks.token_ids + [0] * idle,
                chunks.positions + [0] * idle,
                chunks.slots + [self._idle_slot] * idle,
            ],
            torch.int64,
            device,
        )
        for mine, theirs in zip((state.token_ids, state.positions, state.slots), rows, strict=True):
            mine.copy_(theirs)
        ends = chunks.ends
        absent = sequences - len(ends)
        lens = upload(
            [0, *ends, *ends[-1:] * absent, *chunks.context_lens, *[0] * absent], torch.int32, device
        )
        state.query_start.copy_(lens[: sequences + 1])
        state.context_lens.copy_(lens[sequences + 1 :])
        tables = upload(chunks.padded_tables(), torch.int32, device)
        state.block_tables[: len(ends), : tables.shape[1]].copy_(tables)
        state.last.copy_(upload(last + [0] * (sequences - len(last)), torch.int64, device))


class PromptGraphs:
    """One graph a number of tokens; they share their memory, as no two run at a time."""

    def __init__(self, graphs: Rows[PromptGraph]):
        self._graphs = sorted(graphs, key=lambda graph: graph.tokens)

    @staticmethod
    def capture(
        decoder: PackedDecoder, kv_cache: Rows[KVLayer], max_model_len: int, max_blocks: int, idle_block: int
    ) -> PromptGraphs:
        """max_blocks: of one sequence. idle_block: where rows write that nobody needs."""
        pool = torch.cuda.graph_pool_handle()
        states = [
            decoder.prompt_state(tokens, PROMPT_SEQUENCES, max_blocks, idle_block)
            for tokens in PROMPT_TOKENS
            if tokens < 2 * max_model_len
        ]

        def launch() -> None:
            for state in states:
                decoder.prompt_step(state, kv_cache)

        compile_kernels(launch)
        # The largest first: the others fit into its memory.
        return PromptGraphs(
            [PromptGraph(decoder, kv_cache, state, idle_block, pool) for state in reversed(states)]
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(graph.tokens for graph in self._graphs)

    def holding(self, chunks: Chunks) -> PromptGraph | None:
        """The smallest graph that has room for the chunks, if one has."""
        if len(chunks.lens) > PROMPT_SEQUENCES:
            return None
        return next((graph for graph in self._graphs if graph.tokens >= len(chunks.token_ids)), None)
