"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..outputs import CompletionChunk
from .completions import FINGERPRINT
from .errors import bad_request
from .generation import Generation
from .logprobs import LogprobFormat
from .responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    Delta,
    Usage,
)
from .schema import ChatCompletionRequest
from .service import Service


async def start_chat(service: Service, request: ChatCompletionRequest) -> ChatAnswer:
    """Check everything that can be wrong with a request. Raises ApiError, ThinrankError or EngineDeadError."""
    service.unknown_fields.check(request.model_extra)
    model = service.check_model(request.model)
    service.check_options(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_request("max_tokens and max_completion_tokens differ", "max_tokens")
    generation = await service.generation(
        request,
        [await service.encode_chat(request)],
        max_tokens=limits.pop() if limits else None,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    return ChatAnswer(service, request, model, generation)


class ChatAnswer:
    """What goes back to the client."""

    def __init__(self, service: Service, request: ChatCompletionRequest, model: str, generation: Generation):
        self._request = request
        self._model = model
        self._generation = generation
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._format = LogprobFormat(
            service.token_texts, bool(request.return_tokens_as_token_ids), request.top_logprobs or 0
        )

    async def whole(self) -> ChatCompletion:
        chunks = await self._generation.whole()
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=FINGERPRINT,
            choices=[
                ChatChoice(
                    index=chunk.index,
                    message=ChatMessage(content=chunk.text),
                    logprobs=self._logprobs(chunk),
                    finish_reason=chunk.finish_reason,
                    stop_reason=chunk.stop_reason,
                )
                for chunk in chunks
            ],
            usage=self._generation.usage(),
        )

    async def events(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        options = self._request.stream_options
        continuous = options is not None and options.continuous_usage_stats
        for index in range(self._generation.num_choices):
            yield self._event([ChatChunkChoice(index=index, delta={"role": "assistant", "content": ""})])
        async with aclosing(self._generation.chunks()) as chunks:
            async for chunk in chunks:
                if chunk.text or chunk.logprobs or chunk.finish_reason:
                    usage = self._generation.usage() if continuous else None
                    yield self._event([self._delta(chunk)], usage)
        if options is not None and options.include_usage:
            yield self._event([], self._generation.usage())

    def _delta(self, chunk: CompletionChunk) -> ChatChunkChoice:
        delta: Delta = {"content": chunk.text} if chunk.text else {}
        return ChatChunkChoice(
            index=chunk.index,
            delta=delta,
            logprobs=self._logprobs(chunk),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
        )

    def _logprobs(self, chunk: CompletionChunk) -> ChatLogprobs | None:
        return None if chunk.logprobs is None else self._format.chat(chunk.token_ids, chunk.logprobs)

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=usage,
        )
