"""CUDA graphs of the decode step of one batch size, captured once, replayed at every length.

This file and `prompt_graphs` are the only ones that know CUDA graphs. The step advances its own state in device memory
and chooses its tokens itself, so a replay needs nothing from the host, and whatever the host changes between two steps
is queued on the device without waiting for it. `DecodeGraphs` decides what stands in which row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import upload
from ..errors import ThinrankError
from ..model.batch import KVLayer
from ..model.packed_decoder import DecodeState, PackedDecoder
from .sampler import signed_seed
from .sequence import Sequence


class GraphRow(NamedTuple):
    """A sequence, its list of blocks, and how many tokens it has when a step begins.

    The host may lack the last one. A list that the sequence does not have any more says that it was preempted.
    """

    sequence: Sequence
    block_table: list[int]
    length: int


def capture(launch: Callable[[], None], device: torch.device, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `launch` launches. It runs once before, which compiles and loads its kernels.

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
    """The captured step of one batch size.

    Two graphs: the forward pass, which ends with the most likely tokens, and the sampler, which replaces them in
    the rows that sample; it is launched when there are any.
    """

    def __init__(self, decoder: PackedDecoder, kv_cache: Rows[KVLayer], state: DecodeState, idle_block: int):
        """Capture. Raises ThinrankError, with the reason, when CUDA refuses."""
        self.state, self._idle_block = state, idle_block
        self._samples = False  # whether a row has a temperature
        self._copies = torch.cuda.Stream(decoder.device)
        self._copied: torch.cuda.Event | None = None
        self._history = torch.zeros(state.history.shape, dtype=torch.int64, pin_memory=True)
        # They run once before they are captured; as every row stands on the idle block, they write nowhere else.
        self._forward = capture(lambda: decoder.decode_step(state, kv_cache), decoder.device)
        self._sampler = capture(lambda: decoder.sample_step(state), decoder.device)

    @property
    def batch_size(self) -> int:
        return self.state.token_ids.shape[0]

    def load(self, rows: Rows[GraphRow], columns: list[int], last_tokens: Tensor | None) -> None:
        """Put the last token of each row, its position, its blocks and how it samples into the state.

        Idle rows behind them. columns: where in `last_tokens`, int64 on the device, a row's last token is that the
        host lacks; -1: the host has it.
        """
        if self._copied is not None:
            self._wait_for_copy(self._copied)
        state, idle = self.state, [0] * (self.batch_size - len(rows))
        host_tokens = [row.sequence.token_ids[-1] for row in rows] + idle
        positions = [row.length - 1 for row in rows] + idle
        numbers = upload(
            [host_tokens, positions, columns + [-1] * len(idle)], torch.int64, state.token_ids.device
        )
        tokens = numbers[0]
        if last_tokens is not None:
            tokens = torch.where(numbers[2] < 0, tokens, last_tokens[numbers[2].clamp(min=0)])
        state.token_ids.copy_(tokens)
        state.positions.copy_(numbers[1])
        state.context_lens.copy_(numbers[1] + 1)
        # Behind a row's blocks may stand those of a row before it, which nothing reads. An idle row walks on through
        # its table, so that one must be idle to the end.
        width = max(len(row.block_table) for row in rows)
        tables = [row.block_table + [self._idle_block] * (width - len(row.block_table)) for row in rows]
        state.block_tables[: len(rows), :width].copy_(upload(tables, torch.int32, state.block_tables.device))
        state.block_tables[len(rows) :].fill_(self._idle_block)
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

    def set_block(self, row: int, index: int, block: int) -> None:
        """Block `index` of a row that has grown. The number travels as a kernel's argument."""
        self.state.block_tables[row, index].fill_(block)

    def replace_tokens(self, token_ids: list[int]) -> None:
        """Continue the first rows with these tokens."""
        tokens = upload(token_ids, torch.int64, self.state.token_ids.device)
        self.state.token_ids[: len(token_ids)].copy_(tokens)

    def forward(self) -> None:
        """One token for every row, the most likely one."""
        self._forward.replay()

    def launch(self) -> torch.cuda.Event:
        """One token for every row, chosen as the row samples."""
        self._forward.replay()
        if self._samples:
            self._sampler.replay()
        launched = torch.cuda.Event()
        launched.record()
        return launched

    def fetch(self, launched: torch.cuda.Event) -> None:
        """Start to copy the history after that step, beside what is launched later."""
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(launched)
            self._history.copy_(self.state.history, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def history(self) -> list[list[int]]:
        """What was fetched: [HISTORY_SLOTS][batch], as in `DecodeState`."""
        assert self._copied is not None, "fetch comes first"
        self._copied.synchronize()
        rows: list[list[int]] = self._history.tolist()
        return rows

    def _wait_for_copy(self, copied: torch.cuda.Event) -> None:
        """Other rows may write the slots of the history that are being copied: only after that."""
        torch.cuda.current_stream().wait_event(copied)
