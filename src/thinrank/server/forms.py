"""What form of output a request asks for, of the several ways in which it can. Knows nothing of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import bad_request
from .schema import ChatCompletionRequest, CompletionRequest

#: Characters of a schema, regular expression or grammar; more has no honest use and costs minutes.
MAX_SOURCE = 2**16
#: Of a schema's nesting: the time to compile grows with its third power, to 20 s at 900.
_MAX_DEPTH = 64
_ANY_OBJECT = '{"type": "object"}'
#: Keywords of JSON Schema that xgrammar reads and does not obey.
_NOT_OBEYED = {
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "contains", "$dynamicRef", "$recursiveRef"
}  # fmt: skip
#: Keywords that xgrammar obeys only where "type" says what they are about.
_NEED_TYPE = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
    "format", "minItems", "maxItems", "minProperties", "maxProperties",
}  # fmt: skip
#: Where one of these is, xgrammar looks at it alone ...
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
#: ... and forgets these, beside each other and what needs a type.
_FORGOTTEN = {
    *_NEED_TYPE, *_ALONE, "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "items", "prefixItems",
}  # fmt: skip
#: Those whose values are schemas by name.
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
#: Those whose values are data, in which a keyword means nothing.
_DATA = {"const", "enum", "default", "examples"}


@dataclass(frozen=True)
class GrammarSource:
    """param: the request's field, for error messages. kind: schema, object, regex or ebnf."""

    param: str
    kind: str
    text: str


def grammar_source(request: CompletionRequest | ChatCompletionRequest) -> GrammarSource | None:
    """What form a request asks for. Raises ApiError when it asks for two, or for none with a field that needs one."""
    sources = list(_sources(request))
    if len(sources) > 1:
        names = " and ".join(source.param for source in sources)
        raise bad_request(f"{names} are given: only one form can be kept", sources[1].param)
    if not sources:
        return None
    if len(sources[0].text) > MAX_SOURCE:
        raise bad_request(f"it has more than {MAX_SOURCE} characters", sources[0].param)
    if request.min_tokens:
        raise bad_request("min_tokens and a form contradict each other", "min_tokens")
    return sources[0]


def _sources(request: CompletionRequest | ChatCompletionRequest) -> Iterator[GrammarSource]:
    response_format = request.response_format
    if response_format is not None and response_format.type == "json_object":
        yield GrammarSource("response_format", "object", _ANY_OBJECT)
    if response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise bad_request("response_format.json_schema is missing", "response_format")
        yield _schema("response_format", response_format.json_schema.schema_)
    outputs = request.structured_outputs
    if outputs is not None:
        found = list(
            _fields("structured_outputs", outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
        )
        if outputs.json_object:
            found.append(GrammarSource("structured_outputs", "object", _ANY_OBJECT))
        if not found:
            raise bad_request(
                "it must have one of json, regex, choice, grammar and json_object", "structured_outputs"
            )
        yield from found
    yield from _fields("guided_json", request.guided_json, None, None, None)
    yield from _fields("guided_regex", None, request.guided_regex, None, None)
    yield from _fields("guided_choice", None, None, request.guided_choice, None)
    yield from _fields("guided_grammar", None, None, None, request.guided_grammar)


def _fields(
    param: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[GrammarSource]:
    if schema is not None:
        yield _schema(param, schema)
    if regex is not None:
        yield GrammarSource(param, "regex", regex)
    if choice is not None:
        # JSON's escapes are EBNF's.
        yield GrammarSource(param, "ebnf", "root ::= " + " | ".join(map(json.dumps, choice)))
    if grammar is not None:
        yield GrammarSource(param, "ebnf", grammar)


def _schema(param: str, schema: dict[str, Any] | str) -> GrammarSource:
    """A JSON schema, or its text. Raises ApiError for keywords that would not be obeyed."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{param} is no valid JSON: {error}", param) from error
        if not isinstance(schema, dict):
            raise bad_request(f"{param} is no JSON object", param)
    ignored = sorted(set(_ignored_keywords(param, schema)))
    if ignored:
        raise bad_request(f"{param} has keywords that are not supported: {', '.join(ignored)}", param)
    return GrammarSource(param, "schema", json.dumps(schema))


def _ignored_keywords(param: str, schema: Any, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise bad_request(f"{param} is nested deeper than {_MAX_DEPTH} levels", param)
    if isinstance(schema, list):
        for each in schema:
            yield from _ignored_keywords(param, each, depth + 1)
    if not isinstance(schema, dict):
        return
    yield from _ignored_together(schema)
    for keyword, value in schema.items():
        if keyword in _NOT_OBEYED:
            yield keyword
        elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            yield from _ignored_keywords(param, list(value.values()), depth)
        elif keyword not in _DATA:
            yield from _ignored_keywords(param, value, depth + 1)


def _ignored_together(schema: dict[str, Any]) -> Iterator[str]:
    """What is ignored for its value, or because of the keywords that it stands beside."""
    if schema.get("uniqueItems") is True:
        yield "uniqueItems"
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        yield "$ref to elsewhere"
    several = schema.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        yield "allOf of several"
    chosen = next((keyword for keyword in _ALONE if keyword in schema), None)
    if chosen is not None:
        yield from (f"{keyword} beside {chosen}" for keyword in _FORGOTTEN & schema.keys() - {chosen})
    elif not {"type", "const", "enum"} & schema.keys():
        yield from (f"{keyword} without type" for keyword in _NEED_TYPE & schema.keys())
    if "properties" not in schema and schema.get("required"):
        yield "required without properties"
    for keyword in {"pattern", "format"} & schema.keys():
        yield from (f"{limit} beside {keyword}" for limit in {"minLength", "maxLength"} & schema.keys())
