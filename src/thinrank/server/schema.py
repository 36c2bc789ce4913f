"""The fields of every request, with type and range: OpenAI's names, and vLLM's for what OpenAI lacks.

Types are strict, as OpenAI's are: "5" is no number and 1 is no boolean. null stands for a field's default. Fields that
are not listed are kept aside for `unknown_fields` to judge.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

#: Of a seed and of token ids in JSON.
INT64 = 2**63
#: Continuations of one request, all its prompts together.
MAX_CHOICES = 2048


def _described(expected: str) -> WrapValidator:
    """One message for a union, in which pydantic names every branch."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("type", f"it must be {expected}") from error

    return WrapValidator(validate)


Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
#: fail_fast, here and below: an error for each of a million elements takes ten seconds, in which nobody gets a token.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=64)] | None,
    _described("a text, or a list of up to 64 texts, none of them empty"),
]
_Prompt = Annotated[TokenIds, Field(min_length=1)]
CompletionPrompt = Annotated[
    str
    | _Prompt
    | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    | Annotated[list[_Prompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)],
    _described(
        f"a text, a list of token ids, or a list of up to {MAX_CHOICES} of either, none of them empty"
    ),
]
_TokenIdKey = Annotated[str, Field(pattern=r"^\d{1,9}$"), _described("a token id")]
JsonObject = dict[str, Any]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_only_unicode(cls, fields: Any) -> Any:
        """JSON can spell half of a surrogate pair, which no encoder takes. Looks at all texts at the speed of C."""
        try:
            json.dumps(fields, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("body", "there is a lone surrogate in a text") from None
        except RecursionError:
            raise PydanticCustomError("body", "the body is nested too deeply") from None
        return fields


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True, populate_by_name=True)

    name: str
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """Exactly one of them. grammar: EBNF in GBNF's notation."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    json_: JsonObject | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _GenerationRequest(_Request):
    """What completions and chat have in common."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    logit_bias: dict[_TokenIdKey, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=2 * INT64)] | None = None
    stop: Stop = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class CompletionRequest(_GenerationRequest):
    prompt: CompletionPrompt
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool = True


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(fail_fast=True)]


class Message(BaseModel):
    """Further fields, such as name and tool_calls, go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str | TextParts | None, _described("a text, or a list of text parts")] = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatFields(_Request):
    """What makes a conversation a prompt."""

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None


class ChatCompletionRequest(ChatFields, _GenerationRequest):
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(_Request):
    """A prompt, or messages as in a chat completion."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool = False


class DetokenizeRequest(_Request):
    tokens: Annotated[TokenIds, Field(max_length=10**6)]
