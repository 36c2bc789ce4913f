"""The engine: token ids in, token ids out, many requests at a time.

A step is: schedule, build the batch, run the model, sample. Knows nothing about text or files.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from itertools import accumulate, count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import BLOCK_SIZE, EngineConfig, SamplingParams
from ..errors import OptionError, RequestError
from ..model.batch import ForwardBatch, PagedContext
from ..model.decoder import Decoder
from .kv_cache import BlockPool, allocate_kv_cache, blocks_for, num_kv_blocks
from .sampler import chosen_on_device, sample
from .scheduler import Scheduled, Scheduler
from .sequence import Sequence, TokenLogprob, TokenOutput

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder
    from .graph import DecodeGraphs


class Engine:
    """Serves requests with one model. Not thread-safe: one thread adds, steps and aborts.

    Raises OptionError for limits that contradict the model.
    """

    def __init__(self, decoder: Decoder | PackedDecoder, config: EngineConfig | None = None):
        config = config or EngineConfig()
        trained = decoder.config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > trained:
            raise OptionError(
                f"max_model_len is {config.max_model_len}, the model was trained for {trained} positions",
                "lower it",
            )
        self.decoder = decoder
        self.max_model_len = config.max_model_len or trained
        num_blocks = num_kv_blocks(decoder.config, config, self.max_model_len, decoder.dtype.itemsize)
        self.pool = BlockPool(num_blocks)
        # One block more than the pool hands out: rows that pad a decode batch write there.
        self.kv_cache = allocate_kv_cache(decoder.config, num_blocks + 1, decoder.dtype, decoder.device)
        self.graphs = self._capture(config.max_num_seqs, num_blocks)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_num_batched_tokens)
        self._request_numbers = count()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
        request_id: str | None = None,
    ) -> str:
        """Queue a request; returns its id. Output comes from `step`, one sequence for each of `params.n`.

        Raises RequestError when the prompt is empty, has an id outside the vocabulary, leaves no room for
        output, or can never fit the KV cache.
        """
        max_tokens = self.check(prompt_token_ids, params)
        if request_id is None:
            request_id = str(next(self._request_numbers))
        seed = (secrets.randbits(64) if params.seed is None else params.seed) % 2**64
        eos = frozenset(eos_token_ids)
        for index in range(params.n):
            self.scheduler.add(
                Sequence(request_id, index, list(prompt_token_ids), params, eos, max_tokens, seed)
            )
        return request_id

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its sequences. One that is finished already is no error."""
        for sequence in self.scheduler.sequences:
            if sequence.request_id == request_id and index in (None, sequence.index):
                self.scheduler.remove(sequence)

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """One forward pass. Returns a new token for every sequence whose prompt is processed by now."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        if self.graphs is not None and all(item.decodes for item in scheduled):
            return self._decode([item.sequence for item in scheduled], self.graphs)
        batch = build_batch(scheduled, self.decoder.device)
        logits = self.decoder(batch, self.kv_cache, _sampled_rows(scheduled, self.decoder.device))
        sampling = [item.sequence for item in scheduled if item.samples]
        for sequence, num_tokens in scheduled:
            sequence.num_computed += num_tokens
        return self._advance(sampling, logits) if sampling else []

    def _capture(self, max_num_seqs: int, idle_block: int) -> DecodeGraphs | None:
        """Graphs of the decode step, for a decoder that has one (on a GPU)."""
        if self.decoder.device.type != "cuda":
            return None
        from ..model.packed_decoder import PackedDecoder
        from .graph import DecodeGraphs

        if not isinstance(self.decoder, PackedDecoder):
            return None
        max_blocks = blocks_for(self.max_model_len)
        return DecodeGraphs(self.decoder, self.kv_cache, max_num_seqs, max_blocks, idle_block)

    def _decode(self, sequences: list[Sequence], graphs: DecodeGraphs) -> list[TokenOutput]:
        """One token for every sequence, in groups as large as the largest graph."""
        outputs = []
        for start in range(0, len(sequences), graphs.max_rows):
            group = sequences[start : start + graphs.max_rows]
            graph = graphs.for_rows(len(group))
            logprobs: list[tuple[TokenLogprob, ...] | None] = [None] * len(group)
            if all(chosen_on_device(sequence) for sequence in group):
                alone = len(sequences) == len(group)
                roomy = all(len(sequence.token_ids) + 1 < sequence.max_len for sequence in group)
                token_ids = graph.step(group, ahead=alone and roomy)
            else:
                token_ids, logprobs = sample(graph.forward(group), group)
                graph.replace_tokens(token_ids)
            for sequence in group:
                sequence.num_computed += 1
            outputs += self._append(group, token_ids, logprobs)
        return outputs

    def _advance(self, sequences: list[Sequence], logits: Tensor) -> list[TokenOutput]:
        """Sample a token for each sequence. logits: float32 [sequences, vocab_size]."""
        return self._append(sequences, *sample(logits, sequences))

    def _append(
        self,
        sequences: list[Sequence],
        token_ids: list[int],
        logprobs_of: Iterable[tuple[TokenLogprob, ...] | None],
    ) -> list[TokenOutput]:
        """Give every sequence its token; finished ones leave."""
        outputs = []
        for sequence, token_id, logprobs in zip(sequences, token_ids, logprobs_of, strict=True):
            finish_reason, stop_reason = sequence.append(token_id)
            if finish_reason:
                self.scheduler.remove(sequence)
            outputs.append(
                TokenOutput(
                    sequence.request_id, sequence.index, token_id, logprobs, finish_reason, stop_reason
                )
            )
        return outputs

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> int:
        """Validate a request; returns max_tokens, clipped to what fits `max_model_len`."""
        length = len(prompt_token_ids)
        check_token_ids(prompt_token_ids, self.decoder.config.vocab_size)
        if length >= self.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens; with the output it may have {self.max_model_len}",
                "shorten the prompt or raise max_model_len",
            )
        max_tokens = min(params.max_tokens, self.max_model_len - length)
        needed = blocks_for(length + max_tokens)
        if needed > self.pool.num_blocks:
            raise RequestError(
                f"{length} prompt tokens and {max_tokens} output tokens do not fit into the KV cache, "
                f"which holds {self.pool.num_blocks * BLOCK_SIZE}",
                "raise kv_cache_memory or lower max_tokens",
            )
        return max_tokens


def check_token_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises RequestError for an empty list or an id outside [0, vocab_size)."""
    if not token_ids:
        raise RequestError("the prompt is empty", "give at least one token")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token id {token_id} is outside the vocabulary of {vocab_size}",
                "was the prompt encoded with another model's tokenizer?",
            )


