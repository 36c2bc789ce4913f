"""The routes of one server. Everything that they do is elsewhere: see `service`, `completions` and `chat`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from ..llm import LLM
from ..version import __version__
from .chat import start_chat
from .completions import start_completion
from .config import ServerConfig
from .errors import bad_request, install_handlers
from .middleware import ApiKeys, BodyLimit, ConcurrencyLimit, CountResponses
from .page import PageModel, add_page
from .ranks import Ranks
from .responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorResponse,
    Health,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizerInfo,
    Version,
)
from .schema import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from .service import Service
from .stats import Stats
from .streaming import EventStream, while_connected

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 413, 429, 503, 504)
}
_STREAM: dict[str, Any] = {"text/event-stream": {}}


def create_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """An ASGI application that serves `llm`, which belongs to it from now on; `app.state.service` is its `Service`.

    Raises RequestError for a model without tokenizer, OptionError for a generation_config.json out of range.
    """
    service = Service(llm, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        service.worker.start()
        yield
        await service.worker.stop()

    app = FastAPI(
        title="thinrank",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    app.state.service = service
    _add_completion_routes(app, service)
    _add_model_routes(app, service)
    _add_tokenizer_routes(app, service)
    _add_page_routes(app, service)
    install_handlers(app)
    # The one added last is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=config.max_request_bytes)
    app.add_middleware(ConcurrencyLimit, max_requests=config.max_concurrent_requests)
    app.add_middleware(ApiKeys, keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    paths = {route.path for route in app.routes if isinstance(route, APIRoute)}
    app.add_middleware(CountResponses, metrics=service.metrics, paths=paths)
    _document_errors(app)
    return app


def _add_completion_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=Completion, responses={200: {"content": _STREAM}})
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """Continue one or several prompts."""
        answer = await start_completion(service, body)
        return EventStream(answer.events()) if body.stream else await _whole(answer.whole(), request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses={200: {"content": _STREAM}})
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Any:
        """Answer a conversation."""
        answer = await start_chat(service, body)
        return EventStream(answer.events()) if body.stream else await _whole(answer.whole(), request)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=service.started,
            root=service.config.served_model_names[0],
            max_model_len=service.max_model_len,
        )

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[card(name) for name in service.config.served_model_names])

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        return card(service.check_model(model))

    @app.get("/health")
    async def health() -> Health:
        """200 while requests can be served, 503 when the engine is dead or stopping."""
        service.worker.check_alive()
        return Health()

    @app.get("/version")
    async def version() -> Version:
        return Version(version=__version__)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        """Token ids of a text, or of a conversation as a chat completion would see it."""
        service.unknown_fields.check(body.model_extra)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("one of prompt and messages is needed", "prompt")
        if body.messages is None:
            token_ids = await service.encode(
                body.prompt or "", body.add_special_tokens is not False, "prompt"
            )
        else:
            fields = ChatFields.model_validate(body, from_attributes=True)
            token_ids = (await service.encode_chat(fields)).token_ids
        return Tokenized(
            count=len(token_ids),
            max_model_len=service.max_model_len,
            tokens=token_ids,
            token_strs=[service.tokenizer.backend.id_to_token(token_id) for token_id in token_ids]
            if body.return_token_strs
            else None,
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        """The text of token ids, special tokens included."""
        service.unknown_fields.check(body.model_extra)
        service.check_model(body.model)
        largest = max(body.tokens, default=0)
        if largest >= service.vocab_size:
            raise bad_request(f"token id {largest} is outside the vocabulary", "tokens")
        text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return Detokenized(prompt=text)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        """What a client needs to build prompts itself, as lm-eval does."""
        tokenizer = service.tokenizer.huggingface
        return TokenizerInfo(
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            chat_template=service.config.chat_template or service.tokenizer.chat_template,
        )


def _add_page_routes(app: FastAPI, service: Service) -> None:
    add_page(app)

    @app.get("/page/model", include_in_schema=False)
    async def page_model() -> PageModel:
        template = service.config.chat_template or service.tokenizer.chat_template
        return PageModel(
            name=service.config.served_model_names[0],
            max_model_len=service.max_model_len,
            has_chat_template=template is not None,
            defaults=service.defaults,
        )

    @app.get("/stats")
    async def stats() -> Stats:
        """The running engine in numbers."""
        service.worker.check_alive()
        return service.stats.read()

    @app.get("/ranks")
    async def ranks() -> Ranks:
        """Rank and parameters of every projection."""
        return service.ranks


async def _whole(work: Any, request: Request) -> Any:
    answer = await while_connected(request.receive, work)
    # 499 is nginx's word for a client that did not wait; nobody reads it but the metrics.
    return Response(status_code=499) if answer is None else answer


def _document_errors(app: FastAPI) -> None:
    """FastAPI's schema promises 422 and its own error object for invalid requests; ours are 400 and OpenAI's."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
