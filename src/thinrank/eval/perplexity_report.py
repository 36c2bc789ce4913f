"""`perplexity` of several models side by side, on one text, by one protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..bench.report import Report, ReportFile, header
from ..bench.shapes import checkpoint_model, layer_keep_ratio
from ..bench.timing import Nvml, reset_memory
from ..checkpoint.load import DTYPES
from ..device import resolve_device
from ..errors import OptionError, ThinrankError, unknown_name
from ..llm import LLM
from ..model.cost import parameters
from ..text import Tokenizer
from .perplexity import PATHS, perplexity
from .texts import load_text


@dataclass(frozen=True)
class PerplexityRow:
    """One model. keep_ratio: share of the layers' linear parameters. dtype: that it computes in. tokens: of
    the text, by the model's own tokenizer, from the first window to the last. The rest as `Perplexity`."""

    model: str
    keep_ratio: float
    parameters: int
    dtype: str
    perplexity: float
    tokens: int
    windows: int
    predictions: int


PerplexityReport = Report[PerplexityRow]


def perplexities(
    models: Sequence[str | Path],
    *,
    text: str = "builtin",
    window: int = 512,
    stride: int | None = None,
    max_windows: int | None = None,
    path: str = "prefill",
    dtype: str = "auto",
    device: str = "auto",
    output_json: str | Path | None = None,
    command: str | None = None,
    progress: bool = True,
    on_progress: Callable[[str], None] = lambda text: None,
) -> PerplexityReport:
    """Measure each model; all in the same way.

    models: checkpoint folders. text: a name of `TEXTS` or a file. window, stride, max_windows, path: as
    `perplexity` has them. dtype: as `load_model` has it. output_json: the file to write, after every model.
    command: for the header. progress: show a bar. on_progress: told what is being done.

    Raises what `load_text`, `load_model` and `perplexity` raise; OutputError when the file cannot be written.
    """
    if not models:
        raise OptionError("there is no model", "name at least one")
    if path not in PATHS:
        raise unknown_name("path", path, list(PATHS))
    if dtype != "auto" and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    target = resolve_device(device)
    chosen = load_text(text)
    # Reads no weights; every model is looked at before the first one runs.
    opened = [checkpoint_model(model, dtype, target, seed=0) for model in models]
    for model in opened:
        Tokenizer(model.name)
    settings = {
        "dataset": chosen.dataset,
        "split": chosen.split,
        "window": window,
        "stride": window if stride is None else stride,
        "bos": "none",
        "path": path,
    }
    file = ReportFile[PerplexityRow](
        output_json, header("perplexity", opened[0], Nvml(target), command, **settings)
    )
    for model in opened:
        on_progress(f"measuring {model.name}")
        reset_memory(target)
        llm = LLM(model.name, device=target, dtype=dtype)
        try:
            result = perplexity(
                llm,
                chosen.text,
                window=window,
                stride=stride,
                max_windows=max_windows,
                path=path,
                progress=progress,
            )
        except ThinrankError as error:
            raise type(error)(f"{model.name}: {error.message}", error.hint) from error
        row = PerplexityRow(
            model=model.name,
            keep_ratio=layer_keep_ratio(llm.config),
            parameters=parameters(llm.config),
            dtype=str(llm.engine.decoder.dtype).removeprefix("torch."),
            perplexity=result.value,
            tokens=result.tokens,
            windows=result.windows,
            predictions=result.predictions,
        )
        file.add(rows=[row])
        del llm
    return file.report
