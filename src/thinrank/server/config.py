"""Frozen settings of the HTTP side of a server; those of the engine are `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OptionError

#: Where sampling parameters that a request leaves out come from.
GENERATION_CONFIGS = ("auto", "none")


@dataclass(frozen=True)
class ServerConfig:
    """served_model_names: what clients may call the model; the first one is reported back. api_keys: none lets
    everybody in. chat_template: Jinja text instead of the model's own. generation_config: "auto" takes the
    model's generation_config.json as defaults of temperature, top_p, top_k, min_p and repetition_penalty, "none"
    takes OpenAI's. allowed_origins: of web pages whose scripts may call the server.

    max_request_bytes: of a body. max_concurrent_requests: completions in progress, waiting ones included.
    request_timeout: seconds that a completion may take; None: no limit. shutdown_timeout: seconds that running
    requests get to finish after SIGTERM.

    Raises OptionError for a value out of range.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    generation_config: str = "auto"
    allowed_origins: tuple[str, ...] = ()
    max_request_bytes: int = 16 * 2**20
    max_concurrent_requests: int = 1024
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    access_log: bool = True

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise OptionError("a served model name is empty", "give --served-model-name a text")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise OptionError("an API key is empty or no printable ASCII", "give another one")
        if not 0 <= self.port < 2**16:
            raise OptionError(f"port is {self.port}", "it must be 0 (any free one) to 65535")
        if self.generation_config not in GENERATION_CONFIGS:
            raise OptionError(
                f"generation_config is {self.generation_config!r}", f"known: {', '.join(GENERATION_CONFIGS)}"
            )
        for name in ("max_request_bytes", "max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}", "it must be at least 1")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise OptionError(f"request_timeout is {self.request_timeout}", "it must be above 0")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise OptionError(
                f"shutdown_timeout is {self.shutdown_timeout}", "it must be 0 or more, and finite"
            )
