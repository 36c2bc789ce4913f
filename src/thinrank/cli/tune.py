"""`thinrank tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import output
from .options import (
    ComputeDtype,
    Device,
    Json,
    OptionalModel,
    RandomKeepRatio,
    RandomShape,
    RandomStructure,
)

if TYPE_CHECKING:
    from ..bench.tune import TuneReport


def tune(
    model: OptionalModel = None,
    shape: RandomShape = None,
    structure: RandomStructure = "uniform",
    keep_ratio: RandomKeepRatio = 0.5,
    layers: Annotated[
        int | None,
        typer.Option(help="Time a step of this many layers.", show_default="enough to exceed the L2 cache"),
    ] = None,
    dtype: ComputeDtype = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    output_file: Annotated[
        str | None,
        typer.Option(
            "--output", metavar="FILE", help="Write here.", show_default="the user's file for this card"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Find the fastest launch settings for a model's shapes on this GPU, by trial; takes minutes.

    They are kept for the card, with those of other shapes, and every later run takes them from there.
    """
    from ..bench.tune import tune

    report = tune(
        model,
        shape=shape,
        structure=structure,
        keep_ratio=keep_ratio,
        layers=layers,
        dtype=dtype,
        device=device,
        seed=seed,
        output=output_file,
        on_progress=output.progress(),
    )
    if json:
        output.write_json(report.to_json())
    else:
        _print(report)


def _print(report: TuneReport) -> None:
    from rich.table import Table

    title = f"{report.device}: a step of {report.layers} layers and the head"
    table = Table("launch", "matrix", "before", "after", title=title, title_justify="left")
    for column in ("us before", "us after", "trials"):
        table.add_column(column, justify="right")
    for tuned in report.launches:
        table.add_row(
            tuned.launch.op,
            tuned.launch.shape,
            str(tuned.before),
            "the same" if tuned.after == tuned.before else str(tuned.after),
            f"{tuned.step_us_before:.1f}",
            f"{tuned.step_us_after:.1f}",
            str(tuned.trials),
        )
    output.print_table(table)
    steps = zip(report.batch_sizes, report.step_us_before, report.step_us_after, strict=True)
    output.write_lines(
        [
            *(f"batch {size}   {before:.1f} -> {after:.1f} us a step" for size, before, after in steps),
            f"written   {report.file}, which has {report.entries} launches",
        ]
    )
