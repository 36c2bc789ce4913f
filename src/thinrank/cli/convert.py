"""`thinrank convert`."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output
from .options import Force, Json, SavedDtype


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, file or hub id (org/name).")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write.")],
    base: Annotated[
        str | None, typer.Option(help="The dense model that SRC was made from, where SRC lacks parts of it.")
    ] = None,
    dtype: SavedDtype = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Convert a compressor's checkpoint, or a dense model, into the thinrank format.

    Reads SVD-LLM, Basis Sharing, Dobi-SVD, ASVD, LowRankArena, GGUF and dense models.
    Nothing that a checkpoint holds is executed.
    """
    from ..checkpoint.convert import convert

    report = convert(
        source, destination, base=base, dtype=dtype, force=force, progress=output.show_progress()
    )
    if json:
        output.write_json(report.to_json())
    else:
        output.write_lines(report.lines())
