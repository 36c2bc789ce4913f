"""`thinrank export`."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output
from .options import Force, SavedDtype


def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder that thinrank convert wrote.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write.")],
    dtype: SavedDtype = None,
    force: Force = False,
) -> None:
    """Write a checkpoint as a plain dense Hugging Face model: all factors multiplied out."""
    from ..checkpoint.export import export

    export(source, destination, dtype=dtype, force=force, progress=output.show_progress())
    output.write_lines([f"written to   {destination}"])
