"""`thinrank plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from . import output
from .options import Json, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from ..planning import Plan
    from ..planning.choice import Choice


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
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Cards that share the work, in vLLM: numbers are those of each.")
    ] = 1,
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
        tensor_parallel_size=tensor_parallel_size,
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
    count = planned.tensor_parallel_size
    cards = f"{count} times " if count > 1 else ""
    name = card.name or ("one" if count > 1 else "as given")
    sequences = "1 sequence" if planned.batch_size == 1 else f"{planned.batch_size} sequences"
    return [
        f"model    {planned.model}",
        f"card     {cards}{name}: {output.format_bytes(card.memory)}{speed}, of which "
        f"{output.format_bytes(planned.reserved_memory)} are kept free",
        f"context  {sequences} of {planned.context:,} tokens",
    ]


def _table(planned: Plan) -> Table:
    from rich.table import Table

    table = Table("keep_ratio", box=None, pad_edge=False)  # all of it within 80 columns
    columns = _columns(planned)
    for column in columns:
        table.add_column(column, justify="right")
    for choice in planned.choices:
        name = choice.name.removeprefix("keep_ratio ").removesuffix("-bit")
        table.add_row(name, *(cell(choice) for cell in columns.values()))
    return table


def _columns(planned: Plan) -> dict[str, Callable[[Choice], str]]:
    """What is shown of a choice, by the names of the columns."""
    columns: dict[str, Callable[[Choice], str]] = {
        "params": lambda choice: f"{choice.parameters / 1e9:.2f}",
        "weights": lambda choice: _gibibytes(choice.weight_bytes),
        "KV": lambda choice: _gibibytes(choice.kv_bytes),
        "lr KV": lambda choice: _gibibytes(choice.low_rank_kv_bytes),
        "fits": lambda choice: "yes" if choice.fits else "no",
        "longest": lambda choice: f"{choice.longest_context:,}",
        "reads": lambda choice: _gibibytes(choice.step_bytes),
        "sends": lambda choice: f"{choice.sent_bytes / 2**10:,.0f}",
        "ms/token": lambda choice: _time(choice.tpot_ms),
        "floor": lambda choice: _time(choice.floor_ms),
        "tok/s": lambda choice: _time(choice.tokens_per_s),
    }
    hidden = {"reads", "sends"} if planned.tensor_parallel_size == 1 else {"lr KV", "ms/token", "tok/s"}
    if planned.card.bandwidth is None:
        hidden |= {"ms/token", "floor", "tok/s"}
    return {name: cell for name, cell in columns.items() if name not in hidden}


def _gibibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"


def _time(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}" if number < 10 else f"{number:.1f}"


def _legend(planned: Plan) -> list[str]:
    divided = planned.tensor_parallel_size > 1
    timed = planned.card.bandwidth is not None
    lines = ["params    in billions; 'dense 8' and 'dense 4': weights quantised to so many bits"]
    if divided:
        lines += [
            "weights   in GiB of each card, as are KV, and reads: weights and cache that a step reads",
            "sends     KiB that each card sends to others for a token of every sequence",
        ]
    else:
        lines.append("KV        in GiB, as are weights; lr KV: if the cache kept latents, which it does not")
    lines.append("longest   context of each sequence that fits, in tokens")
    if timed and not divided:
        lines += [
            f"ms/token  predicted, within {planned.tolerance:.0%} of what was measured on an H200; other cards are",
            "          assumed to reach the same share of their bandwidth; quantised: as gpt-fast",
        ]
    if timed:
        lines.append("floor     ms to read the bytes at the datasheet's bandwidth: nothing is faster")
    if divided:
        lines.append("          No time is predicted: none was measured on several cards.")
    return lines
