"""CUDA graphs of the decode step: one a batch size, captured once, replayed at every length.

The only file that knows CUDA graphs. The step advances its own state in device memory and chooses its tokens
itself, so a replay needs nothing from the host; while one step's tokens are read, the next may run already.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ThinrankError
from ..model.batch import KVLayer
from ..model.packed_decoder import DECODE_BATCH_SIZES, HISTORY_SLOTS, DecodeState, PackedDecoder
from .sampler import signed_seed, undefined_logits
from .sequence import Sequence


@dataclass(frozen=True)
class _Row:
    """What the state holds of a row: which sequence, and how many tokens it has by now."""

    sequence: Sequence
    length: int


def capture(launch: Callable[[], None], device: torch.device, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `launch` launches. It runs once before, which compiles its kernels.

    pool: memory that graphs which are replayed in the order of their capture may share, from
    `torch.cuda.graph_pool_handle`. Raises ThinrankError, with the reason, when CUDA refuses.
    """
    launch()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Destroying another graph during the capture would end it, and the collector may do so at any time.
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            launch()
    except RuntimeError as error:
        raise ThinrankError(
            f"capturing a CUDA graph failed: {error}", "report this with the GPU's name"
        ) from error
    finally:
        gc.enable()
    return graph


class DecodeGraph:
    """The captured step of one batch size, and the rows that it is advancing.

    Two graphs: the forward pass, which ends with the most likely tokens, and the sampler, which replaces them in
    the rows that sample; it is launched when there are any.
    """

    def __init__(self, decoder: PackedDecoder, kv_cache: Rows[KVLayer], state: DecodeState, idle_block: int):
        """Capture. Raises ThinrankError, with the reason, when CUDA refuses."""
        self.state, self._idle_block = state, idle_block
        self._rows: list[_Row] = []
        self._samples = False  # whether a row has a temperature
        self._launched: torch.cuda.Event | None = None  # a step whose tokens nobody has read
        self._copies = torch.cuda.Stream(decoder.device)
        self._history = torch.zeros(state.history.shape, dtype=torch.int64, pin_memory=True)
        # They run once before they are captured; as every row stands on the idle block, they write nowhere else.
        self._forward = capture(lambda: decoder.decode_step(state, kv_cache), decoder.device)
        self._sampler = capture(lambda: decoder.sample_step(state), decoder.device)

    @property
    def batch_size(self) -> int:
        return self.state.token_ids.shape[0]

    def step(self, sequences: list[Sequence], *, ahead: bool) -> list[int]:
        """The next token of each sequence, chosen on the device by its temperature, top_k, top_p and min_p.

        `state.logits` has what they were chosen from. ahead: start the step after this one before reading, which is
        right if every sequence has room for one more token; then `state.logits` is that step's. Raises ThinrankError
        when the logits of a row are undefined.
        """
        rows = self._place(sequences)
        launched = self._launched or self._launch()
        self._launched = self._launch() if ahead else None
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(launched)
            self._history.copy_(self.state.history, non_blocking=True)
        self._copies.synchronize()
        token_ids = [int(self._history[row.length % HISTORY_SLOTS, i]) for i, row in enumerate(rows)]
        if min(token_ids) < 0:
            raise undefined_logits()
        return token_ids

    def forward(self, sequences: list[Sequence]) -> Tensor:
        """Logits to choose the next tokens from, for rows that `step` has no way to: float32 [rows, vocab_size].

        Waits for nothing. `replace_tokens` comes next.
        """
        self._place(sequences)
        assert self._launched is None, "a step is under way whose tokens were chosen on the device"
        self._forward.replay()
        return self.state.logits[: len(sequences)]

    def replace_tokens(self, token_ids: list[int]) -> None:
        """Continue with these tokens."""
        self.state.token_ids[: len(token_ids)].copy_(torch.tensor(token_ids))

    def _launch(self) -> torch.cuda.Event:
        self._forward.replay()
        if self._samples:
            self._sampler.replay()
        launched = torch.cuda.Event()
        launched.record()
        return launched

    def _place(self, sequences: list[Sequence]) -> list[_Row]:
        """Have the sequences in the state, for one step, after which each has one token more."""
        rows = [_Row(sequence, len(sequence.token_ids)) for sequence in sequences]
        if self._rows != rows:
            self._load(rows)
        self._rows = [_Row(row.sequence, row.length + 1) for row in rows]
        return rows

    def _load(self, rows: list[_Row]) -> None:
        """Put the last token of each row, its position, its blocks and how it samples into the state.

        Idle rows behind them.
        """
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
        params = [row.sequence.params for row in rows]
        state.sampling.load(
            temperature=[p.temperature for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            top_k=[p.top_k for p in params],
            seed=[signed_seed(row.sequence) for row in rows],
            stream=[row.sequence.index for row in rows],
        )
        self._samples = any(p.temperature > 0 for p in params)
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
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(self._graphs)

    @property
    def max_rows(self) -> int:
        return max(self._graphs)

    def for_rows(self, rows: int) -> DecodeGraph:
        """The smallest graph that holds so many rows."""
        return self._graphs[min(size for size in self._graphs if size >= rows)]
