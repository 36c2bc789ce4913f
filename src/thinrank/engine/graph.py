"""CUDA graphs of the decode step: one a batch size, captured once, replayed at every length.

The only file that knows CUDA graphs. The step advances its own state in device memory, so a replay needs
nothing from the host; while one step's tokens are read, the next may run already.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from ..errors import ThinrankError
from ..model.batch import KVLayer
from ..model.packed_decoder import DECODE_BATCH_SIZES, HISTORY_SLOTS, DecodeState, PackedDecoder
from .sequence import Sequence


@dataclass(frozen=True)
class _Row:
    """What the state holds of a row: which sequence, and how many tokens it has by now."""

    sequence: Sequence
    length: int


class DecodeGraph:
    """The captured step of one batch size, and the rows that it is advancing."""

    def __init__(self, decoder: PackedDecoder, kv_cache: Rows[KVLayer], state: DecodeState, idle_block: int):
        """Capture. Raises ThinrankError, with the reason, when CUDA refuses."""
        self.state, self._idle_block = state, idle_block
        self._rows: list[_Row] = []
        self._launched: torch.cuda.Event | None = None  # a step whose tokens nobody has read
        self._copies = torch.cuda.Stream(decoder.device)
        self._history = torch.zeros(state.history.shape, dtype=torch.int64, pin_memory=True)
        self._graph = torch.cuda.CUDAGraph()
        # Compiles the kernels and, as every row stands on the idle block, writes nowhere else.
        decoder.decode_step(state, kv_cache)
        torch.cuda.synchronize(decoder.device)
        try:
            with torch.cuda.graph(self._graph):
                decoder.decode_step(state, kv_cache)
        except RuntimeError as error:
            raise ThinrankError(
                f"capturing the decode graph failed: {error}", "report this with the GPU's name"
            ) from error

    @property
    def batch_size(self) -> int:
        return self.state.token_ids.shape[0]

    def step(self, sequences: list[Sequence], *, ahead: bool) -> list[int]:
        """The most likely next token of each sequence; `state.logits` has all of them.

        ahead: start the step after this one before reading, which is right if every sequence takes its most
        likely token and has room for one more; then `state.logits` is that step's.
        """
        rows = [_Row(sequence, len(sequence.token_ids)) for sequence in sequences]
        if self._rows != rows:
            self._load(rows)
        launched = self._launched or self._launch()
        self._launched = self._launch() if ahead else None
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(launched)
            self._history.copy_(self.state.history, non_blocking=True)
        self._copies.synchronize()
        self._rows = [_Row(row.sequence, row.length + 1) for row in rows]
        return [int(self._history[row.length % HISTORY_SLOTS, i]) for i, row in enumerate(rows)]

    def replace_tokens(self, token_ids: list[int]) -> None:
        """Continue with other tokens than the most likely ones."""
        self.state.token_ids[: len(token_ids)].copy_(torch.tensor(token_ids))

    def _launch(self) -> torch.cuda.Event:
        self._graph.replay()
        launched = torch.cuda.Event()
        launched.record()
        return launched

    def _load(self, rows: list[_Row]) -> None:
        """Put the last token of each row, its position and its blocks into the state; idle rows behind them."""
        state, idle = self.state, self.batch_size - len(rows)
        last = [row.sequence.token_ids[-1] for row in rows] + [0] * idle
        positions = [row.length - 1 for row in rows] + [0] * idle
        width = state.block_tables.shape[1]
        tables = [row.sequence.block_table for row in rows] + [[]] * idle
        padded = [table + [self._idle_block] * (width - len(table)) for table in tables]
        state.token_ids.copy_(torch.tensor(last))
        state.positions.copy_(torch.tensor(positions, dtype=torch.int32))
        state.context_lens.copy_(torch.tensor(positions, dtype=torch.int32) + 1)
        state.block_tables.copy_(torch.tensor(padded, dtype=torch.int32))
        self._launched = None


class DecodeGraphs:
    """One graph a batch size up to `max_rows`."""

    def __init__(
        self, decoder: PackedDecoder, kv_cache: Rows[KVLayer], max_rows: int, max_blocks: int, idle_block: int
    ):
        sizes = [size for size in DECODE_BATCH_SIZES if size < 2 * max_rows]
        self._graphs = {
            size: DecodeGraph(
                decoder, kv_cache, decoder.decode_state(size, max_blocks, idle_block), idle_block
            )
            for size in sizes
        }

    @property
    def max_rows(self) -> int:
        return max(self._graphs)

    def for_rows(self, rows: int) -> DecodeGraph:
        """The smallest graph that holds so many rows."""
        return self._graphs[min(size for size in self._graphs if size >= rows)]
