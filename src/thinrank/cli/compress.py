"""`thinrank compress`."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output
from .options import Device, Force, Json, SavedDtype

#: Exit code when a checkpoint was written and its perplexity is beyond the limit.
BEYOND_LIMIT = 3


def compress(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder of a dense model.")],
    destination: Annotated[
        str,
        typer.Argument(metavar="DST", help="Folder to write; with several ratios it holds {keep_ratio}."),
    ],
    keep_ratio: Annotated[
        list[float] | None,
        typer.Option(help="Share of the projections' parameters to keep, such as 0.6. May be repeated."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="svd, asvd, svd-llm, svd-llm-v2, basis-sharing, adasvd or dobi-svd.")
    ] = "svd-llm",
    allocate: Annotated[
        str | None,
        typer.Option(
            help="How modules share the parameters: uniform, or loss, by what each costs the model.",
            show_default="the method's own way",
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Refit factor_out to what the compressed model sees.")
    ] = False,
    modules: Annotated[str, typer.Option(metavar="GLOB", help="Modules to factor, like '*.mlp.*'.")] = "*",
    ranks: Annotated[
        str | None,
        typer.Option(metavar="FILE", help='Ranks instead of a ratio: JSON, like {"*.mlp.*": 64}.'),
    ] = None,
    rank_multiple: Annotated[int, typer.Option(help="Round ranks to multiples of 8, 16 or 64.")] = 1,
    alpha: Annotated[
        float | None, typer.Option(help="asvd: power of the activations' scale.", show_default="0.5")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="basis-sharing: layers that share a factor_in.", show_default="2")
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="basis-sharing: projections that share it, with commas between.",
            show_default="q_proj,k_proj,v_proj,gate_proj,up_proj",
        ),
    ] = None,
    min_ratio: Annotated[
        float | None,
        typer.Option(
            help="adasvd: what the least important layer keeps, relative to the target.", show_default="0.9"
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="dobi-svd: steps of gradient descent on the ranks.", show_default="16"),
    ] = None,
    calibration_text: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="builtin, wikitext2, c4, datasets:NAME, a text or .jsonl file, or self: the model writes it.",
        ),
    ] = "builtin",
    calibration_samples: Annotated[int, typer.Option(help="Sequences to calibrate with.")] = 32,
    calibration_length: Annotated[int, typer.Option(help="Tokens of a calibration sequence.")] = 512,
    calibration_format: Annotated[
        str, typer.Option(help="text, or chat to wrap the text in the model's chat template.")
    ] = "text",
    seed: Annotated[int, typer.Option(help="Of text that the model writes.")] = 0,
    statistics: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder that keeps statistics for other methods and ratios.",
            show_default="one beside DST, removed at the end",
        ),
    ] = None,
    max_perplexity_increase: Annotated[
        float | None,
        typer.Option(
            help="Exit with code 3 if perplexity grows by more: 0.5 for one half.", show_default="off"
        ),
    ] = None,
    perplexity_text: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="To measure that on.", show_default="a built-in one, not calibration's"
        ),
    ] = None,
    dtype: SavedDtype = None,
    device: Device = "auto",
    force: Force = False,
    json: Json = False,
) -> None:
    """Compress a dense model: every projection becomes two thin matrices.

    A run that was killed goes on where it was when it is started again.
    """
    if not keep_ratio and ranks is None:
        raise typer.TyperException("Missing option '--keep-ratio', or '--ranks'")
    from ..compression import compress

    ratios = keep_ratio or None
    reports = compress(
        source,
        destination,
        method=method,
        keep_ratio=ratios[0] if ratios and len(ratios) == 1 else ratios,
        ranks=ranks,
        allocate=allocate,
        modules=modules,
        rank_multiple=rank_multiple,
        alpha=alpha,
        group_size=group_size,
        shared=None if shared is None else [name.strip() for name in shared.split(",")],
        min_ratio=min_ratio,
        steps=steps,
        update=update,
        calibration_text=calibration_text,
        calibration_samples=calibration_samples,
        calibration_length=calibration_length,
        calibration_format=calibration_format,
        seed=seed,
        statistics=statistics,
        max_perplexity_increase=max_perplexity_increase,
        perplexity_text=perplexity_text,
        dtype=dtype,
        device=device,
        force=force,
        progress=output.show_progress(),
    )
    if json:
        output.write_json({"reports": [report.to_json() for report in reports]})
    else:
        output.write_lines(line for report in reports for line in report.lines())
    beyond = [report.destination for report in reports if report.within_limit is False]
    if beyond:
        output.write_message("error", f"perplexity grew by more than the limit: {', '.join(beyond)}")
        raise typer.Exit(BEYOND_LIMIT)
