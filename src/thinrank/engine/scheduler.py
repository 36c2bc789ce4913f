"""Decides which sequences take part in the next step, with how many tokens, and who holds which blocks.

A step is two forward passes: one token of every sequence that decodes, and chunks of prompts up to a budget, which is
smaller while anything decodes. Sequences are admitted in order of arrival when blocks for their tokens are free, and
get one more when they grow into it. When none is left, the sequence that arrived last gives its blocks back and
waits at the front of the queue, so that the oldest one always goes on and nobody starves. Knows nothing about tensors.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import NamedTuple

from ..config import BLOCK_SIZE, EngineConfig
from .kv_cache import BlockPool, blocks_for
from .prefix_cache import PrefixCache, block_hashes
from .sequence import Sequence


class Scheduled(NamedTuple):
    """A sequence and how many of its pending tokens to process."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the pass reaches the last token, so that the next one can be chosen."""
        return self.num_tokens == self.sequence.num_pending


class Schedule(NamedTuple):
    """decode: sequences whose one pending token is processed. prefill: chunks of others."""

    decode: list[Sequence]
    prefill: list[Scheduled]


class Scheduler:
    """prefix_cache: None shares nothing. All running sequences arrived before all waiting ones."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache | None, config: EngineConfig):
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that are not finished."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """The next step; empty when there is nothing to do."""
        decode = self._decode()
        self._admit()
        prefill = self._prefill(decode)
        self._reserve(decode)
        return Schedule(decode, prefill)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """So many more tokens of a running sequence have keys and values in its blocks."""
        sequence.num_computed += num_tokens
        if self.prefix_cache is not None:
            self.prefix_cache.insert(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is finished or aborted, and free its blocks."""
        sequence.metrics.finished = monotonic()
        if sequence.block_table:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)

    def _decode(self) -> list[Sequence]:
        """Sequences with one pending token, each with a block for it; others are preempted if need be."""
        decode = []
        for sequence in list(self.running):
            if sequence.block_table and sequence.num_pending == 1 and self._grow(sequence):
                decode.append(sequence)
        return decode

    def _grow(self, sequence: Sequence) -> bool:
        """Have room for all tokens of the sequence; False if that cost its own blocks."""
        while sequence.capacity < len(sequence.token_ids):
            if self.pool.num_free:
                sequence.block_table += self.pool.allocate(1)
                continue
            victim = self.running.pop()
            self._free(victim)
            self.waiting.appendleft(victim)
            victim.metrics.num_preemptions += 1
            self.num_preemptions += 1
            if victim is sequence:
                return False
        return True

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            shared = [] if self.prefix_cache is None else self.prefix_cache.find(sequence)
            if self._is_being_computed(sequence, len(shared)):
                return
            # What it takes out of the free blocks, and a watermark: the next block of each that can still grow. So
            # what fits together to the last token never waits.
            taken = blocks_for(len(sequence.token_ids)) - len(shared) + sum(map(self.pool.is_free, shared))
            growing = sum(blocks_for(other.max_len) > len(other.block_table) for other in self.running)
            if taken + growing > self.pool.num_free:
                return
            self.running.append(self.waiting.popleft())
            self._start(sequence, shared)

    def _start(self, sequence: Sequence, shared: list[int]) -> None:
        """Give a sequence its blocks: those that it shares, and new ones for the rest of its tokens."""
        self.pool.share(shared)
        missing = blocks_for(len(sequence.token_ids)) - len(shared)
        sequence.block_table = shared + self.pool.allocate(missing)
        sequence.num_computed = len(shared) * BLOCK_SIZE
        sequence.num_shared_blocks = len(shared)
        if sequence.metrics.first_scheduled is None:
            sequence.metrics.first_scheduled = monotonic()
            sequence.metrics.num_cached_tokens = sequence.num_computed
            if self.prefix_cache is not None and not sequence.skips_prefix_cache:
                self.prefix_cache.queries += sequence.num_prompt_tokens
                self.prefix_cache.hits += sequence.num_computed

    def _is_being_computed(self, sequence: Sequence, index: int) -> bool:
        """Whether a running sequence is about to compute this block of the sequence, which will be shared then."""
        if (
            self.prefix_cache is None
            or sequence.skips_prefix_cache
            or len(sequence.token_ids) <= (index + 1) * BLOCK_SIZE
        ):
            return False
        wanted = block_hashes(sequence, index + 1)[index]
        return any(
            other.num_computed < (index + 1) * BLOCK_SIZE <= len(other.token_ids)
            and block_hashes(other, index + 1)[index] == wanted
            for other in self.running
        )

    def _prefill(self, decode: list[Sequence]) -> list[Scheduled]:
        budget = self.config.max_num_batched_tokens
        if decode:
            budget = min(budget, self.config.max_num_prefill_tokens_while_decoding)
        decoding, prefill = set(decode), []
        for sequence in self.running:
            if budget > 0 and sequence not in decoding:
                prefill.append(Scheduled(sequence, min(budget, sequence.num_pending)))
                budget -= prefill[-1].num_tokens
        return prefill

    def _reserve(self, decode: list[Sequence]) -> None:
        """A block for the token after the next where one is free, so that its step can be launched early."""
        for sequence in decode:
            full = sequence.capacity == len(sequence.token_ids)
            if full and len(sequence.token_ids) + 1 < sequence.max_len and self.pool.num_free:
                sequence.block_table += self.pool.allocate(1)

    def _free(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.num_shared_blocks = 0
