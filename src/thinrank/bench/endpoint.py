"""One OpenAI-compatible server as a load generator sees it: what it serves, its tokenizer, one completion as a stream.

Needs httpx2, the extra `bench`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx2 as httpx

from ..errors import OptionError, ThinrankError, unknown_name

#: backend -> path, as in `vllm bench serve`.
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
#: Seconds to wait for a connection, and for the next byte of an answer.
CONNECT_TIMEOUT, READ_TIMEOUT = 30, 600
#: Where a chat's delta may have text: models that think aloud do so under the other names.
_DELTA_TEXTS = ("content", "reasoning_content", "reasoning")


@dataclass(frozen=True)
class Sample:
    """One request to send. prompt: token ids, or a text for a chat. prompt_len: tokens, without a chat template's."""

    prompt: list[int] | str
    prompt_len: int
    output_len: int


@dataclass
class Outcome:
    """What became of a request; seconds of `time.perf_counter`.

    prompt_len, output_len: tokens; as the server counts them where it does (`counted`), else as asked for and one for
    each event. cached_len: prompt tokens that its prefix cache had; None if it does not say. times: of the events with
    text, one of which may hold several tokens. error: why it failed.
    """

    prompt_len: int
    start: float
    output_len: int = 0
    counted: bool = False
    cached_len: int | None = None
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    error: str | None = None


class Endpoint:
    """base_url: with or without a final /v1. api_key: sent as a bearer token.

    Raises OptionError for an unknown backend or a URL that is none.
    """

    def __init__(self, base_url: str, backend: str, api_key: str | None):
        if backend not in BACKENDS:
            raise unknown_name("backend", backend, list(BACKENDS))
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.backend = backend
        self._path = BACKENDS[backend]
        self._options: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT),
            # What is measured is one server, not the way through somebody's proxy.
            "trust_env": False,
        }
        if not base_url.startswith(("http://", "https://")):
            raise OptionError(f"base_url is {base_url!r}", "give it as http://HOST:PORT")

    def models(self) -> dict[str, int | None]:
        """The names of the served models, each with max_model_len if the server says it. Raises ThinrankError."""
        answer = self._ask("GET", "/v1/models")
        return {card["id"]: card.get("max_model_len") for card in answer["data"]}

    def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of a text, without special tokens, by vLLM's /tokenize. Raises ThinrankError."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        ids: list[int] = self._ask("POST", "/tokenize", body)["tokens"]
        return ids

    def detokenize(self, model: str, token_ids: list[int]) -> str:
        """The text of token ids, by vLLM's /detokenize. Raises ThinrankError."""
        text: str = self._ask("POST", "/detokenize", {"model": model, "tokens": token_ids})["prompt"]
        return text

    def connections(self) -> httpx.AsyncClient:
        """What `complete` sends its requests through; as many connections as there are requests."""
        return httpx.AsyncClient(**self._options, limits=httpx.Limits(max_connections=None))

    async def complete(
        self, connections: httpx.AsyncClient, model: str, sample: Sample, fields: Mapping[str, Any]
    ) -> Outcome:
        """Stream one completion. fields: further ones of the request's body. Never raises for what a server does."""
        body = {
            "model": model,
            **self._request(sample),
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        outcome = Outcome(sample.prompt_len, perf_counter())
        try:
            async with connections.stream("POST", self._path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    outcome.error = f"HTTP {response.status_code}: {_error_message(response)}"
                else:
                    await self._follow(outcome, response.aiter_lines())
        except httpx.HTTPError as error:
            outcome.error = _reason(error)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            outcome.error = f"an event is not OpenAI's: {type(error).__name__}: {error}"
        return outcome

    async def _follow(self, outcome: Outcome, lines: AsyncIterator[str]) -> None:
        """Read the events of one stream."""
        finished = False
        async for line in lines:
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            now = perf_counter()
            event = json.loads(data)
            if "error" in event:
                outcome.error = f"error event: {_message(event)}"
                return
            if usage := event.get("usage"):
                outcome.counted = True
                outcome.prompt_len, outcome.output_len = usage["prompt_tokens"], usage["completion_tokens"]
                outcome.cached_len = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            for choice in event["choices"]:
                finished = finished or choice.get("finish_reason") is not None
                if self._text(choice):
                    outcome.times.append(now)
                outcome.end = now
        if not finished:
            outcome.error = "the stream ended without a finish_reason"
        if not outcome.times:  # an answer of special tokens only has no text
            outcome.times.append(outcome.end)
        if not outcome.counted:
            outcome.output_len = len(outcome.times)

    def _request(self, sample: Sample) -> dict[str, Any]:
        if self.backend == "openai":
            return {"prompt": sample.prompt, "max_tokens": sample.output_len}
        messages = [{"role": "user", "content": sample.prompt}]
        return {"messages": messages, "max_completion_tokens": sample.output_len}

    def _text(self, choice: Mapping[str, Any]) -> str:
        if self.backend == "openai":
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        return "".join(delta.get(name) or "" for name in _DELTA_TEXTS)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """One answer, as JSON. Raises ThinrankError for a server that cannot be reached, or refuses."""
        try:
            with httpx.Client(**self._options) as client:
                response = client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ThinrankError(
                f"cannot reach {self.base_url}: {_reason(error)}",
                "start the server, or name another one with --base-url",
            ) from error
        if response.status_code == 401:
            raise ThinrankError(f"{self.base_url} wants a key", "pass --api-key or --api-key-file")
        if response.status_code != 200:
            raise ThinrankError(
                f"{self.base_url}{path} answers HTTP {response.status_code}: {_error_message(response)}",
                "is --base-url an OpenAI-compatible server?"
                if method == "GET"
                else "if it has no such route, name a folder with the model's tokenizer: --tokenizer",
            )
        try:
            return response.json()
        except ValueError as error:
            raise ThinrankError(
                f"{self.base_url}{path} does not answer with JSON",
                "is --base-url an OpenAI-compatible server?",
            ) from error


def _error_message(response: httpx.Response) -> str:
    try:
        return _message(response.json())
    except ValueError:
        return " ".join(response.text.split())[:200]


def _message(body: Any) -> str:
    """OpenAI's error message, or whatever else a server says."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:200]


def _reason(error: Exception) -> str:
    """Some of httpx's errors have no text."""
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name
