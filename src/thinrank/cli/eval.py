"""`thinrank eval`: measure what a model computes, not how fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from . import output
from .options import ComputeDtype, Device, Json, KVCacheMemory, MaxModelLen, Model, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from ..eval.fidelity import FidelityReport, FidelityRow
    from ..eval.perplexity_report import PerplexityReport
    from ..eval.tasks import TaskRow, TasksReport

evaluate = typer.Typer(
    help="Measure what a model computes: against float32 arithmetic, on text, and on tasks."
)

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
        command=output.command_line(),
        on_progress=output.progress(),
    )
    if json:
        output.write_json_line(report.to_json())
    else:
        header = report.header
        facts = [
            f"prompts    {header['num_prompts']}, {header['prompt_tokens']:,} tokens, {header['prompts']}",
            f"reference  {header['reference']}",
            f"weights    {header['weights']}",
        ]
        output.write_lines([*output.measured_on(header), *facts])
        output.print_table(_fidelity_table(report))


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
        command=output.command_line(),
        progress=output.show_progress(),
        on_progress=output.progress(),
    )
    if json:
        output.write_json_line(report.to_json())
    else:
        header = report.header
        split = "" if header["split"] is None else f", {header['split']}"
        facts = [
            f"text       {header['dataset']}{split}",
            f"protocol   windows of {header['window']} tokens, stride {header['stride']}, each on its own, "
            f"BOS {header['bos']}, path {header['path']}",
        ]
        output.write_lines([*output.measured_on(header), *facts])
        output.print_table(_perplexity_table(report))


@evaluate.command()
def tasks(
    model: Model,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Tasks or groups of lm-evaluation-harness, globs, or YAML files."
        ),
    ],
    include_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="A folder of further task files.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples in each prompt.", show_default="as the task says")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="Documents of each task, or a share below 1.", show_default="all")
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Sequences of a forward pass, or auto.")] = "auto",
    gen_kwargs: Annotated[
        str | None,
        typer.Option(metavar="NAME=VALUE,...", help="Of tasks that generate, such as max_gen_toks=64."),
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Write prompts as chat.")
    ] = False,
    system_instruction: Annotated[str | None, typer.Option(help="Text before each prompt.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the choice of examples.", show_default="the harness's own")
    ] = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory: KVCacheMemory = None,
    dtype: ComputeDtype = "auto",
    device: Device = "auto",
    output_json: OutputJson = None,
    json: Json = False,
) -> None:
    """Scores on tasks of lm-evaluation-harness, or on your own in its format.

    Needs: pip install 'thinrank\\[lm-eval]'.
    """
    from ..eval.tasks import tasks as run

    report = run(
        model,
        tasks=[name for name in tasks.split(",") if name],
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        gen_kwargs=gen_kwargs,
        apply_chat_template=apply_chat_template,
        system_instruction=system_instruction,
        seed=seed,
        max_model_len=max_model_len,
        kv_cache_memory=None if kv_cache_memory is None else parse_size("--kv-cache-memory", kv_cache_memory),
        dtype=dtype,
        device=device,
        output_json=output_json,
        command=output.command_line(),
        progress=output.show_progress(),
        on_progress=output.progress(),
    )
    if json:
        output.write_json_line(report.to_json())
    else:
        header = report.header
        facts = [
            f"harness    lm-evaluation-harness {header['lm_eval']}",
            f"model      {header['checkpoint']}, keep_ratio {header['keep_ratio']:.3g}, {header['dtype']}",
        ]
        output.write_lines([*output.measured_on(header), *facts])
        output.print_table(_tasks_table(report))


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


def _tasks_table(report: TasksReport) -> Table:
    from rich.table import Table

    table = Table("task", "filter", "metric")
    for column in _TASKS_COLUMNS:
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(row.task, row.filter, row.metric, *(cell(row) for cell in _TASKS_COLUMNS.values()))
    return table


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


#: Title -> a cell from a row.
_TASKS_COLUMNS: dict[str, Callable[[TaskRow], str]] = {
    "few-shot": lambda row: _optional(row.num_fewshot, "d"),
    "documents": lambda row: _optional(row.samples, ",d"),
    "value": lambda row: _optional(row.value, ",.4f"),
    "stderr": lambda row: _optional(row.stderr, ".4f"),
    "better": lambda row: {True: "higher", False: "lower", None: "-"}[row.higher_is_better],
}
