"""Options that several commands share, and the texts that they are made from."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from ..errors import OptionError

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder that thinrank convert wrote, or a dense model.")
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Folder that thinrank convert wrote, or a dense model."),
]
RandomShape = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Random weights instead of MODEL: llama-7b, llama-13b, llama3-8b, mistral-7b, qwen2.5-7b, "
        "smollm2-135m.",
    ),
]
RandomStructure = Annotated[str, typer.Option(help="Of --shape: uniform, hetero, shared2, mixed or dense.")]
RandomKeepRatio = Annotated[float, typer.Option(help="Of --shape: share of the layers' linear parameters.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<index>.")]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Say what runs: decoder, cache, graphs, every launch and its settings."),
]
SavedDtype = Annotated[
    str | None,
    typer.Option(help="float32, float16 or bfloat16 for all tensors.", show_default="each keeps its own"),
]

# One request: the names are those of SamplingParams.
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens of this total probability.")]
TopK = Annotated[int, typer.Option(help="Sample from this many tokens; 0 for all.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal text.", show_default="a fresh one")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the output. May be repeated.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: avoid tokens that occurred already.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")]

# The engine: the names are those of LLM and EngineConfig.
ComputeDtype = Annotated[
    str,
    typer.Option(help="auto, float32, float16 or bfloat16. auto: as stored, but no float32 on a GPU."),
]
TokenizerFolder = Annotated[
    str | None, typer.Option("--tokenizer", help="Folder with the tokenizer.", show_default="MODEL")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Prompt and output tokens together.", show_default="what the model was trained for"),
]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Memory for keys and values, such as 512M or 2G.", show_default="up to 1G"
    ),
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(option: str, text: str) -> int:
    """Bytes of "1536", "512M", "2G" or "1.5 GiB"; K, M, G and T are powers of 1024.

    Raises OptionError that names the option.
    """
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * 1024 ** _POWERS[(match[2] or "").upper()] if match else 0.0
    if not 1 <= size < 2**63:
        raise OptionError(f"{option} is {text!r}", "give a size such as 512M or 24G")
    return int(size)
