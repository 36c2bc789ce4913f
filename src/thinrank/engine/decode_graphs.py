"""Which sequence stands in which row of which decode graph, and the step that runs ahead of the host.

While the host waits for the tokens of one step, the next is launched already: with the rows that will go on, those
that join, and without those that are known to end. A row that goes on keeps its last token on the device. Knows
nothing about CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import Any

from torch import Tensor

from ..kernels.compilation import compile_kernels
from ..model.batch import KVLayer
from ..model.packed_decoder import DECODE_BATCH_SIZES, HISTORY_SLOTS, PackedDecoder
from .graph import DecodeGraph, GraphRow
from .sampler import undefined_logits
from .sequence import Sequence

#: Rows up to which a row's result is bit for bit the same in every company.
MAX_INVARIANT_ROWS = 8


class DecodeGraphs:
    """One graph a batch size."""

    def __init__(self, graphs: Iterable[DecodeGraph]):
        self._graphs = {graph.batch_size: graph for graph in graphs}
        self._graph = next(iter(self._graphs.values()))
        self._rows: list[GraphRow] = []  # of `_graph`, as they will be when the next step begins
        self._num_blocks: list[int] = []  # of each, that the device knows
        self._ahead: _LaunchedStep | None = None

    @staticmethod
    def capture(
        decoder: PackedDecoder,
        kv_cache: Rows[KVLayer],
        max_num_seqs: int,
        batch_invariant: bool,
        max_blocks: int,
        idle_block: int,
    ) -> DecodeGraphs:
        """Graphs for up to `max_num_seqs` rows, or as many of them as there are graphs for.

        max_blocks: of one row. idle_block: where rows write that nobody needs.
        """
        sizes = [
            size
            for size in DECODE_BATCH_SIZES
            if size < 2 * max_num_seqs and not (batch_invariant and size > MAX_INVARIANT_ROWS)
        ]
        states = [decoder.decode_state(size, max_blocks, idle_block) for size in sizes]

        def launch() -> None:
            for state in states:
                decoder.decode_step(state, kv_cache)
                decoder.sample_step(state)

        compile_kernels(launch)
        return DecodeGraphs(DecodeGraph(decoder, kv_cache, state, idle_block) for state in states)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(self._graphs)

    @property
    def max_rows(self) -> int:
        return max(self._graphs)

    def under_way(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of the sequences whose next token a launched step is computing."""
        return [sequence for sequence in sequences if self._ahead is not None and self._ahead.has(sequence)]

    def step(self, sequences: list[Sequence], following: Rows[Sequence] = ()) -> list[int]:
        """The next token of each sequence, chosen on the device by its temperature, top_k, top_p and min_p.

        following: rows of a step to launch before this one is read. Their blocks must hold the token that each
        of them will have after this step. A step under way that lacks one of the sequences is forgotten. Raises
        ThinrankError when the logits of a row are undefined.
        """
        launched = self._ahead
        if launched is None or not all(map(launched.has, sequences)):
            self._place(sequences)
            launched = self._launch()
        self._ahead = None
        launched.graph.fetch(launched.event)
        if following:
            self._place(following, launched)
            self._ahead = self._launch()
        return launched.token_ids(sequences)

    def forward(self, sequences: list[Sequence]) -> Tensor:
        """Logits to choose the next tokens from, for rows that `step` has no way to: float32 [rows, vocab_size].

        Waits for nothing. `replace_tokens` comes next.
        """
        self._ahead = None
        self._place(sequences)
        self._graph.forward()
        self._count_step()
        return self._graph.state.logits[: len(sequences)]

    def replace_tokens(self, token_ids: list[int]) -> None:
        """Continue with these tokens."""
        self._graph.replace_tokens(token_ids)

    def _launch(self) -> _LaunchedStep:
        step = _LaunchedStep(self._graph, self._graph.launch(), self._rows)
        self._count_step()
        return step

    def _count_step(self) -> None:
        self._rows = [row._replace(length=row.length + 1) for row in self._rows]

    def _place(self, sequences: Rows[Sequence], launched: _LaunchedStep | None = None) -> None:
        """Have the sequences in the state of the smallest graph that holds them.

        launched: a step whose tokens the host lacks.
        """
        columns = [-1 if launched is None else launched.column(sequence) for sequence in sequences]
        rows = [
            GraphRow(sequence, sequence.block_table, len(sequence.token_ids) + (column >= 0))
            for sequence, column in zip(sequences, columns, strict=True)
        ]
        graph = self._graphs[min(size for size in self._graphs if size >= len(rows))]
        known = graph is self._graph and rows == self._rows
        self._graph, self._rows = graph, rows
        if known:
            self._grow()
        else:
            graph.load(rows, columns, None if launched is None else launched.graph.state.token_ids)
            self._num_blocks = [len(row.block_table) for row in rows]

    def _grow(self) -> None:
        """Tell the device of new blocks."""
        for number, row in enumerate(self._rows):
            for index in range(self._num_blocks[number], len(row.block_table)):
                self._graph.set_block(number, index, row.block_table[index])
            self._num_blocks[number] = len(row.block_table)


class _LaunchedStep:
    """A step that the device is running. event: when it ends. rows: as they were when it began."""

    def __init__(self, graph: DecodeGraph, event: Any, rows: list[GraphRow]):
        self.graph, self.event, self._rows = graph, event, rows
        self._columns = {row.sequence: column for column, row in enumerate(rows)}

    def column(self, sequence: Sequence) -> int:
        """Where the sequence's next token comes; -1 if it does not."""
        column = self._columns.get(sequence, -1)
        if column < 0:
            return -1
        row = self._rows[column]
        current = row.block_table is sequence.block_table and row.length == len(sequence.token_ids)
        return column if current else -1

    def has(self, sequence: Sequence) -> bool:
        return self.column(sequence) >= 0

    def token_ids(self, sequences: list[Sequence]) -> list[int]:
        """Waits for the step. Raises ThinrankError when the logits of a row are undefined."""
        history = self.graph.history()
        token_ids = [history[len(s.token_ids) % HISTORY_SLOTS][self._columns[s]] for s in sequences]
        if min(token_ids) < 0:
            raise undefined_logits()
        return token_ids
