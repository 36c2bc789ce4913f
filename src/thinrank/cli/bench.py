"""`thinrank bench`: measure speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..errors import OptionError
from . import output
from .bench_serve import serve
from .options import Device, Explain, Json, OptionalModel, RandomKeepRatio, RandomShape, RandomStructure

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.ablation import AblationRow
    from ..bench.latency import LatencyRow
    from ..bench.report import Report, Row
    from ..bench.sweep import SweepRow
    from ..bench.throughput import ThroughputRow

Number = TypeVar("Number", int, float)

bench = typer.Typer(help="Measure speed: thinrank beside Hugging Face, a compiler, int4 and the dense model.")
bench.command()(serve)


Shape = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Random weights: llama-7b, llama-13b, llama3-8b, mistral-7b, qwen2.5-7b, smollm2-135m.",
    ),
]
RandomDtype = Annotated[str, typer.Option("--dtype", help="float32, float16 or bfloat16.")]
MeasuredDtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="auto, float32, float16 or bfloat16. auto: as stored; bfloat16 for --shape."
    ),
]
Warmup = Annotated[int, typer.Option(help="Measurements before them that do not count.")]
RandomSeed = Annotated[int, typer.Option(help="Of the random weights and prompts.")]
OutputJson = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the result here, also while measuring goes on.")
]


@bench.command()
def latency(
    model: OptionalModel = None,
    shape: RandomShape = None,
    structure: RandomStructure = "uniform",
    keep_ratio: RandomKeepRatio = 0.5,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.")] = 1,
    temperature: Annotated[
        float, typer.Option(help="Above 0, thinrank samples; baselines stay greedy.")
    ] = 0.0,
    num_iters: Annotated[int, typer.Option(help="Generations to measure.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(help="Generations before them.")] = 2,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="thinrank-dense, hf-static, hf-static-dense, hf-compile, compiled, compiled-dense, "
            "int4-dense, densekv, or all. May be repeated.",
            show_default="thinrank-dense",
        ),
    ] = None,
    dtype: MeasuredDtype = "auto",
    device: Device = "auto",
    seed: RandomSeed = 0,
    output_json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the result here, after every system.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only compare the logits with the float32 reference.")
    ] = False,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Time to the first token and time per token, after a check that the logits are right."""
    from ..bench.latency import latency

    run = partial(
        latency,
        model,
        shape=shape,
        structure=structure,
        keep_ratio=keep_ratio,
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        temperature=temperature,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        baseline=["thinrank-dense"] if baseline is None else baseline,
        dtype=dtype,
        device=device,
        seed=seed,
        output_json=output_json,
        verify=verify,
        explain=explain,
    )
    _report(run, json, _latency_table)


@bench.command()
def ablation(
    shape: Shape = "llama-7b",
    keep_ratio: Annotated[
        float, typer.Option(help="Share of the layers' linear parameters in the low-rank model.")
    ] = 0.5,
    context_len: Annotated[int, typer.Option(help="Tokens that a step attends to.")] = 512,
    num_iters: Annotated[int, typer.Option(help="Windows of 16 steps to measure.")] = 20,
    num_iters_warmup: Warmup = 3,
    dtype: RandomDtype = "bfloat16",
    device: Device = "auto",
    seed: RandomSeed = 0,
    output_json: OutputJson = None,
    json: Json = False,
) -> None:
    """What each mechanism of a decode step gives: alone, one after the other, and taken away.

    Dense keys and values, packing, CUDA graphs, programmatic launch; on the low-rank and the dense model.
    """
    from ..bench.ablation import ablation

    run = partial(
        ablation,
        shape,
        keep_ratio=keep_ratio,
        context_len=context_len,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        dtype=dtype,
        device=device,
        seed=seed,
        output_json=output_json,
    )
    title = "{shape}, {structure}, keep_ratio {keep_ratio:.3g}, {dtype}, batch 1, context {context_len}"
    _report(run, json, lambda report: _table(title.format(**report.header), report.rows, _ABLATION_COLUMNS))


@bench.command()
def sweep(
    shape: Shape = "llama-7b",
    structure: Annotated[str, typer.Option(help="uniform, hetero, shared2 or mixed.")] = "uniform",
    keep_ratios: Annotated[
        str, typer.Option(metavar="A,B,...", help="Shares of the linear parameters; 1 is the dense model.")
    ] = "0.3,0.5,0.7,1.0",
    input_lens: Annotated[
        str, typer.Option(metavar="A,B,...", help="Prompt lengths, for the time to the first token.")
    ] = "512,2048,8192",
    context_lens: Annotated[
        str, typer.Option(metavar="A,B,...", help="Tokens in the cache, for the time per token.")
    ] = "512,2048,8192,16384",
    num_iters: Annotated[int, typer.Option(help="Prompts, and windows of 64 steps, to measure.")] = 10,
    num_iters_warmup: Warmup = 2,
    dtype: RandomDtype = "bfloat16",
    device: Device = "auto",
    seed: RandomSeed = 0,
    output_json: OutputJson = None,
    json: Json = False,
) -> None:
    """Time to the first token by prompt length, time per token by context, for several keep_ratios."""
    from ..bench.sweep import sweep

    run = partial(
        sweep,
        shape,
        structure=structure,
        keep_ratios=_numbers("--keep-ratios", keep_ratios, float),
        input_lens=_numbers("--input-lens", input_lens, int),
        context_lens=_numbers("--context-lens", context_lens, int),
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        dtype=dtype,
        device=device,
        seed=seed,
        output_json=output_json,
    )
    title = "{shape}, {dtype}, batch 1"
    _report(run, json, lambda report: _table(title.format(**report.header), report.rows, _SWEEP_COLUMNS))


@bench.command()
def throughput(
    model: OptionalModel = None,
    shape: RandomShape = None,
    structure: RandomStructure = "uniform",
    keep_ratio: RandomKeepRatio = 0.5,
    streams: Annotated[
        str, typer.Option(metavar="A,B,...", help="Numbers of requests at a time.")
    ] = "1,8,32,64",
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 256,
    output_len: Annotated[int, typer.Option(help="Tokens that each generates.")] = 128,
    prefix_len: Annotated[
        int,
        typer.Option(help="Tokens of a prompt that shares all but its end with an earlier one; 0 for none."),
    ] = 2048,
    num_iters: Annotated[int, typer.Option(help="Runs to measure.")] = 3,
    num_iters_warmup: Annotated[int, typer.Option(help="Runs before them that do not count.")] = 1,
    dtype: MeasuredDtype = "auto",
    device: Device = "auto",
    seed: RandomSeed = 0,
    output_json: OutputJson = None,
    json: Json = False,
) -> None:
    """Many requests at a time in one engine, low-rank beside dense, and what a shared prompt saves.

    All requests of a run arrive at once. For a server over HTTP: thinrank bench serve.
    """
    from ..bench.throughput import throughput

    run = partial(
        throughput,
        model,
        shape=shape,
        structure=structure,
        keep_ratio=keep_ratio,
        streams=_numbers("--streams", streams, int),
        input_len=input_len,
        output_len=output_len,
        prefix_len=prefix_len,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        dtype=dtype,
        device=device,
        seed=seed,
        output_json=output_json,
    )
    _report(run, json, _throughput_table)


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """The numbers of "512,2048"; none of an empty text. Raises OptionError that names the option."""
    try:
        return [kind(part) for part in text.split(",") if text.strip()]
    except ValueError as error:
        raise OptionError(f"{option} is {text!r}", "give numbers with commas between them") from error


def _report(measure: Callable[..., Report[Row]], json: bool, table: Callable[[Report[Row]], Table]) -> None:
    """Measure and print: one line of JSON, the last of a log; or where and how, and the table if there are rows.

    measure: a library call that lacks what only the command line knows.
    """
    report = measure(command=output.command_line(), on_progress=output.progress())
    if json:
        output.write_json_line(report.to_json())
        return
    header = report.header
    bandwidth = header["read_bandwidth_bytes_per_s"]
    lines = [
        *output.measured_on(header),
        *(
            []
            if bandwidth is None
            else [f"bandwidth  {bandwidth / 1e12:.3f} TB/s read, measured in this run"]
        ),
        *(
            f"checked    {check.system}: {check.check} within {check.error:.2g} of {check.reference} "
            f"(allowed {check.bound:.2g})"
            for check in report.checks
        ),
    ]
    for system, explanation in header.get("explained", {}).items():
        lines += [f"explained  {system}", *(f"  {line}" for line in explanation)]
    output.write_lines(lines)
    if report.rows:
        output.print_table(table(report))


def _table(title: str, rows: Iterable[Any], columns: dict[str, Callable[[Any], str]]) -> Table:
    """The first column is text, the others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _latency_table(report: Report[LatencyRow]) -> Table:
    first = report.rows[0]
    title = (
        f"{first.shape}, {first.structure}, keep_ratio {first.keep_ratio:.3g}, {report.header['dtype']}, "
        f"batch {first.batch_size}, {first.input_len} tokens in, {first.output_len} out"
        + (f", thinrank at temperature {first.temperature:g}" if first.temperature else "")
    )
    return _table(title, report.rows, _latency_columns(first))


def _optional(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


def _latency_columns(first: LatencyRow) -> dict[str, Callable[[LatencyRow], str]]:
    """Title -> a cell from a row. first: thinrank's."""
    return {
        "system": lambda row: row.system,
        "TTFT ms": lambda row: f"{row.ttft_ms:.2f}",
        "ms/token": lambda row: f"{row.tpot_ms_p50:.3f}",
        "p20": lambda row: f"{row.tpot_ms_p20:.3f}",
        "p80": lambda row: f"{row.tpot_ms_p80:.3f}",
        "thinrank is": lambda row: f"{row.tpot_ms_p50 / first.tpot_ms_p50:.2f}x",
        "MBU": lambda row: f"{row.mbu:.1%}",
        "read/step": lambda row: output.format_bytes(row.bytes_per_step),
        "launches/token": lambda row: _optional(row.launches_per_token, "{:.0f}"),
        "load s": lambda row: f"{row.load_s:.1f}",
        "warm-up s": lambda row: f"{row.warmup_s:.1f}",
        "memory": lambda row: (
            "-" if row.peak_memory_bytes is None else output.format_bytes(row.peak_memory_bytes)
        ),
        "J/token": lambda row: _optional(row.joules_per_token, "{:.3f}"),
    }


def _step(row: AblationRow) -> str:
    """What a row measures, in words."""
    if row.series in ("base", "full"):
        return row.series
    return {"alone": "base, ", "ladder": "+ ", "without": "full, "}[row.series] + row.change


_ABLATION_COLUMNS: dict[str, Callable[[AblationRow], str]] = {
    "step": lambda row: f"{row.system}: {_step(row)}",
    "launches/token": lambda row: f"{row.launches_per_token:.0f}",
    "copies/token": lambda row: f"{row.copies_per_token:.0f}",
    "host ms": lambda row: f"{row.host_ms:.3f}",
    "ms/token": lambda row: f"{row.tpot_ms_p50:.3f}",
    "p20": lambda row: f"{row.tpot_ms_p20:.3f}",
    "p80": lambda row: f"{row.tpot_ms_p80:.3f}",
    "factor": lambda row: f"{row.factor:.2f}x",
    "gain": lambda row: f"{row.gain:.2f}x",
}

_SWEEP_COLUMNS: dict[str, Callable[[SweepRow], str]] = {
    "keep_ratio": lambda row: f"{row.keep_ratio:g} {row.structure}",
    "tokens in": lambda row: _optional(row.input_len, "{}"),
    "TTFT ms": lambda row: _optional(row.ttft_ms, "{:.2f}"),
    "context": lambda row: _optional(row.context_len, "{}"),
    "ms/token": lambda row: _optional(row.tpot_ms_p50, "{:.3f}"),
    "p20": lambda row: _optional(row.tpot_ms_p20, "{:.3f}"),
    "p80": lambda row: _optional(row.tpot_ms_p80, "{:.3f}"),
    "MBU": lambda row: _optional(row.mbu, "{:.1%}"),
    "read/step": lambda row: "-" if row.bytes_per_step is None else output.format_bytes(row.bytes_per_step),
}


def _throughput_table(report: Report[ThroughputRow]) -> Table:
    """Beside what was measured: how it compares to fewer streams of the same system, and to the dense model."""
    title = f"{report.header['shape']}, {report.header['dtype']}"
    least = min(row.streams for row in report.rows if row.tpot_ms is not None)
    one_user = {row.system: row.tpot_ms for row in report.rows if row.tpot_ms and row.streams == least}
    dense = {row.streams: row.decode_tokens_per_s for row in report.rows if row.structure == "dense"}

    def factor(value: float | None, of: float | None) -> str:
        return f"{value / of:.2f}x" if value and of else "-"

    columns: dict[str, Callable[[ThroughputRow], str]] = {
        "system": lambda row: f"{row.system} {row.keep_ratio:.3g}",
        "streams": lambda row: f"{row.streams}",
        "tokens in": lambda row: f"{row.input_len}",
        "cached": lambda row: f"{row.cached_len}",
        "out": lambda row: f"{row.output_len}",
        "TTFT ms": lambda row: f"{row.ttft_ms:.2f}",
        "ms/token": lambda row: _optional(row.tpot_ms, "{:.3f}"),
        f"of {least}": lambda row: factor(row.tpot_ms, one_user[row.system]),
        "gap p99 ms": lambda row: _optional(row.itl_ms_p99, "{:.2f}"),
        "decode tok/s": lambda row: _optional(row.decode_tokens_per_s, "{:.1f}"),
        "of dense": lambda row: factor(row.decode_tokens_per_s, dense.get(row.streams)),
        "tok/s in all": lambda row: _optional(row.output_tokens_per_s, "{:.1f}"),
    }
    return _table(title, report.rows, columns)
