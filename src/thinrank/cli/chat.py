"""`thinrank chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import EngineConfig, SamplingParams
from ..errors import OptionError
from . import output
from .generate import check_text
from .options import (
    ComputeDtype,
    Device,
    IgnoreEos,
    KVCacheMemory,
    MaxModelLen,
    MaxTokens,
    MinP,
    Model,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TokenizerFolder,
    TopK,
    TopP,
    parse_size,
)

if TYPE_CHECKING:
    from ..llm import LLM

#: An answer is longer than the few tokens that a completion defaults to.
MAX_ANSWER_TOKENS = 512

Message = dict[str, str]


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this one message and end.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Jinja chat template.", show_default="the model's")
    ] = None,
    max_tokens: MaxTokens = MAX_ANSWER_TOKENS,
    temperature: Temperature = SamplingParams.temperature,
    top_p: TopP = SamplingParams.top_p,
    top_k: TopK = SamplingParams.top_k,
    min_p: MinP = SamplingParams.min_p,
    seed: Seed = SamplingParams.seed,
    stop: Stop = None,
    repetition_penalty: RepetitionPenalty = SamplingParams.repetition_penalty,
    ignore_eos: IgnoreEos = SamplingParams.ignore_eos,
    device: Device = "auto",
    dtype: ComputeDtype = "auto",
    tokenizer: TokenizerFolder = None,
    max_model_len: MaxModelLen = EngineConfig.max_model_len,
    kv_cache_memory: KVCacheMemory = None,
) -> None:
    """Talk to a model: one message a line.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C interrupts an answer.
    """
    params = SamplingParams(
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
    )
    memory = None if kv_cache_memory is None else parse_size("--kv-cache-memory", kv_cache_memory)
    template = None if chat_template is None else _read_template(chat_template)
    opening = [] if system is None else [{"role": "system", "content": check_text("--system", system)}]

    from ..llm import LLM

    llm = LLM(
        model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_memory=memory,
    )
    # A model that cannot chat says so now, not after the first message.
    llm.tokenizer.render_chat([*opening, {"role": "user", "content": ""}], chat_template=template)
    _converse(llm, params, template, opening, _lines() if prompt is None else iter([prompt]))


def _converse(
    llm: LLM, params: SamplingParams, template: str | None, opening: list[Message], lines: Iterator[str]
) -> None:
    history = list(opening)
    for line in lines:
        if line == "/exit":
            return
        if line == "/reset":
            history = list(opening)
        elif line:
            history.append({"role": "user", "content": check_text("the message", line)})
            history.append({"role": "assistant", "content": _answer(llm, history, params, template)})


def _answer(llm: LLM, history: list[Message], params: SamplingParams, template: str | None) -> str:
    """Stream one answer to stdout and return it; Ctrl-C ends it where it is."""
    answer = ""
    try:
        for chunk in llm.stream_chat(history, params, chat_template=template):
            answer += chunk.text
            output.write(chunk.text)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    output.write("\n")
    return answer


def _lines() -> Iterator[str]:
    """What the person types, without surrounding space, until Ctrl-D; or the lines of a piped stdin."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    import readline  # noqa: F401 (makes `input` editable)

    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            output.write("\n")
        except EOFError:
            output.write("\n")
            return


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {path}: {error}", "check --chat-template") from error
