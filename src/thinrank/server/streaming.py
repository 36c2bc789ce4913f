"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import as_api_error

logger = logging.getLogger("thinrank.server")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends what `events` yields, one server-sent event each, then [DONE]. An error on the way becomes a last event.

    `events` is closed when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[BaseModel, None]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": _encode(event), "more_body": True})
        except Exception as error:
            answer = as_api_error(error)
            if answer.code == "internal_error":
                logger.exception("a stream failed")
            await send({"type": "http.response.body", "body": _encode(answer.body()), "more_body": True})
        await send({"type": "http.response.body", "body": DONE})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when the client went away, in which case it was cancelled."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encode(event: BaseModel) -> bytes:
    return b"data: " + event.model_dump_json().encode() + b"\n\n"
