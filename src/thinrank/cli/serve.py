"""`thinrank serve`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from ..config import EngineConfig
from ..errors import OptionError
from ..server.config import ServerConfig
from ..text_files import read_text_file
from . import output
from .chat import read_template
from .options import EngineOptions, Model, parse_size, with_option_groups


@dataclass(frozen=True)
class ServingOptions(EngineOptions):
    """Of an engine that many share."""

    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at a time.")] = (
        EngineConfig.max_num_seqs
    )
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Prompt tokens of a step in which no sequence decodes.")
    ] = EngineConfig.max_num_batched_tokens
    max_num_prefill_tokens_while_decoding: Annotated[
        int, typer.Option(help="Prompt tokens of a step for which sequences that decode have to wait.")
    ] = EngineConfig.max_num_prefill_tokens_while_decoding
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share keys and values between requests that begin alike.",
        ),
    ] = EngineConfig.enable_prefix_caching
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Greedy tokens do not depend on what else runs; slower."),
    ] = EngineConfig.batch_invariant


SERVING = ServingOptions()


@with_option_groups
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = ServerConfig.host,
    port: Annotated[int, typer.Option(help="0 takes any free one.")] = ServerConfig.port,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send. May be repeated.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Keys, one a line, out of sight of ps.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the model. May be repeated.", show_default="MODEL"),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Jinja chat template.", show_default="the model's")
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(help="auto: defaults of sampling are the model's own. none: OpenAI's."),
    ] = ServerConfig.generation_config,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Web pages that may call the server, * for all. May be repeated."),
    ] = None,
    max_concurrent_requests: Annotated[
        int, typer.Option(help="Completions in progress, waiting ones included; others get 429.")
    ] = ServerConfig.max_concurrent_requests,
    max_request_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a request's body; larger ones get 413.")
    ] = "16M",
    request_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="That a completion may take.", show_default="no limit"),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="That running requests get to finish after SIGTERM."),
    ] = ServerConfig.shutdown_timeout,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="Log a line a request.")
    ] = ServerConfig.access_log,
    engine: ServingOptions = SERVING,
) -> None:
    """Serve a model over HTTP, as OpenAI's API; see docs/serving.md."""
    try:
        from ..server.run import serve
    except ModuleNotFoundError as error:
        raise OptionError(f"{error.name} is not installed", "pip install 'thinrank[serve]'") from error

    config = ServerConfig(
        served_model_names=tuple(served_model_name or [model]),
        host=host,
        port=port,
        api_keys=(*(api_key or ()), *(_read_keys(api_key_file) if api_key_file else ())),
        chat_template=None if chat_template is None else read_template(chat_template),
        generation_config=generation_config,
        allowed_origins=tuple(allowed_origins or ()),
        max_request_bytes=parse_size("--max-request-size", max_request_size),
        max_concurrent_requests=max_concurrent_requests,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        access_log=access_log,
    )
    serve(
        partial(engine.load, model),
        config,
        on_ready=lambda url: output.write_notes([f"serving {config.served_model_names[0]} at {url}/v1"]),
    )


def _read_keys(path: str) -> list[str]:
    lines = read_text_file(path, "the API keys", "check --api-key-file").splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise OptionError(f"{path} has no key", "write one a line, or leave --api-key-file out")
    return keys
