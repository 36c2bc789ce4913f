"""The engine: token ids in, token ids out, many requests at a time.

A step is: schedule, decode, prefill, hand out the tokens. Knows nothing about text or files.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

import torch

from ..config import BLOCK_SIZE, EngineConfig, SamplingParams
from ..errors import OptionError, RequestError
from ..model.batch import check_token_ids
from ..model.decoder import Decoder
from .grammar import TokenConstraint
from .kv_cache import BlockPool, allocate_kv_cache, blocks_for, num_kv_blocks
from .prefix_cache import PrefixCache
from .runner import Runner, Sampled
from .scheduler import Scheduler
from .sequence import Sequence, TokenOutput
from .stats import EngineStats

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder
    from .decode_graphs import DecodeGraphs
    from .prompt_graphs import PromptGraphs


class Engine:
    """Serves requests with one model. Not thread-safe: one thread adds, steps and aborts; `stats` is for any.

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
        num_blocks = num_kv_blocks(
            decoder.config, config, self.max_model_len, decoder.dtype.itemsize, decoder.device
        )
        self.pool = BlockPool(num_blocks)
        # One block more than the pool hands out: rows that pad a decode batch write there.
        self.kv_cache = allocate_kv_cache(decoder.config, num_blocks + 1, decoder.dtype, decoder.device)
        self.graphs, self.prompt_graphs = self._capture(config, num_blocks)
        self.prefix_cache = PrefixCache(self.pool) if config.enable_prefix_caching else None
        self.scheduler = Scheduler(self.pool, self.prefix_cache, config)
        # Without graphs, only a row alone is sure to be summed in the same order every time.
        rows = 1 if config.batch_invariant else config.max_num_seqs
        self.runner = Runner(decoder, self.kv_cache, self.graphs, rows, self.prompt_graphs)
        self._request_numbers = count()
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        constraint: Callable[[], TokenConstraint] | None = None,
    ) -> str:
        """Queue a request; returns its id. Output comes from `step`, one sequence for each of `params.n`.

        cache_salt: requests share blocks of the prefix cache only with those of the same salt. constraint: makes the
        grammar of one sequence; called `params.n` times. Raises RequestError when the prompt is empty, has an id
        outside the vocabulary, leaves no room for output, or can never fit the KV cache.
        """
        max_tokens = self.check(prompt_token_ids, params)
        if request_id is None:
            request_id = str(next(self._request_numbers))
        seed = (secrets.randbits(64) if params.seed is None else params.seed) % 2**64
        eos = frozenset(eos_token_ids)
        for index in range(params.n):
            self.scheduler.add(
                Sequence(
                    request_id, index, list(prompt_token_ids), params, eos, max_tokens, seed,
                    cache_salt, constraint() if constraint else None,
                )
            )  # fmt: skip
        return request_id

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its sequences; its blocks are free at once. One that is finished is no error."""
        for sequence in self.scheduler.sequences:
            if sequence.request_id == request_id and index in (None, sequence.index):
                self.scheduler.remove(sequence)

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """One decode pass and one of prompts, as far as there is anything to do. Returns the new tokens."""
        decode, prefill = self.scheduler.schedule()
        sampled = self.runner.decode(decode)
        for each in sampled:
            self.scheduler.advance(each.sequence, 1)
        sampled += self.runner.prefill(prefill)
        for sequence, num_tokens in prefill:
            self.scheduler.advance(sequence, num_tokens)
        return [self._append(each) for each in sampled]

    def stats(self) -> EngineStats:
        """Counters and the state of the queue by now."""
        cache = self.prefix_cache
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_cache_usage=1 - self.pool.num_free / self.pool.num_blocks,
            prefix_cache_queries=0 if cache is None else cache.queries,
            prefix_cache_hits=0 if cache is None else cache.hits,
            num_preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> int:
        """Validate a request; returns max_tokens, clipped to what fits `max_model_len`."""
        length = len(prompt_token_ids)
        vocab_size = self.decoder.config.vocab_size
        check_token_ids(prompt_token_ids, vocab_size)
        for token_id in params.logit_bias or ():
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"logit_bias names token id {token_id}, outside the vocabulary of {vocab_size}",
                    "leave it out",
                )
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

    def _capture(
        self, config: EngineConfig, idle_block: int
    ) -> tuple[DecodeGraphs | None, PromptGraphs | None]:
        """Graphs of the decode step and of short prompts, for a decoder that has them (on a GPU)."""
        if self.decoder.device.type != "cuda":
            return None, None
        from ..model.packed_decoder import PackedDecoder
        from .decode_graphs import DecodeGraphs
        from .prompt_graphs import PromptGraphs

        if not isinstance(self.decoder, PackedDecoder):
            return None, None
        max_blocks = blocks_for(self.max_model_len)
        decode = DecodeGraphs.capture(
            self.decoder, self.kv_cache, config.max_num_seqs, config.batch_invariant, max_blocks, idle_block
        )
        prompts = PromptGraphs.capture(
            self.decoder, self.kv_cache, self.max_model_len, max_blocks, idle_block
        )
        return decode, prompts

    def _append(self, sampled: Sampled) -> TokenOutput:
        """Give a sequence its token; a finished one leaves."""
        sequence, token_id, logprobs = sampled
        finish_reason, stop_reason = sequence.append(token_id)
        self._generation_tokens += 1
        prompt_logprobs = None
        if sequence.metrics.first_token is None:
            sequence.metrics.first_token = monotonic()
            self._prompt_tokens += sequence.num_prompt_tokens if sequence.index == 0 else 0
            if sequence.wants_prompt_logprobs:
                prompt_logprobs = tuple(sequence.prompt_logprobs)
        if finish_reason:
            self.scheduler.remove(sequence)
        return TokenOutput(
            sequence.request_id, sequence.index, token_id, logprobs, finish_reason, stop_reason,
            prompt_logprobs, sequence.metrics,
        )  # fmt: skip
