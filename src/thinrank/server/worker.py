"""The one thread that owns the engine.

Commands go in through a queue, tokens come out on the event loop, in the `TokenFeed` of the request they belong to.
Everything public here is called on the event loop. Knows nothing about text or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

from ..config import SamplingParams
from ..engine.engine import Engine
from ..engine.sequence import TokenOutput
from ..errors import ThinrankError
from .pace import Pace

logger = logging.getLogger("thinrank.server")

#: Seconds that the last step gets before the process ends without it.
_JOIN_TIMEOUT = 10.0


class EngineDeadError(Exception):
    """The engine failed, or is stopped; there will be no more tokens."""


class StepFailedError(Exception):
    """The model computed nonsense in a step that the request took part in."""


class Arrival(NamedTuple):
    """A token, and when the engine had it (`perf_counter`)."""

    token: TokenOutput
    time: float


class TokenFeed:
    """Tokens of one or several engine requests that are answered together. A reader that falls behind gets more at a
    time, not later ones."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    async def take(self) -> list[Arrival]:
        """All that arrived since the last call, at least one token. Raises the error that ended the feed."""
        await self._changed.wait()
        if not self._arrivals:
            assert self._error is not None
            raise self._error
        arrivals, self._arrivals = self._arrivals, []
        if self._error is None:
            self._changed.clear()
        return arrivals

    def put(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()


class EngineWorker:
    """engine: stepped by nobody else from `start` on."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.pace = Pace(engine)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._feeds: dict[str, TokenFeed] = {}
        self._numbers = count()
        self._error: EngineDeadError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step that it is in, if that ends at all; open feeds fail."""
        self.refuse(EngineDeadError("the server is stopping"))
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT)

    def check_alive(self) -> None:
        """Raises EngineDeadError when no request can be served any more."""
        if self._error is not None:
            raise self._error

    def submit(self, feed: TokenFeed, token_ids: list[int], params: SamplingParams, **options: Any) -> str:
        """Queue a request that `Engine.check` has accepted; returns its id. options: of `Engine.add`.

        Raises EngineDeadError.
        """
        self.check_alive()
        request_id = f"http-{next(self._numbers)}"
        self._feeds[request_id] = feed
        self._commands.put(partial(self._add, request_id, token_ids, params, options))
        return request_id

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one of its sequences. A token that is on its way may still arrive."""
        self._commands.put(partial(self.engine.abort, request_id, index))

    def close(self, request_id: str) -> None:
        """Forget a request whose feed nobody reads any more; what still runs of it is aborted."""
        if self._feeds.pop(request_id, None) is not None:
            self.abort(request_id)

    def refuse(self, error: EngineDeadError) -> None:
        """End every open feed with an error, and raise it to whoever comes from now on."""
        self._error = self._error or error
        feeds, self._feeds = self._feeds, {}
        for request_id, feed in feeds.items():
            self.abort(request_id)
            feed.fail(self._error)

    # The rest runs in the engine's thread, save `_deliver` and `_fail`, which it posts to the event loop.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if self.engine.has_unfinished:
                    self._step()
        except Exception as error:
            logger.critical("the engine died", exc_info=error)
            self._post(self.refuse, EngineDeadError("the engine died; the server must be restarted"))

    def _take_commands(self) -> None:
        """Run all queued commands; wait for one while there is nothing to step."""
        try:
            while not self._stopping:
                self._commands.get(block=not self.engine.has_unfinished)()
        except Empty:
            pass

    def _stop(self) -> None:
        self._stopping = True

    def _add(
        self, request_id: str, token_ids: list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        try:
            self.engine.add(token_ids, params, request_id=request_id, **options)
        except ThinrankError as error:
            self._post(self._fail, request_id, error)

    def _step(self) -> None:
        try:
            tokens = self.pace.step()
        except ThinrankError as error:
            # That ends whatever ran, and harms nothing that waits or comes later.
            logger.error("a step failed: %s", error)
            for request_id in {sequence.request_id for sequence in self.engine.scheduler.running}:
                self.engine.abort(request_id)
                self._post(self._fail, request_id, StepFailedError(str(error)))
            return
        if tokens:
            self._post(self._deliver, tokens, perf_counter())

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback, *arguments)

    def _deliver(self, tokens: list[TokenOutput], time: float) -> None:
        for token in tokens:
            feed = self._feeds.get(token.request_id)
            if feed is not None:
                feed.put(Arrival(token, time))

    def _fail(self, request_id: str, error: Exception) -> None:
        feed = self._feeds.pop(request_id, None)
        if feed is not None:
            feed.fail(error)
