"""`thinrank generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineConfig, SamplingParams
from ..errors import OptionError
from . import output
from .options import (
    ENGINE,
    SAMPLING,
    EngineOptions,
    Explain,
    Json,
    Model,
    SamplingOptions,
    with_option_groups,
)

if TYPE_CHECKING:
    from ..llm import LLM


@with_option_groups
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the text to continue; - for stdin.")
    ] = None,
    sampling: SamplingOptions = SAMPLING,
    n: Annotated[int, typer.Option("--n", help="How many continuations.")] = SamplingParams.n,
    engine: EngineOptions = ENGINE,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Continue a prompt. The text appears as it is generated."""
    text = _read_prompt(prompt, prompt_file)
    params = sampling.params(n)
    # No memory for sequences that will not come, and no graphs, for which a first start compiles kernels.
    llm = engine.load(model, max_num_seqs=min(n, EngineConfig.max_num_seqs))
    if explain:
        from ..engine.explain import explain as explanation_of

        output.write_notes(explanation_of(llm.engine).lines())
    if json:
        output.write_json(_generate(llm, text, params))
    elif n == 1:
        for chunk in llm.stream(text, params):
            output.write(chunk.text)
        output.write("\n")
    else:
        for continuation in _generate(llm, text, params)["outputs"]:
            output.write(f"[{continuation['index'] + 1}] {continuation['text']}\n")


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        problem = "there is no prompt" if prompt is None else "both --prompt and --prompt-file are given"
        raise OptionError(problem, "pass one of --prompt TEXT and --prompt-file FILE (- for stdin)")
    if prompt_file is None:
        return check_text("--prompt", prompt or "")
    try:
        data = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read {prompt_file}: {error.strerror}", "check --prompt-file") from error
    return check_text(prompt_file, data.decode("utf-8", "surrogateescape"))


def check_text(where: str, text: str) -> str:
    """The text itself. Raises OptionError when it was no UTF-8: Python keeps such bytes as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{where} is no valid UTF-8", "convert the text to UTF-8") from error
    return text


def _generate(llm: LLM, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """The result as `--json` prints it."""
    start = perf_counter()
    [request] = llm.generate(prompt, params, use_tqdm=False)
    seconds = perf_counter() - start
    output_tokens = sum(len(continuation.token_ids) for continuation in request.outputs)
    return {
        "prompt": request.prompt,
        "prompt_token_ids": request.prompt_token_ids,
        "outputs": [
            {
                "index": continuation.index,
                "text": continuation.text,
                "token_ids": continuation.token_ids,
                "finish_reason": continuation.finish_reason,
                "stop_reason": continuation.stop_reason,
            }
            for continuation in request.outputs
        ],
        "timing": {
            "prompt_tokens": len(request.prompt_token_ids),
            "output_tokens": output_tokens,
            "seconds": seconds,
            "tokens_per_second": output_tokens / seconds,
        },
    }
