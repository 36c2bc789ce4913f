"""`thinrank bench serve`."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from ..text_files import read_text_file
from . import output
from .options import Json

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.serving_result import ServingResult

#: Reasons for failures that are shown; the JSON has all.
MAX_REASONS = 5
#: Share of one core above which this process may be what was measured.
BUSY_CLIENT = 0.8


def serve(
    base_url: Annotated[str, typer.Option(metavar="URL", help="Of the server.")] = "http://127.0.0.1:8000",
    backend: Annotated[
        str, typer.Option(help="openai: /v1/completions. openai-chat: /v1/chat/completions.")
    ] = "openai",
    model: Annotated[
        str | None, typer.Option(help="Name of the model.", show_default="the server's first")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The model's tokenizer.", show_default="the server's /tokenize"),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent to the server.")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Its first line is the key, out of sight of ps.")
    ] = None,
    dataset_name: Annotated[str, typer.Option(help="random.")] = "random",
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    random_prefix_len: Annotated[int, typer.Option(help="Further tokens, which all prompts share.")] = 0,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths vary by this share, up and down; less than 1.")
    ] = 0.0,
    num_prompts: Annotated[int, typer.Option(help="Requests to measure.")] = 1000,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second, in a Poisson process; inf: all at once.")
    ] = inf,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests at a time at most.", show_default="no limit")
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before, which do not count.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Every output has its full length; not all servers can.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of prompts and times.")] = 0,
    percentile_metrics: Annotated[
        str, typer.Option(metavar="A,B,...", help="Which of ttft, tpot, itl, e2el.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(metavar="A,B,...", help="Percentiles of them.")] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Count requests within this limit of ttft, tpot or e2el. May be repeated.",
        ),
    ] = None,
    output_json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the result here.")] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write it to a file named after the run.")
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Every request's times, too.")
    ] = False,
    json: Json = False,
) -> None:
    """Put load on an OpenAI-compatible server: throughput, and latency as its clients see it.

    Options and the keys of the JSON are those of vllm bench serve; see docs/serving.md.
    """
    try:
        from ..bench.serving import serving
    except ModuleNotFoundError as error:
        raise OptionError(f"{error.name} is not installed", "pip install 'thinrank[bench]'") from error

    result = serving(
        base_url,
        backend=backend,
        model=model,
        tokenizer=tokenizer,
        api_key=_first_line(api_key_file) if api_key_file else api_key,
        dataset_name=dataset_name,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_prefix_len=random_prefix_len,
        random_range_ratio=random_range_ratio,
        num_prompts=num_prompts,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        num_warmups=num_warmups,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
        percentile_metrics=[name.strip() for name in percentile_metrics.split(",")],
        metric_percentiles=_percentiles(metric_percentiles),
        goodput=goodput or (),
        output_json=output_json,
        save_result=save_result,
        save_detailed=save_detailed,
        progress=output.show_progress(),
    )
    if json:
        output.write_json_line(result.to_json(save_detailed))
        return
    output.write_lines(_lines(result))
    output.print_table(_table(result))
    output.write_notes(_notes(result))


def _percentiles(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(
            f"--metric-percentiles is {text!r}", "give numbers with commas between them"
        ) from error


def _first_line(path: str) -> str:
    return read_text_file(path, "the API key", "check --api-key-file").partition("\n")[0].strip()


def _lines(result: ServingResult) -> list[str]:
    settings = result.settings
    rate, concurrency = settings["request_rate"], settings["max_concurrency"]
    total = result.total_input_tokens
    cached = (
        "" if result.total_cached_tokens is None else f", {result.total_cached_tokens / total:.1%} cached"
    )
    lines = [
        f"server      {settings['base_url']}, {settings['model_id']}, {settings['backend']}",
        f"load        {settings['num_prompts']} requests, "
        + ("all at once" if rate == "inf" else f"{rate:g} a second")
        + ("" if concurrency is None else f", at most {concurrency} at a time"),
        f"completed   {result.completed} in {result.duration:.2f} s, "
        f"up to {result.max_concurrent_requests} at a time",
        f"failed      {result.failed}",
        *(f"            {count}: {reason}" for reason, count in list(result.failures.items())[:MAX_REASONS]),
        f"tokens      {total} in{cached}, {result.total_output_tokens} out",
        f"requests/s  {result.request_throughput:.2f}",
    ]
    if result.request_goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in settings["goodput"].items())
        lines.append(f"goodput/s   {result.request_goodput:.2f} within {limits}")
    return [
        *lines,
        f"tokens/s    {result.output_throughput:.2f} out, {result.total_token_throughput:.2f} in and out",
    ]


def _table(result: ServingResult) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("ms")
    percentiles = next(iter(result.statistics.values())).percentiles
    for name in ("mean", "median", "std", *(f"p{number:g}" for number in percentiles)):
        table.add_column(name, justify="right")
    for metric, values in result.statistics.items():
        numbers = (values.mean, values.median, values.std, *values.percentiles.values())
        table.add_row(metric.upper(), *("-" if value is None else f"{value:.2f}" for value in numbers))
    return table


def _notes(result: ServingResult) -> list[str]:
    """What makes the numbers doubtful."""
    notes = []
    if not result.counted:
        notes.append("note: the server does not count tokens; an event was taken for one")
    if result.client_cpu_share > BUSY_CLIENT:
        notes.append(
            f"note: this client was busy for {result.client_cpu_share:.0%} of the time and may be what was measured; "
            "lower the load, or share it among several"
        )
    return notes
