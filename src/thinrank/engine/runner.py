"""Runs the model over what a step has scheduled, and chooses the tokens.

On a GPU decode and short prompts go through the captured graphs, elsewhere they are forward passes like any other.
Knows nothing about queues or blocks that are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..device import upload
from ..model.batch import KVLayer
from ..model.decoder import Decoder
from .chunks import Chunks
from .logprobs import TokenLogprob, logprobs_of_prompt
from .sampler import chosen_on_device, sample
from .scheduler import Scheduled
from .sequence import Sequence

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder
    from .decode_graphs import DecodeGraphs
    from .prompt_graphs import PromptGraphs


class Sampled(NamedTuple):
    """The next token of a sequence. logprobs: None unless asked for."""

    sequence: Sequence
    token_id: int
    logprobs: tuple[TokenLogprob, ...] | None


class Runner:
    """graphs, prompt_graphs: None where there are none. max_rows: sequences that decode in one pass, at most."""

    def __init__(
        self,
        decoder: Decoder | PackedDecoder,
        kv_cache: Rows[KVLayer],
        graphs: DecodeGraphs | None,
        max_rows: int,
        prompt_graphs: PromptGraphs | None = None,
    ):
        self.decoder, self.kv_cache, self.graphs, self.max_rows = decoder, kv_cache, graphs, max_rows
        self.prompt_graphs = prompt_graphs

    def decode(self, sequences: list[Sequence]) -> list[Sampled]:
        """The next token of the sequences, each of which has one pending token and a block for it.

        With graphs, a sequence that joins others whose step is under way already gets its token one step later.
        """
        if self.graphs is not None and sequences:
            return self._decode_with_graphs(sequences, self.graphs)
        sampled = []
        for group in _groups(sequences, self.max_rows):
            batch = Chunks.of([Scheduled(sequence, 1) for sequence in group]).batch(self.decoder.device)
            sampled += _sample(self.decoder(batch, self.kv_cache), group)
        return sampled

    def prefill(self, scheduled: list[Scheduled]) -> list[Sampled]:
        """Process chunks; the next token of those sequences that have no pending token left then."""
        if not scheduled:
            return []
        chunks = Chunks.of(scheduled)
        ends = chunks.ends
        last = [end - 1 for item, end in zip(scheduled, ends, strict=True) if item.samples]
        hidden, logits = self.forward(chunks, last)
        for item, end in zip(scheduled, ends, strict=True):
            if item.sequence.lacks_prompt_logprobs:
                self._score_prompt(item, hidden[end - item.num_tokens : end])
        return _sample(logits, [item.sequence for item in scheduled if item.samples]) if last else []

    def forward(self, chunks: Chunks, last: list[int]) -> tuple[Tensor, Tensor]:
        """The residual stream of all rows after the last layer, float32 [tokens, hidden_size], and the logits of the
        `last` ones, float32 [len(last), vocab_size]; through a graph if one has room, then both until the next pass."""
        graph = None if self.prompt_graphs is None else self.prompt_graphs.holding(chunks)
        if graph is not None:
            return graph.run(chunks, last)
        device = self.decoder.device
        hidden = self.decoder.hidden(chunks.batch(device), self.kv_cache)
        rows = hidden[upload(last, torch.int64, device)]
        return hidden, self.decoder.head(rows) if last else rows

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
