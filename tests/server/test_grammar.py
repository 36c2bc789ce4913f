"""Output in a given form, through xgrammar; a random model keeps to it only because it must."""

import asyncio
import json
import re
from typing import Annotated, Any, Literal

import httpx2 as httpx
import pytest
import xgrammar
from openai import OpenAI
from pydantic import BaseModel, Field
from xgrammar.testing import _is_grammar_accept_string

from served_model import NAME, Served
from thinrank import LLM
from thinrank.server import grammar as grammar_module
from thinrank.server.errors import ApiError
from thinrank.server.forms import MAX_SOURCE, grammar_source
from thinrank.server.schema import CompletionRequest

MESSAGES: Any = [{"role": "user", "content": "Who?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        "pair": {"anyOf": [{"type": "null"}, {"const": True}]},
    },
    "required": ["name", "age", "tags", "pair"],
}


class Person(BaseModel):
    name: str
    alive: bool


def text(http: httpx.Client, **fields: Any) -> str:
    """Of a completion that ended by itself."""
    body = {"prompt": "x", "max_tokens": 300, "seed": 1} | fields
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert all(choice["finish_reason"] == "stop" for choice in choices)
    return str(choices[0]["text"])


@pytest.mark.parametrize("seed", range(3))
def test_a_json_schema(openai: OpenAI, seed: int) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    request: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "seed": seed, "response_format": form}
    whole = openai.chat.completions.create(**request, max_tokens=300).choices[0]
    assert whole.finish_reason == "stop" and whole.message.content
    person = json.loads(whole.message.content)
    assert set(person) == set(SCHEMA["properties"])  # type: ignore[call-overload]
    assert 0 <= person["age"] <= 120 and len(person["name"]) <= 5 and 1 <= len(person["tags"]) <= 2
    assert set(person["tags"]) <= {"a", "b"} and person["pair"] in (None, True)
    chunks = openai.chat.completions.create(**request, max_tokens=300, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


def favour(llm: LLM, text: str) -> dict[str, float]:
    """A bias without which random strings and objects go on for long."""
    return {str(token_id): 12 for token_id in llm.tokenizer.encode(text)}


def test_the_clients_own_parsing(openai: OpenAI, reference: LLM) -> None:
    answer = openai.chat.completions.parse(
        model=NAME,
        messages=MESSAGES,
        response_format=Person,
        max_tokens=300,
        logit_bias=favour(reference, '"'),  # type: ignore[arg-type]
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_any_object(http: httpx.Client, reference: LLM) -> None:
    bias = favour(reference, '"}')
    for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        for seed in range(3):
            found = text(http, **form, logit_bias=bias, seed=seed)
            assert isinstance(json.loads(found), dict)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-\d{2}"),
        ({"structured_outputs": {"regex": r"(日|本){2}"}}, r"(日|本){2}"),
        ({"guided_choice": ["yes", "no", 'a "quoted" \\ one\n']}, r'yes|no|a "quoted" \\ one\n'),
        ({"structured_outputs": {"choice": ["ja", "nein"]}}, "ja|nein"),
        ({"guided_grammar": 'root ::= "(" [0-9] ")" | "[]"'}, r"\(\d\)|\[\]"),
        ({"structured_outputs": {"grammar": 'root ::= "x" "y"?'}}, "xy?"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_json": '{"enum": [1, 2]}'}, "1|2"),
        ({"structured_outputs": {"json": {"type": "null"}}}, "null"),
        ({"response_format": {"type": "text"}, "guided_regex": "a{4}"}, "a{4}"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_other_forms(http: httpx.Client, form: dict[str, Any], pattern: str) -> None:
    for options in ({}, {"temperature": 0}, {"n": 3}, {"logit_bias": {"2": -100}}, {"repetition_penalty": 2}):
        assert re.fullmatch(pattern, text(http, **form, **options))


def test_rows_with_and_without_a_form_share_a_batch(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 30, "temperature": 0}
    plain = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json=body | {"max_tokens": 2000, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert text(http, guided_regex="b{5}") == "bbbbb"
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == plain


def test_a_grammar_that_is_too_large_or_deep(http: httpx.Client) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    for form in ({"guided_regex": "a" * (MAX_SOURCE + 1)}, {"guided_json": deep}):
        assert http.post("/v1/completions", json={"prompt": "x", **form}).status_code == 400


def test_a_property_may_be_called_like_a_keyword(http: httpx.Client) -> None:
    schema = {"properties": {"not": {"const": 1}, "if": {"enum": [{"not": 1}]}}, "required": ["not", "if"]}
    assert json.loads(text(http, guided_json={"type": "object"} | schema)) == {"not": 1, "if": {"not": 1}}


def test_a_form_that_cannot_be_completed_ends_and_harms_nobody(http: httpx.Client) -> None:
    form = {"guided_grammar": 'root ::= "b" loop\nloop ::= loop "a"'}
    for options in ({}, {"ignore_eos": True}, {"temperature": 0, "n": 2}):
        assert text(http, **form, **options) == "b"
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("grammar", ['root ::= root "a"', "root ::= root", "root ::= a\na ::= b\nb ::= a"])
def test_a_form_that_allows_nothing_is_refused(http: httpx.Client, grammar: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "x", "guided_grammar": grammar})
    assert response.status_code == 400 and "no output" in response.json()["error"]["message"]


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "violation"),
    [
        ({"type": "integer", "multipleOf": 7}, "8"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}}, "[1]"),
        (OBJECT | {"additionalProperties": True, "propertyNames": {"pattern": "^[ab]$"}}, '{"c": 1}'),
        (OBJECT | {"dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
        (OBJECT | {"minProperties": 2}, '{"a": 1}'),
        (OBJECT | {"maxProperties": 1}, '{"a": 1, "b": 1}'),
        (OBJECT | {"unevaluatedProperties": False}, '{"c": 1}'),
        (OBJECT | {"anyOf": [{"required": ["a"]}]}, "{}"),
        (OBJECT | {"oneOf": [{"type": "object"}]}, '{"a": "x"}'),
        (OBJECT | {"not": {"required": ["a"]}}, '{"a": 1}'),
        ({"$ref": "http://example.com/a"}, "5"),
        ({"type": "object", "properties": {"a": {"$ref": "b.json"}}, "required": ["a"]}, '{"a": 5}'),
        ({"$defs": {"x": {"$anchor": "x", "type": "string"}}, "$ref": "#x"}, "5"),
        ({"$defs": {"x": {"type": "string"}}, "$ref": "#/$defs/x", "maxLength": 1}, '"abc"'),
        ({"$dynamicRef": "#x"}, "5"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
        ({"type": "string", "format": "date", "maxLength": 2}, '"2020-01-01"'),
        ({"type": "object", "required": ["a"]}, "{}"),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "required": ["a"]}, '{"b": 1}'),
        ({"required": ["a"]}, "{}"),
        ({"minLength": 3}, '"a"'),
        ({"minimum": 3}, "1"),
        ({"pattern": "^a$"}, '"b"'),
        ({"exclusiveMaximum": 3}, "5"),
        ({"maxItems": 1}, "[1, 1]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_schema_is_obeyed_or_refused(schema: dict[str, Any], violation: str) -> None:
    try:
        source = grammar_source(CompletionRequest(prompt="x", guided_json=schema))
    except ApiError as error:
        assert error.status == 400 and error.param == "guided_json"
        return
    assert source is not None
    try:
        grammar = xgrammar.Grammar.from_json_schema(source.text, strict_mode=True, max_whitespace_cnt=2)
    except RuntimeError:  # which is a 400
        return
    assert not _is_grammar_accept_string(grammar, violation)


class Address(BaseModel):
    street: Annotated[str, Field(max_length=20, description="and number")]
    floor: Annotated[int, Field(ge=0)] | None = None


class Customer(BaseModel):
    name: Annotated[str, Field(pattern="^[A-Z][a-z]+$")]
    home: Annotated[Address, Field(description="where bills go")]
    others: list[Address] = []
    kind: Literal["new", "old"] = "new"
    tags: dict[str, int] = {}


def test_what_pydantic_writes_is_no_reason_to_refuse() -> None:
    assert grammar_source(CompletionRequest(prompt="x", guided_json=Customer.model_json_schema()))


def test_forms_that_compile_forever_do_not_blame_the_next_one(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT", 0.1)
    monkeypatch.setattr(served.service._grammars, "_compiling", asyncio.Semaphore(0))
    response = http.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"})
    assert response.status_code == 429 and "retry-after" in response.headers


def test_a_pattern_may_ask_for_control_characters(http: httpx.Client) -> None:
    assert text(http, guided_json={"type": "string", "pattern": "^a\\x01{2}$"}) == '"a\x01\x01"'
