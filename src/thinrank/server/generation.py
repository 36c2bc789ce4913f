"""One HTTP request's work in the engine: every prompt, `n` continuations of each, as text that grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from ..config import SamplingParams
from ..engine.grammar import TokenConstraint
from ..engine.sequence import PromptLogprobs
from ..outputs import CompletionChunk, Continuation
from .errors import ApiError
from .metrics import ContinuationTimer
from .responses import PromptTokensDetails, Usage
from .worker import Arrival, TokenFeed

if TYPE_CHECKING:
    from .service import Service


@dataclass(frozen=True)
class Prompt:
    """text: None when the client sent token ids."""

    text: str | None
    token_ids: list[int]


class Generation:
    """Choices are numbered prompt * n + continuation. Nothing runs before the first chunk is asked for.

    constraint: makes the grammar of one continuation. prompt_logprobs: by prompt; complete when the first chunk of any
    of its choices comes, if asked for.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        constraint: Callable[[], TokenConstraint] | None,
        cache_salt: str,
    ):
        self.prompts = prompts
        self.params = params
        self.num_choices = len(prompts) * params.n
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._service = service
        self._options = {
            "eos_token_ids": service.eos_token_ids,
            "constraint": constraint,
            "cache_salt": cache_salt,
        }
        self._started = perf_counter()
        self._prompt_of: dict[str, int] = {}
        self._continuations: list[Continuation] = []
        self._timers: list[ContinuationTimer] = []
        self._held: list[Arrival] = []
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    async def chunks(self) -> AsyncGenerator[CompletionChunk, None]:
        """What is new of a choice, one chunk each time it has something new. Closing the generator aborts.

        Raises ApiError when the time is up, EngineDeadError or StepFailedError when the engine fails.
        """
        feed = TokenFeed()
        timeout = self._service.config.request_timeout
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        try:
            self._submit(feed)
            while not all(continuation.finish_reason for continuation in self._continuations):
                try:
                    async with asyncio.timeout_at(deadline):
                        arrivals = await feed.take()
                except TimeoutError:
                    raise ApiError(
                        504,
                        f"the completion took longer than {timeout:g} s",
                        code="timeout",
                        headers={"x-should-retry": "false"},
                    ) from None
                for chunk in self._push(arrivals):
                    yield chunk
        finally:
            for request_id in self._prompt_of:
                self._service.worker.close(request_id)
            for timer in self._timers:
                timer.finish("abort")

    async def whole(self) -> list[CompletionChunk]:
        """Every choice as one chunk. Errors as in `chunks`."""
        parts: list[list[CompletionChunk]] = [[] for _ in range(self.num_choices)]
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                parts[chunk.index].append(chunk)
        return [_merged(several) for several in parts]

    def usage(self, with_output: bool = True) -> Usage:
        """So far."""
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        output = self._num_output_tokens if with_output else 0
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
        )

    def _submit(self, feed: TokenFeed) -> None:
        service = self._service
        for number, prompt in enumerate(self.prompts):
            request_id = service.worker.submit(feed, prompt.token_ids, self.params, **self._options)
            self._prompt_of[request_id] = number
            service.metrics.prompt(len(prompt.token_ids))
            for _ in range(self.params.n):
                choice = len(self._continuations)
                self._continuations.append(
                    Continuation(request_id, choice, prompt.token_ids, self.params, service.tokenizer)
                )
                self._timers.append(ContinuationTimer(service.metrics, self._started))

    def _push(self, arrivals: list[Arrival]) -> list[CompletionChunk]:
        """One chunk for each choice among the arrivals."""
        for token, _ in arrivals:
            if token.prompt_logprobs is not None:
                self.prompt_logprobs[self._prompt_of[token.request_id]] = token.prompt_logprobs
        held, self._held = self._held, []
        chunks: dict[int, list[CompletionChunk]] = {}
        for arrival in (*held, *arrivals):
            prompt = self._prompt_of[arrival.token.request_id]
            if self.params.prompt_logprobs is not None and prompt not in self.prompt_logprobs:
                self._held.append(arrival)
                continue
            choice = prompt * self.params.n + arrival.token.index
            if not self._continuations[choice].finish_reason:  # the engine may hear late of a stop string
                chunks.setdefault(choice, []).append(self._grow(choice, arrival))
        return [_merged(several) for several in chunks.values()]

    def _grow(self, choice: int, arrival: Arrival) -> CompletionChunk:
        token, time = arrival
        timer = self._timers[choice]
        timer.token(time)
        if timer.tokens == 1 and token.index == 0 and token.metrics is not None:
            self._num_cached_tokens += token.metrics.num_cached_tokens
            self._service.metrics.scheduled(token.metrics)
        self._num_output_tokens += 1
        if token.prompt_logprobs is not None:
            # A `Continuation` would decode each of its tokens: thousands, and not as they are shown here.
            token = replace(token, prompt_logprobs=None)
        chunk = self._continuations[choice].push(token)
        if chunk.finish_reason:
            timer.finish(chunk.finish_reason)
            if not token.finish_reason:
                self._service.worker.abort(token.request_id, token.index)
        return chunk


def _merged(chunks: list[CompletionChunk]) -> CompletionChunk:
    """Consecutive chunks of one choice as one."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=None
        if chunks[0].logprobs is None
        else [entry for chunk in chunks for entry in chunk.logprobs or ()],
    )
