"""`thinrank inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import output
from .options import Json, Model, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from ..checkpoint.inspect import Inspection


def inspect(
    path: Model,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Say the longest context that fits, such as 24G.",
            show_default="common GPU sizes",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say what a checkpoint is, its ranks, its size and what it needs to run. Reads no tensor data."""
    from ..checkpoint.inspect import COMMON_MEMORY, inspect

    sizes = COMMON_MEMORY if memory is None else (parse_size("--memory", memory),)
    inspection = inspect(path, sizes)
    if json:
        output.write_json(inspection.to_json())
    else:
        _print(inspection)


def _print(inspection: Inspection) -> None:
    from rich.console import Console

    output.write_lines(_facts(inspection))
    console = Console(markup=False, highlight=False)
    if inspection.ranks:
        console.print(_rank_table(inspection))
    console.print(_memory_table(inspection))


def _facts(facts: Inspection) -> list[str]:
    share = facts.parameters / facts.dense_parameters
    step_share = facts.decode_step_bytes / facts.dense_decode_step_bytes
    source = [f"{key} {value}" for key, value in facts.source.items() if value is not None]
    shared = f", {facts.tied_factors} share another layer's factor_in" if facts.tied_factors else ""
    return [
        f"checkpoint   {facts.path}",
        f"architecture {facts.model_type}, {facts.num_hidden_layers} layers, "
        f"{facts.max_position_embeddings:,} positions",
        f"source       {', '.join(source) or 'dense'}",
        f"projections  {facts.low_rank_modules} low-rank, {facts.dense_modules} dense{shared}",
        f"parameters   {facts.parameters:,} of {facts.dense_parameters:,} ({share:.1%})",
        f"dtypes       {', '.join(f'{name}: {count:,}' for name, count in facts.dtypes.items())}",
        f"size         {output.format_bytes(facts.weight_bytes)} of weights, "
        f"{output.format_bytes(facts.disk_bytes)} on disk",
        f"KV cache     {output.format_bytes(facts.kv_bytes_per_token)} per token in 16 bits",
        f"decode step  reads {output.format_bytes(facts.decode_step_bytes)} in 16 bits "
        f"({step_share:.1%} of the dense model's)",
    ]


def _rank_table(inspection: Inspection) -> Table:
    from rich.table import Table

    table = Table("projection", title="Ranks", title_justify="left")
    for column in ("modules", "min", "median", "max"):
        table.add_column(column, justify="right")
    for name, ranks in inspection.ranks.items():
        table.add_row(name, *map(str, (ranks.modules, ranks.min, ranks.median, ranks.max)))
    return table


def _memory_table(inspection: Inspection) -> Table:
    from rich.table import Table

    table = Table(title="Longest context", title_justify="left")
    table.add_column("memory", justify="right")
    table.add_column("tokens (batch 1, 16 bits)", justify="right")
    for fit in inspection.fits:
        context = f"{fit.max_context:,}" if fit.max_context else "does not fit"
        table.add_row(output.format_bytes(fit.memory), context)
    return table
