"""A sequence: one continuation of one prompt while the engine works on it.

A request with n > 1 is n sequences. Knows nothing about text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import SamplingParams


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token under the model, before penalties and temperature.

    rank: 1 for the most likely token of the vocabulary.
    """

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class TokenOutput:
    """One new token of one sequence.

    logprobs: the token itself first, then the most likely ones; None unless asked for.
    finish_reason: None while it goes on, "stop" after EOS or a stop token, "length" at the limit.
    stop_reason: the stop token's id; None for EOS.
    """

    request_id: str
    index: int
    token_id: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(eq=False)
class Sequence:
    """token_ids: prompt and output. num_computed: how many of them have keys and values in the cache.

    seed: 64 bits; with `index` and the position it determines every random choice. max_tokens: the
    request's, clipped so that prompt and output fit the model. block_table: blocks for all of them,
    reserved when the sequence is admitted, so that a running sequence never waits for memory.
    """

    request_id: str
    index: int
    token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]
    max_tokens: int
    seed: int
    num_prompt_tokens: int = field(init=False)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

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
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end the sequence."""
        stop = frozenset(self.params.stop_token_ids or ())
        return stop if self.params.ignore_eos else stop | self.eos_token_ids

    def append(self, token_id: int) -> tuple[str | None, int | None]:
        """Add a sampled token; returns finish_reason and stop_reason as `TokenOutput` has them."""
        self.token_ids.append(token_id)
        if self.num_output_tokens >= self.params.min_tokens:
            if token_id in self.eos_token_ids and not self.params.ignore_eos:
                return "stop", None
            if token_id in (self.params.stop_token_ids or ()):
                return "stop", token_id
        return ("length", None) if self.num_output_tokens >= self.max_tokens else (None, None)
