"""`thinrank plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import output
from .options import Json, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from ..planning import Plan


def plan(
    source: Annotated[
        str | None,
        typer.Argument(metavar="SRC", help="Folder of a dense model; its config.json is enough."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="A named shape, such as llama-7b, instead of SRC.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help='A card, such as H200 or "RTX 4090".', show_default="this machine's"
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="GB", help="Memory of the card, such as 24, instead of --gpu.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/s", help="With --memory: the datasheet's; without it no speed is predicted."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Prompt and output tokens of each sequence.", show_default="4096, or the model's limit"
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences that decode together, 1 to 8.")] = 1,
    json: Json = False,
) -> None:
    """Say what low-rank and quantised models would need and how fast they would be, before compressing."""
    from ..planning import plan

    planned = plan(
        source,
        shape=shape,
        gpu=gpu,
        memory=None
        if memory is None
        else parse_size("--memory", memory if memory[-1:].isalpha() else f"{memory}G"),
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
        context=context,
        batch_size=batch_size,
    )
    if json:
        output.write_json(planned.to_json())
    else:
        _print(planned)


def _print(planned: Plan) -> None:
    from rich.console import Console

    output.write_lines(_facts(planned))
    output.write("\n")
    Console(markup=False, highlight=False).print(_table(planned))
    output.write_lines(["", *_legend(planned), "", *planned.advice])


def _facts(planned: Plan) -> list[str]:
    card = planned.card
    speed = "" if card.bandwidth is None else f", {card.bandwidth / 1e9:,.0f} GB/s"
    sequences = "1 sequence" if planned.batch_size == 1 else f"{planned.batch_size} sequences"
    return [
        f"model    {planned.model}",
        f"card     {card.name or 'as given'}: {output.format_bytes(card.memory)}{speed}, of which "
        f"{output.format_bytes(planned.reserved_memory)} are kept free",
        f"context  {sequences} of {planned.context:,} tokens",
    ]


def _table(planned: Plan) -> Table:
    from rich.table import Table

    table = Table("keep_ratio", box=None, pad_edge=False)  # all of it within 80 columns
    timed = planned.card.bandwidth is not None
    for column in ("params", "weights", "KV", "lr KV", "fits", "longest"):
        table.add_column(column, justify="right")
    for column in ("ms/token", "floor", "tok/s") if timed else ():
        table.add_column(column, justify="right")
    for choice in planned.choices:
        latent = choice.low_rank_kv_bytes
        times = (choice.ms_per_token, choice.floor_ms, choice.tokens_per_s) if timed else ()
        table.add_row(
            choice.name.removeprefix("keep_ratio ").removesuffix("-bit"),
            f"{choice.parameters / 1e9:.2f}",
            f"{choice.weight_bytes / 2**30:.2f}",
            f"{choice.kv_bytes / 2**30:.2f}",
            "" if latent is None else f"{latent / 2**30:.2f}",
            "yes" if choice.fits else "no",
            f"{choice.longest_context:,}",
            *(f"{time:.2f}" if time < 10 else f"{time:.1f}" for time in times if time is not None),
        )
    return table


def _legend(planned: Plan) -> list[str]:
    lines = [
        "params    in billions; 'dense 8' and 'dense 4': weights quantised to so many bits",
        "KV        in GiB, as are weights; lr KV: if the cache kept latents, which it does not",
        "longest   context of each sequence that fits, in tokens",
    ]
    if planned.card.bandwidth is not None:
        lines += [
            f"ms/token  predicted, within {planned.tolerance:.0%} of what was measured on an H200; other cards are",
            "          assumed to reach the same share of their bandwidth; quantised: as gpt-fast",
            "floor     ms to read the bytes at the datasheet's bandwidth: nothing is faster",
        ]
    return lines