def _sampled_rows(scheduled: list[Scheduled], device: torch.device) -> Tensor | None:
    """int64 [rows]: the last token of each sequence that samples; None when that is every token."""
    if all(item.samples and item.num_tokens == 1 for item in scheduled):
        return None
    ends = accumulate(item.num_tokens for item in scheduled)
    rows = [end - 1 for item, end in zip(scheduled, ends, strict=True) if item.samples]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def build_batch(scheduled: list[Scheduled], device: torch.device) -> ForwardBatch:
    """The pending tokens of each sequence, with the cache blocks that they attend to."""

    ends = [item.sequence.num_computed + item.num_tokens for item in scheduled]
    width = blocks_for(max(ends))
    tables = torch.tensor([(item.sequence.block_table + [0] * width)[:width] for item in scheduled])
    token_ids: list[int] = []
    positions, slots = [], []
    for (sequence, num_tokens), end, table in zip(scheduled, ends, tables, strict=True):
        token_ids += sequence.token_ids[end - num_tokens : end]
        position = torch.arange(end - num_tokens, end)
        positions.append(position)
        slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    # Together, so that the device waits for the host once.
    tokens = torch.stack([torch.tensor(token_ids), torch.cat(positions), torch.cat(slots)]).to(device)
    paged = PagedContext(tuple(ends), tables.to(device), tokens[2])
    return ForwardBatch(tokens[0], tokens[1], tuple(item.num_tokens for item in scheduled), paged)
