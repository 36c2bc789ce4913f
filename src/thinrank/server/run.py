"""Runs a server until it is told to stop, and then lets it finish what it can."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

import uvicorn
import uvicorn.config
from fastapi import FastAPI

from ..errors import OptionError
from ..llm import LLM
from .app import create_app
from .config import ServerConfig
from .worker import EngineDeadError, EngineWorker

#: Milliseconds that a client may leave what it was sent unread before its connection is closed.
UNREAD_TIMEOUT_MS = 60_000
#: Seconds that handlers get to send their last event once their requests are cancelled.
_LAST_WORDS = 5.0
#: Python lets a thread that wants to run wait up to 5 ms for the one that runs; a decode step takes less than that.
_SWITCH_INTERVAL = 0.0005


class _WithoutStats(logging.Filter):
    """Of the access log: every open page asks for them once a second."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and "/stats" in record.args)


_LOGGING = {
    **uvicorn.config.LOGGING_CONFIG,
    "loggers": {
        **uvicorn.config.LOGGING_CONFIG["loggers"],
        "thinrank.server": {"handlers": ["default"], "level": "INFO", "propagate": False},
    },
    "filters": {"without_stats": {"()": _WithoutStats}},
    "handlers": {
        **uvicorn.config.LOGGING_CONFIG["handlers"],
        "access": {**uvicorn.config.LOGGING_CONFIG["handlers"]["access"], "filters": ["without_stats"]},
    },
}


def serve(
    load: Callable[[], LLM], config: ServerConfig, on_ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve a model until SIGINT or SIGTERM.

    From then on no connection is accepted. Running requests get `config.shutdown_timeout` seconds to finish, then an
    error; a second signal cuts that short. load: called once it is sure that the address is free. on_ready: called
    with the server's URL when it accepts connections. Raises OptionError when the address cannot be used.
    """
    listener = bind(config.host, config.port)
    app = create_app(load(), config)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    Server(app, config, lambda: on_ready(url)).run([listener])


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet: until the model is loaded, clients are refused.

    Raises OptionError when the address cannot be used.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio sets it only on sockets that name their protocol; without it a stream's first events wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_MS)
        listener.bind(address)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {host}, port {port}: {error.strerror}", "choose another --host or --port"
        ) from error
    return listener


class Server(uvicorn.Server):
    """uvicorn's, which knows nothing of last words to clients."""

    def __init__(self, app: FastAPI, config: ServerConfig, on_ready: Callable[[], None]):
        settings = uvicorn.Config(
            app,
            http="httptools",
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=_LOGGING,
            access_log=config.access_log,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=math.ceil(config.shutdown_timeout + _LAST_WORDS),
        )
        super().__init__(settings)
        self._worker: EngineWorker = app.state.service.worker
        self._shutdown_timeout = config.shutdown_timeout
        self._on_ready = on_ready
        self._impatient = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        refusal = asyncio.create_task(self._refuse_later())
        await super().shutdown(sockets)
        refusal.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._impatient = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """uvicorn's raises the signal again at the end; a server that was told to stop and did has not failed.

        Only the main thread gets signals.
        """
        signals = (signal.SIGINT, signal.SIGTERM) if current_thread() is main_thread() else ()
        handlers = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    async def _refuse_later(self) -> None:
        deadline = time.monotonic() + self._shutdown_timeout
        while time.monotonic() < deadline and not self._impatient:
            await asyncio.sleep(0.05)
        self._worker.refuse(EngineDeadError("the server is stopping"))
