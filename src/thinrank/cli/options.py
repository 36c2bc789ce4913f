"""Options that several commands share, and the texts that they are made from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..config import EngineConfig, SamplingParams
from ..errors import OptionError

if TYPE_CHECKING:
    from ..llm import LLM

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
        metavar="SIZE",
        help="Memory for keys and values, such as 512M or 2G.",
        show_default="on a GPU what --gpu-memory-utilization leaves, on a CPU 4G",
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(help="Share of a GPU's memory to take, where --kv-cache-memory does not say how much."),
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


@dataclass(frozen=True)
class SamplingOptions:
    """How to answer one request: a command's options, in the order of its help."""

    max_tokens: MaxTokens = SamplingParams.max_tokens
    temperature: Temperature = SamplingParams.temperature
    top_p: TopP = SamplingParams.top_p
    top_k: TopK = SamplingParams.top_k
    min_p: MinP = SamplingParams.min_p
    seed: Seed = SamplingParams.seed
    stop: Stop = None
    repetition_penalty: RepetitionPenalty = SamplingParams.repetition_penalty
    ignore_eos: IgnoreEos = SamplingParams.ignore_eos

    def params(self, n: int = SamplingParams.n) -> SamplingParams:
        return SamplingParams(n=n, **vars(self))


@dataclass(frozen=True)
class EngineOptions:
    """What to run a model on: a command's options."""

    device: Device = "auto"
    dtype: ComputeDtype = "auto"
    tokenizer: TokenizerFolder = None
    max_model_len: MaxModelLen = EngineConfig.max_model_len
    kv_cache_memory: KVCacheMemory = None
    gpu_memory_utilization: GpuMemoryUtilization = EngineConfig.gpu_memory_utilization

    def load(self, model: str, **more: int) -> LLM:
        """more: options of LLM that the command has none for. Raises OptionError for a size that is none, and what
        LLM does."""
        memory = self.kv_cache_memory
        bytes_of_cache = None if memory is None else parse_size("--kv-cache-memory", memory)

        from ..llm import LLM

        return LLM(model, **vars(self) | {"kv_cache_memory": bytes_of_cache} | more)


#: Without any option.
SAMPLING, ENGINE = SamplingOptions(), EngineOptions()


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: a parameter of a dataclass becomes an option a field.

    Such a parameter needs a default, whose fields are the options' defaults.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group, default = parameter.annotation, parameter.default
        if not (isinstance(group, type) and is_dataclass(group)):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            parameter.replace(
                name=field.name, annotation=hints[field.name], default=getattr(default, field.name)
            )
            for field in fields(group)
        ]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
