"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

from ..outputs import CompletionChunk
from ..version import __version__
from .errors import bad_request
from .generation import Generation, Prompt
from .logprobs import LogprobFormat, prompt_entry
from .responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from .schema import CompletionPrompt, CompletionRequest, TokenIds
from .service import Service
from .token_text import TextOffsets

FINGERPRINT = f"thinrank-{__version__}"


async def start_completion(service: Service, request: CompletionRequest) -> CompletionAnswer:
    """Check everything that can be wrong with a request. Raises ApiError, ThinrankError or EngineDeadError."""
    service.unknown_fields.check(request.model_extra)
    model = service.check_model(request.model)
    service.check_options(request)
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens is 0: that makes sense only with echo", "max_tokens")
    generation = await service.generation(
        request,
        await _prompts(service, request),
        # The engine generates at least one token, whose logits come with the prompt's.
        max_tokens=max(1, max_tokens),
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    return CompletionAnswer(service, request, model, generation, with_output=max_tokens > 0)


async def _prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    return [
        Prompt(prompt, await service.encode(prompt, request.add_special_tokens, "prompt"))
        if isinstance(prompt, str)
        else Prompt(None, prompt)
        for prompt in _several(request.prompt)
    ]


def _several(prompt: CompletionPrompt) -> Sequence[str | TokenIds]:
    """The prompts, of one or several."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else cast(list[str], prompt)


class CompletionAnswer:
    """What goes back to the client. with_output: False leaves the generated token out: the prompt is all."""

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        model: str,
        generation: Generation,
        with_output: bool,
    ):
        self._service = service
        self._request = request
        self._model = model
        self._generation = generation
        self._with_output = with_output
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._format = LogprobFormat(
            service.token_texts, bool(request.return_tokens_as_token_ids), request.logprobs or 0
        )
        self._offsets: dict[int, TextOffsets] = {}

    async def whole(self) -> Completion:
        chunks = await self._generation.whole()
        return self._completion([self._choice(chunk) for chunk in chunks], self._usage())

    async def events(self) -> AsyncGenerator[Completion, None]:
        options = self._request.stream_options
        continuous = options is not None and options.continuous_usage_stats
        async with aclosing(self._generation.chunks()) as chunks:
            async for chunk in chunks:
                choice = self._choice(chunk)
                if choice.text or choice.logprobs is not None or choice.finish_reason:
                    yield self._completion([choice], self._usage() if continuous else None)
        if options is not None and options.include_usage:
            yield self._completion([], self._usage())

    def _choice(self, chunk: CompletionChunk) -> CompletionChoice:
        text, logprobs = "", None
        offsets = self._offsets.get(chunk.index)
        if offsets is None:
            text, logprobs, offsets = self._echo(chunk.index // self._generation.params.n)
            self._offsets[chunk.index] = offsets
        if self._with_output:
            text += chunk.text
            if chunk.logprobs is not None:
                logprobs = _concatenated(
                    logprobs, self._format.completion(chunk.token_ids, chunk.logprobs, offsets)
                )
        return CompletionChoice(
            index=chunk.index,
            text=text,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
        )

    def _echo(self, number: int) -> tuple[str, CompletionLogprobs | None, TextOffsets]:
        """What a choice begins with: nothing, or the prompt."""
        texts, skip = self._service.token_texts, self._generation.params.skip_special_tokens
        if not self._request.echo:
            return "", None, TextOffsets(texts, skip)
        prompt = self._generation.prompts[number]
        text = prompt.text
        if text is None:
            text = self._service.tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)
        offsets = TextOffsets(texts, skip)
        for token_id in prompt.token_ids:
            offsets.push(token_id)
        # Some tokenizers put a space before the first word that the text does not have.
        offsets = TextOffsets(texts, skip, start=len(text) - offsets.end)
        if self._request.logprobs is None:
            return text, None, TextOffsets(texts, skip, start=len(text))
        entries = [
            None if entry is None else prompt_entry(entry)
            for entry in self._generation.prompt_logprobs[number]
        ]
        return text, self._format.completion(prompt.token_ids, entries, offsets), offsets

    def _usage(self) -> Usage:
        return self._generation.usage(with_output=self._with_output)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=usage,
        )


def _concatenated(
    first: CompletionLogprobs | None, second: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )
