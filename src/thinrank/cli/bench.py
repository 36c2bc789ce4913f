"""`thinrank bench`: measure speed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from . import output
from .options import Device, Json

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.latency import LatencyReport, LatencyRow

bench = typer.Typer(help="Measure speed: thinrank beside Hugging Face, a compiler, int4 and the dense model.")


@bench.callback()
def _group() -> None:
    """Keeps `latency` a command of its own while there is only one."""


@bench.command()
def latency(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Folder that thinrank convert wrote, or a dense model."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Random weights instead of MODEL: llama-7b, llama-13b, llama3-8b, mistral-7b, qwen2.5-7b, "
            "smollm2-135m.",
        ),
    ] = None,
    structure: Annotated[
        str, typer.Option(help="Of --shape: uniform, hetero, shared2, mixed or dense.")
    ] = "uniform",
    keep_ratio: Annotated[
        float, typer.Option(help="Of --shape: share of the layers' linear parameters.")
    ] = 0.5,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.")] = 1,
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
    dtype: Annotated[
        str,
        typer.Option(help="auto, float32, float16 or bfloat16. auto: as stored; bfloat16 for --shape."),
    ] = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Of the random weights and prompts.")] = 0,
    output_json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the result here, after every system.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only compare the logits with the float32 reference.")
    ] = False,
    json: Json = False,
) -> None:
    """Time to the first token and time per token, after a check that the logits are right."""
    from ..bench.latency import latency

    report = latency(
        model,
        shape=shape,
        structure=structure,
        keep_ratio=keep_ratio,
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        baseline=["thinrank-dense"] if baseline is None else baseline,
        dtype=dtype,
        device=device,
        seed=seed,
        output_json=output_json,
        verify=verify,
        command=shlex.join(["thinrank", *sys.argv[1:]]),
        on_progress=_show if output.show_progress() else lambda text: None,
    )
    if json:
        output.write(dumps(report.to_json(), allow_nan=False) + "\n")  # one line: the last of a log
    else:
        _print(report)


def _show(text: str) -> None:
    output.write_message("progress", text)


def _print(report: LatencyReport) -> None:
    from rich.console import Console

    header = report.header
    bandwidth = header["read_bandwidth_bytes_per_s"]
    versions = [f"{name} {header[name]}" for name in ("torch", "triton", "transformers") if header[name]]
    lines = [
        f"device     {header['device']}, driver {header['driver'] or 'unknown'}",
        f"versions   thinrank {header['thinrank']}, {', '.join(versions)}, "
        f"commit {header['commit'] or 'unknown'}",
        *(
            []
            if bandwidth is None
            else [f"bandwidth  {bandwidth / 1e12:.3f} TB/s read, measured in this run"]
        ),
        *(
            f"checked    {check.system}: {check.check} within {check.error:.2g} of float32 "
            f"(allowed {check.bound:.2g})"
            for check in report.checks
        ),
    ]
    output.write_lines(lines)
    if report.rows:
        # A pipe has no width; a table that is cut there would be no use.
        width = None if sys.stdout.isatty() else 200
        Console(markup=False, highlight=False, width=width).print(_table(report))


def _table(report: LatencyReport) -> Table:
    from rich.table import Table

    first = report.rows[0]
    title = (
        f"{first.shape}, {first.structure}, keep_ratio {first.keep_ratio:.3g}, {report.header['dtype']}, "
        f"batch {first.batch_size}, {first.input_len} tokens in, {first.output_len} out"
    )
    table = Table("system", title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(row.system, *(cell(row, first) for cell in _COLUMNS.values()))
    return table


def _optional(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


#: Title -> a cell from a row and the first row, which is thinrank's.
_COLUMNS: dict[str, Callable[[LatencyRow, LatencyRow], str]] = {
    "TTFT ms": lambda row, first: f"{row.ttft_ms:.2f}",
    "ms/token": lambda row, first: f"{row.tpot_ms_p50:.3f}",
    "p20": lambda row, first: f"{row.tpot_ms_p20:.3f}",
    "p80": lambda row, first: f"{row.tpot_ms_p80:.3f}",
    "thinrank is": lambda row, first: f"{row.tpot_ms_p50 / first.tpot_ms_p50:.2f}x",
    "MBU": lambda row, first: f"{row.mbu:.1%}",
    "read/step": lambda row, first: output.format_bytes(row.bytes_per_step),
    "launches/token": lambda row, first: _optional(row.launches_per_token, "{:.0f}"),
    "load s": lambda row, first: f"{row.load_s:.1f}",
    "warm-up s": lambda row, first: f"{row.warmup_s:.1f}",
    "memory": lambda row, first: (
        "-" if row.peak_memory_bytes is None else output.format_bytes(row.peak_memory_bytes)
    ),
    "J/token": lambda row, first: _optional(row.joules_per_token, "{:.3f}"),
}
