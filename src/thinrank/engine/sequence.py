"""A sequence: one continuation of one prompt while the engine works on it.

A request with n > 1 is n sequences. Knows nothing about text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from ..config import BLOCK_SIZE, SamplingParams
from .grammar import TokenConstraint
from .logprobs import TokenLogprob

#: Log-probabilities of a prompt's tokens: None for the first, which nothing predicts.
PromptLogprobs = tuple[tuple[TokenLogprob, ...] | None, ...]


@dataclass(eq=False)
class SequenceMetrics:
    """What became of a sequence, and when: seconds of `time.monotonic`. Grows while it runs; read-only for others.

    num_cached_tokens: prompt tokens whose keys and values were in the prefix cache when it was first scheduled.
    num_preemptions: how often its blocks were taken away. finished: also when it was aborted.
    """

    arrival: float = field(default_factory=monotonic)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True)
class TokenOutput:
    """One new token of one sequence.

    logprobs: the token itself first, then the most likely ones; None unless asked for.
    finish_reason: None while it goes on, "stop" after EOS, a stop token or the end of a grammar, "length" at the
    limit. stop_reason: the stop token's id; None for EOS.
    prompt_logprobs: with the first token of a request's sequence 0, one entry a prompt token; None unless asked for.
    metrics: of the sequence, the same object in all its outputs.
    """

    request_id: str
    index: int
    token_id: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: SequenceMetrics | None = None


@dataclass(eq=False)
class Sequence:
    """token_ids: prompt and output. num_computed: how many of them have keys and values in the cache.

    seed: 64 bits; with `index` and the position it determines every random choice. max_tokens: the
    request's, clipped so that prompt and output fit the model. cache_salt: only sequences of the same salt share
    blocks. constraint: what a grammar allows. block_table: blocks of the tokens so far; a new list after each
    preemption. block_hashes: of the full blocks, as far as somebody asked. num_shared_blocks: how many of them the
    prefix cache knows. prompt_logprobs: of the prompt tokens that are computed.
    """

    request_id: str
    index: int
    token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    max_tokens: int
    seed: int
    cache_salt: str = ""
    constraint: TokenConstraint | None = None
    metrics: SequenceMetrics = field(default_factory=SequenceMetrics)
    num_prompt_tokens: int = field(init=False)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_shared_blocks: int = 0
    prompt_logprobs: list[tuple[TokenLogprob, ...] | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def max_len(self) -> int:
        """Tokens that the sequence can grow to."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that the next forward passes must process: the rest of the prompt, or the last token."""
        return len(self.token_ids) - self.num_computed

    @property
    def capacity(self) -> int:
        """Tokens that its blocks hold."""
        return len(self.block_table) * BLOCK_SIZE

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Asked for; one sequence of a request computes them for all."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.wants_prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def skips_prefix_cache(self) -> bool:
        """Logits are wanted at every prompt token, and nobody's come before those of the request's sequence 0."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end the sequence."""
        stop = frozenset(self.params.stop_token_ids or ())
        return stop if self.params.ignore_eos else stop | self.eos_token_ids

    def append(self, token_id: int) -> tuple[str | None, int | None]:
        """Add a sampled token; returns finish_reason and stop_reason as `TokenOutput` has them."""
        self.token_ids.append(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self.num_output_tokens >= self.params.min_tokens:
            if token_id in self.eos_token_ids and not self.params.ignore_eos:
                return "stop", None
            if token_id in (self.params.stop_token_ids or ()):
                return "stop", token_id
        if self.constraint is not None and self.constraint.finished:
            return "stop", None
        return ("length", None) if self.num_output_tokens >= self.max_tokens else (None, None)
