"""`thinrank eval`: measure what a model computes, not how fast."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import output
from .options import ComputeDtype, Device, Json, Model

if TYPE_CHECKING:
    from rich.table import Table

    from ..eval.fidelity import FidelityReport, FidelityRow
    from ..eval.perplexity_report import PerplexityReport

evaluate = typer.Typer(help="Measure what a model computes: against float32 arithmetic, and on text.")

OutputJson = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the result here, after every row.")
]


@evaluate.command()
def fidelity(
    model: Model,
    num_prompts: Annotated[int, typer.Option(help="Prompts to continue.")] = 20,
    prompt_len: Annotated[int, typer.Option(help="Tokens of a built-in prompt.")] = 64,
    output_len: Annotated[int, typer.Option(help="Tokens of a continuation.")] = 64,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Prompts, one a line; in a .jsonl file {"prompt": text}.',
            show_default="pieces of a built-in English text",
        ),
    ] = None,
    hf: Annotated[
        bool, typer.Option("--hf/--no-hf", help="Also run Hugging Face transformers, StaticCache, eager.")
    ] = True,
    dtype: ComputeDtype = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Of random prompts, for a model without a tokenizer.")] = 0,
    output_json: OutputJson = None,
    json: Json = False,
) -> None:
    """Logits and greedy tokens of every path beside float32 arithmetic on the same weights.

    Teacher-forced on the float32 model's own greedy continuations: KL divergence, difference of logits and
    top-1 agreement. Then greedily: tokens that are equal to the float32 model's.
    """
    from ..eval.fidelity import fidelity

    report = fidelity(
        model,
        num_prompts=num_prompts,
        prompt_len=prompt_len,
        output_len=output_len,
        prompts=prompts,
        hf=hf,
        dtype=dtype,
        device=device,
        seed=seed,
        output_json=output_json,
        command=_command(),
        on_progress=_progress(),
    )
    if json:
        output.write(dumps(report.to_json(), allow_nan=False) + "\n")
    else:
        header = report.header
        facts = [
            f"prompts    {header['num_prompts']}, {header['prompt_tokens']:,} tokens, {header['prompts']}",
            f"reference  {header['reference']}",
            f"weights    {header['weights']}",
        ]
        _print(report.header, facts, _fidelity_table(report))


@evaluate.command()
def perplexity(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Folders, such as a dense model and a low-rank one."),
    ],
    text: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="builtin, wikitext2, c4, or a text file.")
    ] = "builtin",
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between the starts of windows.", show_default="--window")
    ] = None,
    max_windows: Annotated[
        int | None, typer.Option(help="Score only the first ones.", show_default="all")
    ] = None,
    path: Annotated[
        str,
        typer.Option(help="prefill, or decode to feed the tokens one by one through the decode kernels."),
    ] = "prefill",
    dtype: ComputeDtype = "auto",
    device: Device = "auto",
    output_json: OutputJson = None,
    json: Json = False,
) -> None:
    """Perplexity on a text, several models side by side, with the protocol that it was measured by."""
    from ..eval.perplexity_report import perplexities

    report = perplexities(
        models,
        text=text,
        window=window,
        stride=stride,
        max_windows=max_windows,
        path=path,
        dtype=dtype,
        device=device,
        output_json=output_json,
        command=_command(),
        progress=output.show_progress(),
        on_progress=_progress(),
    )
    if json:
        output.write(dumps(report.to_json(), allow_nan=False) + "\n")
    else:
        header = report.header
        split = "" if header["split"] is None else f", {header['split']}"
        facts = [
            f"text       {header['dataset']}{split}",
            f"protocol   windows of {header['window']} tokens, stride {header['stride']}, each on its own, "
            f"BOS {header['bos']}, path {header['path']}",
        ]
        _print(report.header, facts, _perplexity_table(report))


def _command() -> str:
    return shlex.join(["thinrank", *sys.argv[1:]])


def _progress() -> Callable[[str], None]:
    if not output.show_progress():
        return lambda text: None
    return lambda text: output.write_message("progress", text)


def _print(header: dict[str, Any], facts: list[str], table: Table) -> None:
    versions = [f"{name} {header[name]}" for name in ("torch", "triton", "transformers") if header[name]]
    output.write_lines(
        [
            f"device     {header['device']}, driver {header['driver'] or 'unknown'}",
            f"versions   thinrank {header['thinrank']}, {', '.join(versions)}, "
            f"commit {header['commit'] or 'unknown'}",
            *facts,
        ]
    )
    output.print_table(table)


def _fidelity_table(report: FidelityReport) -> Table:
    from rich.table import Table

    header = report.header
    title = (
        f"{header['checkpoint']}, keep_ratio {header['keep_ratio']:.3g}, {header['dtype']}, "
        f"{header['num_prompts']} prompts x {header['output_len']} tokens"
    )
    table = Table("system", "path", title=title, title_justify="left")
    for column in _FIDELITY_COLUMNS:
        table.add_column(column, justify="right")
    for row in report.rows:
        cells = (cell(row, header["num_prompts"]) for cell in _FIDELITY_COLUMNS.values())
        table.add_row(row.system, row.path, *cells)
    return table


def _share(value: float | None, count: int) -> str:
    return "-" if value is None else f"{value * count:.0f}/{count}"


#: Title -> a cell from a row and the number of prompts.
_FIDELITY_COLUMNS: dict[str, Callable[[FidelityRow, int], str]] = {
    "KL mean": lambda row, count: f"{row.kl_mean:.2e}",
    "KL max": lambda row, count: f"{row.kl_max:.2e}",
    "|dlogit| mean": lambda row, count: f"{row.logit_difference_mean:.2e}",
    "|dlogit| max": lambda row, count: f"{row.logit_difference_max:.2e}",
    "top-1": lambda row, count: f"{row.top1:.2%}",
    "exact": lambda row, count: _share(row.exact_match, count),
    "first token": lambda row, count: _share(row.first_token_match, count),
    "token match": lambda row, count: "-" if row.token_match is None else f"{row.token_match:.4f}",
}


def _perplexity_table(report: PerplexityReport) -> Table:
    from rich.table import Table

    first = report.rows[0]
    table = Table("model")
    for column in ("keep_ratio", "parameters", "dtype", "tokens", "scored", "perplexity", "of the first"):
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(
            row.model,
            f"{row.keep_ratio:.3g}",
            f"{row.parameters:,}",
            row.dtype,
            f"{row.tokens:,}",
            f"{row.predictions:,}",
            f"{row.perplexity:,.3f}",
            f"{row.perplexity / first.perplexity:.3f}x",
        )
    return table
