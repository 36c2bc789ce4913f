"""What happens to a request before its route: the key, the size of its body, the number of completions in progress."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .metrics import Metrics
from .page import PAGE_PATHS

#: For probes and scrapers, which have no key, and for browsers, in which the page asks for it.
OPEN_PATHS = {"/health", "/metrics", "/version", "/openapi.json", *PAGE_PATHS}
#: Those that occupy the engine.
COMPLETION_PATHS = {"/v1/completions", "/v1/chat/completions"}
#: Seconds in which a body must arrive.
BODY_TIMEOUT = 60.0


class ApiKeys:
    """Lets in whoever has one of the keys; everybody when there is none."""

    def __init__(self, app: ASGIApp, keys: Collection[str]):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN_PATHS:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            digest = _digest(key.strip().encode("latin-1"))
            # All are compared, each in constant time: how long it takes tells nothing about the keys.
            matches = [hmac.compare_digest(digest, known) for known in self._digests]
            if scheme.lower() != "bearer" or not any(matches):
                error = ApiError(
                    401,
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                return await error.response()(scope, receive, send)
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads each body whole before the route sees it: at most `max_bytes`, within `BODY_TIMEOUT`."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                body = await self._read(receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {BODY_TIMEOUT:.0f} s", headers=_CLOSE)
            return await error.response()(scope, receive, send)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if body is None:
            return None

        unread = True

        async def replay() -> Message:
            nonlocal unread
            if unread:
                unread = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None when the client went away. Raises ApiError for one that is too large."""
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            # A client that is still sending does not read the answer: what is too much is dropped, up to a point.
            if size <= self._max_bytes:
                parts.append(part)
            elif size > 4 * self._max_bytes:
                break
        if size > self._max_bytes:
            raise ApiError(
                413,
                f"the body is larger than {self._max_bytes} bytes",
                code="request_too_large",
                headers=_CLOSE if more else None,
            )
        return b"".join(parts)


class ConcurrencyLimit:
    """Refuses completions beyond `max_requests` in progress, streams included until their last event."""

    def __init__(self, app: ASGIApp, max_requests: int):
        self._app = app
        self._max_requests = max_requests
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in COMPLETION_PATHS:
            return await self._app(scope, receive, send)
        if self._active >= self._max_requests:
            error = ApiError(
                429,
                f"{self._max_requests} completions are in progress already",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
            return await error.response()(scope, receive, send)
        self._active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._active -= 1


class CountResponses:
    """Counts responses by path and status. All paths but `paths`, any number of which could be tried, count as one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]):
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.responded(path, message["status"])
            await send(message)

        await self._app(scope, receive, count)


_CLOSE = {"connection": "close"}


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
