"""What a caller of `LLM` gets, under vLLM's names, and how it is put together token by token.

Knows nothing about the engine's scheduling.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .config import SamplingParams
from .engine.logprobs import TokenLogprob
from .engine.sequence import SequenceMetrics, TokenOutput
from .text import Detokenizer, StopMatcher, Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of a token, before penalties and temperature. rank: 1 for the most likely.

    decoded_token: None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. text is what `token_ids`, up to the stop string or stop token, add to the prompt's
    text, the space before a first word included.

    logprobs: for each token the token's own and the most likely ones, by token id; None unless asked for,
    like cumulative_logprob, the sum over the tokens. finish_reason: "stop" or "length". stop_reason: the
    stop string or the stop token's id; None for EOS and for "length".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    metrics: SequenceMetrics | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations. prompt: None when it came as token ids.

    prompt_logprobs: as `CompletionOutput.logprobs`, one entry a prompt token, None for the first, which nothing
    predicts; None unless asked for. num_cached_tokens: prompt tokens that the prefix cache had.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True)
class CompletionChunk:
    """What one step added to one continuation. text may be "" while a character or a possible stop string is
    incomplete; all texts of an index joined are `CompletionOutput.text`. The last one has a finish_reason.

    prompt_logprobs: as in `RequestOutput`, in the first chunk of index 0."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: SequenceMetrics | None = field(default=None, compare=False, repr=False)


class Continuation:
    """One continuation while it grows. tokenizer: None leaves the text empty."""

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ):
        self._request_id = request_id
        self._index = index
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = (
            Detokenizer(tokenizer, params.skip_special_tokens, prompt_token_ids) if tokenizer else None
        )
        self._matcher = StopMatcher(tuple(params.stop or ()), params.include_stop_str_in_output)
        self._chunks: list[CompletionChunk] = []
        self.finish_reason: str | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.metrics: SequenceMetrics | None = None

    def push(self, token: TokenOutput) -> CompletionChunk:
        """Add a token. `finish_reason` of the result is "stop" when it completes a stop string, in which case
        the engine does not know yet that the sequence is over."""
        text, stop = self._text(token)
        chunk = CompletionChunk(
            self._request_id,
            self._index,
            text,
            [token.token_id],
            None if token.logprobs is None else [self._by_token_id(token.logprobs)],
            "stop" if stop else token.finish_reason,
            stop or token.stop_reason,
            None
            if token.prompt_logprobs is None
            else [None if each is None else self._by_token_id(each) for each in token.prompt_logprobs],
            token.metrics,
        )
        self._chunks.append(chunk)
        self.prompt_logprobs = self.prompt_logprobs or chunk.prompt_logprobs
        self.metrics = token.metrics
        self.finish_reason = chunk.finish_reason
        return chunk

    def output(self) -> CompletionOutput:
        """All that was pushed."""
        logprobs = None
        cumulative = None
        if self._params.logprobs is not None:
            logprobs = [entry for chunk in self._chunks for entry in chunk.logprobs or ()]
            cumulative = sum(
                entry[chunk.token_ids[0]].logprob for chunk in self._chunks for entry in chunk.logprobs or ()
            )
        return CompletionOutput(
            self._index,
            "".join(chunk.text for chunk in self._chunks),
            [token_id for chunk in self._chunks for token_id in chunk.token_ids],
            cumulative,
            logprobs,
            self.finish_reason,
            self._chunks[-1].stop_reason if self._chunks else None,
            self.metrics,
        )

    def _text(self, token: TokenOutput) -> tuple[str, str | None]:
        """The text that is safe to show by now, and the stop string if one is complete."""
        if self._detokenizer is None:
            return "", None
        # The token that ends a sequence is no part of its text, unless asked for.
        shown = token.finish_reason != "stop" or self._params.include_stop_str_in_output
        text = self._detokenizer.push(token.token_id) if shown else ""
        if token.finish_reason:
            text += self._detokenizer.finish()
        if len(self._chunks) + 1 < self._params.min_tokens:
            return self._matcher.flush() + text, None
        text, stop = self._matcher.push(text)
        if token.finish_reason and not stop:
            text += self._matcher.flush()
        return text, stop

    def _by_token_id(self, entries: tuple[TokenLogprob, ...]) -> dict[int, Logprob]:
        decode = self._tokenizer and self._tokenizer.decode
        return {
            entry.token_id: Logprob(
                entry.logprob,
                entry.rank,
                decode([entry.token_id], skip_special_tokens=False) if decode else None,
            )
            for entry in entries
        }


@dataclass(eq=False)
class RunningRequest:
    """A request between `Engine.add` and its last token. chunks: those that nobody has taken yet."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    continuations: list[Continuation]
    chunks: deque[CompletionChunk] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        return all(continuation.finish_reason for continuation in self.continuations)

    def output(self) -> RequestOutput:
        metrics = self.continuations[0].metrics
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [continuation.output() for continuation in self.continuations],
            self.finished,
            self.continuations[0].prompt_logprobs,
            0 if metrics is None else metrics.num_cached_tokens,
        )
