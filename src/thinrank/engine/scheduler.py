"""Decides which sequences take part in the next forward pass, and with how many tokens.

Waiting sequences are admitted in order of arrival as soon as blocks for all their tokens are free. While a
prompt is unfinished, passes are prefill chunks; then all running sequences decode together. Nothing is ever
preempted. Knows nothing about tensors.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .kv_cache import BlockPool, blocks_for
from .sequence import Sequence


class Scheduled(NamedTuple):
    """A sequence and how many of its pending tokens to process."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the pass reaches the last token, so that the next one can be chosen."""
        return self.num_tokens == self.sequence.num_pending

    @property
    def decodes(self) -> bool:
        """Whether the pass takes the one token that was sampled last."""
        return self.num_tokens == 1 and self.sequence.num_computed >= self.sequence.num_prompt_tokens


class Scheduler:
    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int):
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that are not finished."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next pass; empty when there is nothing to do."""
        self._admit()
        budget = self.max_num_batched_tokens
        prefill: list[Scheduled] = []
        for sequence in self.running:
            if sequence.num_computed < sequence.num_prompt_tokens and budget > 0:
                prefill.append(Scheduled(sequence, min(budget, sequence.num_pending)))
                budget -= prefill[-1].num_tokens
        return prefill or [Scheduled(sequence, 1) for sequence in self.running]

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is finished or aborted, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.free(sequence.block_table)
            sequence.block_table = []
        else:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            needed = blocks_for(self.waiting[0].max_len)
            if needed > self.pool.num_free:
                return
            sequence = self.waiting.popleft()
            sequence.block_table = self.pool.allocate(needed)
            self.running.append(sequence)
