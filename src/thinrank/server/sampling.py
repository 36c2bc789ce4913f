"""From the fields of a request to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import SamplingParams
from .schema import ChatCompletionRequest, CompletionRequest

#: Those that a model's generation_config.json may give a default.
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: Those that are called the same in a request and in `SamplingParams`.
_SAME_NAME = (
    "n",
    *_MODEL_DEFAULTS,
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, float | int]:
    """What generation_config.json says about sampling. Its null stands for nothing said.

    Raises OptionError for a value that no request could have.
    """
    defaults = {
        name: generation_config[name] for name in _MODEL_DEFAULTS if generation_config.get(name) is not None
    }
    SamplingParams(**defaults)
    return defaults


def sampling_params(
    request: CompletionRequest | ChatCompletionRequest,
    defaults: Mapping[str, float | int],
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The request's own values before the model's defaults before OpenAI's.

    Raises OptionError where two values contradict each other.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        given["logit_bias"] = {int(token_id): bias for token_id, bias in request.logit_bias.items()}
    return SamplingParams(
        **{**defaults, **given}, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
