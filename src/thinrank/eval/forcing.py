"""Teacher forcing: given tokens instead of chosen ones, through an engine's own decoder, cache and graphs.

So a measured logit took the same way as one that a request would get.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..config import SamplingParams
from ..engine.chunks import Chunks
from ..engine.engine import Engine
from ..engine.kv_cache import blocks_for
from ..engine.scheduler import Scheduled
from ..engine.sequence import Sequence


@torch.inference_mode()
def prefill_logits(engine: Engine, token_ids: list[int], chunk: int | None = None) -> Iterator[Tensor]:
    """Logits at every token of one sequence, float32 [tokens, vocab_size], a chunk at a time.

    chunk: tokens of a pass; from the second pass on, tokens attend to a history in the cache. None: all.
    """
    with _admitted(engine, [token_ids], 0) as [sequence]:
        while sequence.num_pending:
            yield engine.decoder.head(_pass(engine, sequence, chunk))


@torch.inference_mode()
def decode_logits(
    engine: Engine, prompts: list[list[int]], continuations: list[list[int]]
) -> Iterator[Tensor]:
    """Logits from which each token of the continuations would be chosen, all by decode steps.

    prompts: at least one token each; all but the last are prefilled. continuations: equally long; as many
    rows as `max_rows` allows. Yields float32 [rows, vocab_size], which the next step overwrites.
    """
    output_len = len(continuations[0])
    with _admitted(engine, prompts, output_len) as sequences:
        for sequence in sequences:
            last = sequence.token_ids.pop()
            if sequence.num_pending:
                _pass(engine, sequence)
            sequence.token_ids.append(last)
        graphs = engine.graphs
        for token_ids in zip(*continuations, strict=True):
            if graphs is None:
                batch = Chunks.of([Scheduled(sequence, 1) for sequence in sequences]).batch(
                    engine.decoder.device
                )
                yield engine.decoder(batch, engine.kv_cache)
            else:
                yield graphs.forward(sequences)
                graphs.replace_tokens(list(token_ids))
            for sequence, token_id in zip(sequences, token_ids, strict=True):
                sequence.num_computed += 1
                sequence.token_ids.append(token_id)


def max_rows(engine: Engine, length: int) -> int:
    """Sequences of so many tokens that `decode_logits` takes at a time: what the cache and the graphs hold."""
    rows = engine.pool.num_free // blocks_for(length)
    return rows if engine.graphs is None else min(rows, engine.graphs.max_rows)


@contextmanager
def _admitted(engine: Engine, prompts: list[list[int]], output_len: int) -> Iterator[list[Sequence]]:
    """Sequences that have their blocks, as after the scheduler admits them."""
    sequences = [
        Sequence(str(row), 0, list(prompt), SamplingParams(temperature=0), frozenset(), output_len, 0)
        for row, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        sequence.block_table = engine.pool.allocate(blocks_for(sequence.max_len))
    try:
        yield sequences
    finally:
        for sequence in sequences:
            engine.pool.free(sequence.block_table)


def _pass(engine: Engine, sequence: Sequence, chunk: int | None = None) -> Tensor:
    """The residual stream of the next chunk of a sequence's pending tokens, which are computed then."""
    num_tokens = min(chunk or sequence.num_pending, sequence.num_pending)
    hidden, _ = engine.runner.forward(Chunks.of([Scheduled(sequence, num_tokens)]), [])
    sequence.num_computed += num_tokens
    return hidden
