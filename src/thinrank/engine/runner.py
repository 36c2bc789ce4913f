"""Runs the model over what a step has scheduled, and chooses the tokens.

On a GPU decode goes through the captured graphs, elsewhere it is a forward pass like any other. Knows nothing about
queues or blocks that are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..config import BLOCK_SIZE
from ..device import upload
from ..model.batch import ForwardBatch, KVLayer, PagedContext
from ..model.decoder import Decoder
from .kv_cache import blocks_for
from .logprobs import TokenLogprob, logprobs_of_prompt
from .sampler import chosen_on_device, sample
from .scheduler import Scheduled
from .sequence import Sequence

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder
    from .decode_graphs import DecodeGraphs


class Sampled(NamedTuple):
    """The next token of a sequence. logprobs: None unless asked for."""

    sequence: Sequence
    token_id: int
    logprobs: tuple[TokenLogprob, ...] | None


class Runner:
    """graphs: None where there are none. max_rows: sequences that decode in one pass, at most."""

    def __init__(
        self,
        decoder: Decoder | PackedDecoder,
        kv_cache: Rows[KVLayer],
        graphs: DecodeGraphs | None,
        max_rows: int,
    ):
        self.decoder, self.kv_cache, self.graphs, self.max_rows = decoder, kv_cache, graphs, max_rows

    def decode(self, sequences: list[Sequence]) -> list[Sampled]:
        """The next token of the sequences, each of which has one pending token and a block for it.

        With graphs, a sequence that joins others whose step is under way already gets its token one step later.
        """
        if self.graphs is not None and sequences:
            return self._decode_with_graphs(sequences, self.graphs)
        sampled = []
        for group in _groups(sequences, self.max_rows):
            batch = build_batch([Scheduled(sequence, 1) for sequence in group], self.decoder.device)
            sampled += _sample(self.decoder(batch, self.kv_cache), group)
        return sampled

    def prefill(self, scheduled: list[Scheduled]) -> list[Sampled]:
        """Process chunks; the next token of those sequences that have no pending token left then."""
        if not scheduled:
            return []
        device = self.decoder.device
        hidden = self.decoder.hidden(build_batch(scheduled, device), self.kv_cache)
        ends = list(accumulate(item.num_tokens for item in scheduled))
        for item, end in zip(scheduled, ends, strict=True):
            if item.sequence.lacks_prompt_logprobs:
                self._score_prompt(item, hidden[end - item.num_tokens : end])
        rows = [end - 1 for item, end in zip(scheduled, ends, strict=True) if item.samples]
        if not rows:
            return []
        logits = self.decoder.head(hidden[upload(rows, torch.int64, device)])
        return _sample(logits, [item.sequence for item in scheduled if item.samples])

    def _score_prompt(self, item: Scheduled, hidden: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow those of a chunk. hidden: [num_tokens, hidden_size]."""
        sequence, start = item.sequence, item.sequence.num_computed
        known = len(sequence.prompt_logprobs)  # more than `start` if it was preempted amid its prompt
        following = sequence.token_ids[known : min(start + item.num_tokens + 1, sequence.num_prompt_tokens)]
        rows = hidden[known - 1 - start :][: len(following)]
        count = sequence.params.prompt_logprobs
        assert count is not None
        sequence.prompt_logprobs += logprobs_of_prompt(rows, self.decoder.head, following, count)

    def _decode_with_graphs(self, sequences: list[Sequence], graphs: DecodeGraphs) -> list[Sampled]:
        on_device = all(map(chosen_on_device, sequences))
        under_way = graphs.under_way(sequences)
        if not under_way and not on_device:
            sampled = []
            for group in _groups(sequences, graphs.max_rows):
                sampled += _sample(graphs.forward(group), group)
                graphs.replace_tokens([each.token_id for each in sampled[-len(group) :]])
            return sampled
        groups = [under_way] if under_way else list(_groups(sequences, graphs.max_rows))
        ahead = _next_rows(sequences, groups[0]) if on_device and len(sequences) <= graphs.max_rows else []
        return [
            Sampled(sequence, token_id, None)
            for group, following in zip(groups, [*groups[1:], ahead], strict=True)
            for sequence, token_id in zip(group, graphs.step(group, following), strict=True)
        ]


def build_batch(scheduled: list[Scheduled], device: torch.device) -> ForwardBatch:
    """The pending tokens of each sequence, with the cache blocks that they attend to. Does not wait for the device."""
    ends = [item.sequence.num_computed + item.num_tokens for item in scheduled]
    width = blocks_for(max(ends))
    tables = [(item.sequence.block_table + [0] * width)[:width] for item in scheduled]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for (sequence, num_tokens), end, table in zip(scheduled, ends, tables, strict=True):
        span = range(end - num_tokens, end)
        token_ids += sequence.token_ids[span.start : span.stop]
        positions += span
        slots += [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in span]
    tokens = upload([token_ids, positions, slots], torch.int64, device)
    paged = PagedContext(tuple(ends), upload(tables, torch.int64, device), tokens[2])
    return ForwardBatch(tokens[0], tokens[1], tuple(item.num_tokens for item in scheduled), paged)


def _next_rows(sequences: list[Sequence], stepping: list[Sequence]) -> list[Sequence]:
    """Those of the sequences that go on after a step of some of them, as far as is known before it ends.

    Empty when one has no block yet for what the step after that would write.
    """
    advanced, rows = set(stepping), []
    for sequence in sequences:
        length = len(sequence.token_ids) + (sequence in advanced)
        if length >= sequence.max_len:
            continue
        if length > sequence.capacity:
            return []
        rows.append(sequence)
    return rows


def _groups(sequences: list[Sequence], size: int) -> Iterator[list[Sequence]]:
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


def _sample(logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
    return [Sampled(*each) for each in zip(sequences, *sample(logits, sequences), strict=True)]
