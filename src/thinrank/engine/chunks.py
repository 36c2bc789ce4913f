"""The pending tokens of a step's chunks of prompts, one sequence after the other, as numbers on the host."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from ..config import BLOCK_SIZE
from ..device import upload
from ..model.batch import ForwardBatch, PagedContext
from .kv_cache import blocks_for
from .scheduler import Scheduled


class Chunks(NamedTuple):
    """token_ids, positions: of each new token, and slots, where its key and value go. lens: new tokens of each
    sequence. context_lens: its tokens when they are processed. tables: its blocks up to there."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    lens: list[int]
    context_lens: list[int]
    tables: list[list[int]]

    @staticmethod
    def of(scheduled: list[Scheduled]) -> Chunks:
        chunks = Chunks([], [], [], [], [], [])
        for sequence, num_tokens in scheduled:
            end = sequence.num_computed + num_tokens
            table = sequence.block_table[: blocks_for(end)]
            span = range(sequence.num_computed, end)
            chunks.token_ids.extend(sequence.token_ids[span.start : span.stop])
            chunks.positions.extend(span)
            chunks.slots.extend(table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span)
            chunks.lens.append(num_tokens)
            chunks.context_lens.append(end)
            chunks.tables.append(table)
        return chunks

    @property
    def ends(self) -> list[int]:
        """Where the rows of each sequence end."""
        return list(accumulate(self.lens))

    def padded_tables(self) -> list[list[int]]:
        """Equally long, with block 0 behind a sequence's own."""
        width = max(map(len, self.tables))
        return [table + [0] * (width - len(table)) for table in self.tables]

    def batch(self, device: torch.device) -> ForwardBatch:
        """For a forward pass. Does not wait for the device."""
        tokens = upload([self.token_ids, self.positions, self.slots], torch.int64, device)
        tables = upload(self.padded_tables(), torch.int64, device)
        paged = PagedContext(tuple(self.context_lens), tables, tokens[2])
        return ForwardBatch(tokens[0], tokens[1], tuple(self.lens), paged)
