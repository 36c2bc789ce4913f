"""`thinrank demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import output
from .options import Json


def demo(
    model: Annotated[
        str | None, typer.Option(help="Dense model to compress.", show_default="a small installed one")
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the models that the demo makes.",
            show_default="~/.cache/thinrank",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compress a small model, run it, and compare its speed, size and quality with the dense one's."""
    from ..demo import demo

    report = demo(model, cache_dir, progress=output.show_progress())
    if json:
        output.write_json(report.to_json())
    else:
        output.write_lines(report.lines())
