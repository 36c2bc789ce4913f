"""`thinrank compress`."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output
from .options import Device, Force, Json, SavedDtype


def compress(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder of a dense model.")],
    destination: Annotated[
        str,
        typer.Argument(metavar="DST", help="Folder to write; with several ratios it holds {keep_ratio}."),
    ],
    keep_ratio: Annotated[
        list[float],
        typer.Option(help="Share of each projection's parameters to keep, such as 0.6. May be repeated."),
    ],
    method: Annotated[str, typer.Option(help="svd or svd-llm.")] = "svd-llm",
    calibration_text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text to calibrate with.", show_default="a built-in English one"),
    ] = None,
    calibration_samples: Annotated[int, typer.Option(help="Sequences to calibrate with.")] = 32,
    calibration_length: Annotated[int, typer.Option(help="Tokens of a calibration sequence.")] = 512,
    calibration_format: Annotated[
        str, typer.Option(help="text, or chat to wrap the text in the model's chat template.")
    ] = "text",
    dtype: SavedDtype = None,
    device: Device = "auto",
    force: Force = False,
    json: Json = False,
) -> None:
    """Compress a dense model: every projection becomes two thin matrices."""
    from ..compression import compress

    reports = compress(
        source,
        destination,
        method=method,
        keep_ratio=keep_ratio[0] if len(keep_ratio) == 1 else keep_ratio,
        calibration_text=calibration_text,
        calibration_samples=calibration_samples,
        calibration_length=calibration_length,
        calibration_format=calibration_format,
        dtype=dtype,
        device=device,
        force=force,
        progress=output.show_progress(),
    )
    if json:
        output.write_json({"reports": [report.to_json() for report in reports]})
    else:
        output.write_lines(line for report in reports for line in report.lines())
