"""What a client gets wrong is a 400 that names the field, in OpenAI's form, and leaves the server up."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai as openai_package
import pytest
from pydantic import BaseModel

from served_model import NAME, Served, load, serving
from thinrank.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

COMPLETION = {"model": NAME, "prompt": "Hello", "max_tokens": 2}
JSON = {"content-type": "application/json"}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}

SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 1e999),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("n", 0),
    ("n", 10**9),
    ("n", "2"),
    ("max_tokens", -1),
    ("max_tokens", 2**31 - 1),
    ("max_tokens", 10**30),
    ("max_tokens", 20000),
    ("max_tokens", "5"),
    ("seed", 2**64),
    ("seed", 0.5),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "x"),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("min_tokens", 5),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"400": 1}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", 5),
    ("response_format", "json"),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": "x"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": "y"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "blah"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}),
    ("guided_regex", "[a"),
    ("guided_json", "{"),
    ("guided_json", "[]"),
    ("guided_grammar", "rot ::= x"),
    ("guided_grammar", "日"),
    ("guided_regex", "\0"),
    ("repetition_penalty", 5e-324),
    ("guided_choice", []),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"regexp": "a"}),
    ("guided_regex", "a" * 70000),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("cache_salt", ""),
]
COMPLETION_ONLY: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [400]),
    ("prompt", [-1]),
    ("prompt", [1.5]),
    ("prompt", [[1], "a"]),
    ("prompt", ["a", 1]),
    ("prompt", {"text": "a"}),
    ("prompt", ["a", ""]),
    ("prompt", [[1], []]),
    ("prompt", ["a"] * 3000),
    ("prompt", [[1]] * 3000),
    ("max_tokens", 0),
    ("logprobs", 21),
    ("logprobs", True),
    ("suffix", "x"),
    ("best_of", 2),
]
CHAT_ONLY: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "Hello"),
    ("messages", [{"content": "no role"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "tool", "content": "the template raises"}]),
    ("max_tokens", 0),
    ("max_completion_tokens", 0),
    ("logprobs", 3),
    ("top_logprobs", 3),
    ("stream_options", {"include_usage": True}),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {"tokenize": True}),
]


def check(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(("field", "value"), SAMPLING + COMPLETION_ONLY, ids=lambda value: str(value)[:40])
def test_a_bad_completion_request(http: httpx.Client, field: str, value: Any) -> None:
    for stream in (False, True):
        body = json.dumps(COMPLETION | {"stream": stream} | {field: value})
        error = check(http.post("/v1/completions", content=body, headers=JSON))
        assert error["type"] == "invalid_request_error"
        assert error["param"] == field


@pytest.mark.parametrize(("field", "value"), SAMPLING + CHAT_ONLY, ids=lambda value: str(value)[:40])
def test_a_bad_chat_request(http: httpx.Client, field: str, value: Any) -> None:
    content = json.dumps(CHAT | {field: value})
    error = check(http.post("/v1/chat/completions", content=content, headers=JSON))
    assert error["param"] == field


def test_requests_still_work_after_all_that(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "stop": "\\udfff"}',
        b'{"prompt": "a", "cache_salt": "\\udfff"}',
        b'{"prompt": "a", "guided_regex": "\\udfff"}',
        b'{"prompt": "a", "guided_json": {"\\udfff": 1}}',
        *(
            b'{"prompt": "a", "user": "\\ud800", "x": ' + b"[" * n + b"]" * n + b"}"
            for n in range(500, 1000, 20)
        ),
        b'{"prompt": "a", "guided_json": ' + b'{"items":' * 900 + b"{}" + b"}" * 900 + b"}",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_malformed_body(http: httpx.Client, body: bytes) -> None:
    check(http.post("/v1/completions", content=body, headers=JSON))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "property name"),
        (b'{"prompt": "\xe9"}', "utf-8"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "4300 digits"),
    ],
    ids=("cut", "latin-1", "deep", "long number"),
)
def test_a_body_that_is_no_json_is_told_why(http: httpx.Client, body: bytes, reason: str) -> None:
    error = check(http.post("/v1/completions", content=body, headers=JSON))
    assert reason in error["message"] and error["code"] == "invalid_json"


def test_json_must_be_declared(http: httpx.Client) -> None:
    error = check(http.post("/v1/completions", content=b'{"prompt": "a"}'))
    assert "Content-Type: application/json" in error["message"]


def test_unknown_paths_methods_and_models(http: httpx.Client) -> None:
    check(http.get("/v1/nothing"), 404)
    check(http.get("/v1/completions"), 405)
    for response in (
        http.post("/v1/completions", json=COMPLETION | {"model": "gpt-4"}),
        http.post("/v1/chat/completions", json=CHAT | {"model": "gpt-4"}),
        http.get("/v1/models/gpt-4"),
        http.post("/tokenize", json={"model": "gpt-4", "prompt": "a"}),
    ):
        error = check(response, 404)
        assert error["code"] == "model_not_found" and NAME in error["message"]


def test_a_prompt_that_is_too_long(http: httpx.Client) -> None:
    error = check(http.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 16384}))
    assert error["code"] == "context_length_exceeded"
    error = check(
        http.post(
            "/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": "é" * 17000}]}
        )
    )
    assert error["code"] == "context_length_exceeded"


def _lists(schema: Any) -> Iterator[dict[str, Any]]:
    """All validators of lists in a pydantic core schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for each in schema:
            yield from _lists(each)


@pytest.mark.parametrize(
    "request_type", [CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest]
)
def test_a_long_wrong_list_is_refused_at_its_first_mistake(request_type: type[BaseModel]) -> None:
    """Naming what is wrong with each of a million elements takes ten seconds, in which nobody gets a token."""
    lists = list(_lists(request_type.__pydantic_core_schema__))
    assert lists
    for schema in lists:
        assert schema.get("fail_fast") or schema.get("max_length", 10**9) <= 64, schema


def test_a_text_that_cannot_fit_is_never_tokenized(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers need seconds and hundreds of megabytes for it."""
    text = "a" * (served.service._max_text + 1)
    monkeypatch.setattr(type(served.llm.tokenizer), "encode", lambda *_, **__: 1 / 0)
    for path, body, field in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["a" * 3, text][::-1]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = check(http.post(path, json=body))
        assert error["code"] == "context_length_exceeded" and error["param"] == field


def test_a_request_larger_than_the_cache_is_refused(folder: Path) -> None:
    with serving(load(folder, kv_cache_memory=2**18)) as served, served.http() as http:
        capacity = served.llm.engine.pool.num_blocks * 64
        error = check(http.post("/v1/completions", json=COMPLETION | {"max_tokens": capacity}))
        assert "KV cache" in error["message"]
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_unknown_fields_are_ignored(http: httpx.Client) -> None:
    extra = {"user": "me", "metadata": {"a": 1}, "store": False, "temprature": 5, "tools": [], "best_of": 1}
    assert http.post("/v1/completions", json=COMPLETION | extra).status_code == 200
    nulls = {"tools": None, "suffix": None, "prompt_logprobs": None}
    assert http.post("/v1/completions", json=COMPLETION | nulls).status_code == 200


def test_keys(folder: Path) -> None:
    with serving(load(folder), api_keys=("secret", "other")) as served, served.http() as http:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic secret"},
            {"authorization": "Bearer é"},
        ):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            assert check(http.get("/v1/models", headers=encoded), 401)["code"] == "invalid_api_key"
        check(http.post("/tokenize", json={"prompt": "a"}), 401)
        for path in ("/health", "/metrics", "/version"):
            assert http.get(path).status_code == 200
        for key in ("secret", "other"):
            assert served.openai(api_key=key).completions.create(**COMPLETION).usage
        with pytest.raises(openai_package.AuthenticationError):
            served.openai(api_key="secre").models.list()


def test_a_body_that_is_too_large(folder: Path) -> None:
    with serving(load(folder), max_request_bytes=10_000) as served, served.http() as http:
        assert check(http.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 10_000}), 413)["message"]
        with pytest.raises(openai_package.APIStatusError) as caught:
            served.openai().completions.create(**COMPLETION | {"prompt": "x" * 30_000})
        assert caught.value.status_code == 413

        def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 1000

        check(http.post("/v1/completions", content=chunks()), 413)
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_too_many_requests(folder: Path) -> None:
    long = COMPLETION | {"max_tokens": 5000, "ignore_eos": True, "stream": True}
    with serving(load(folder), max_concurrent_requests=1) as served, served.http() as http:
        with http.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()  # the connection closes when this is gone
            next(lines)
            response = http.post("/v1/completions", json=COMPLETION)
            assert (
                check(response, 429)["type"] == "rate_limit_error" and response.headers["retry-after"] == "1"
            )
            with pytest.raises(openai_package.RateLimitError):
                served.openai().completions.create(**COMPLETION)
            assert http.get("/health").status_code == 200
        # The client retries until the stream that was left is gone.
        assert served.openai(max_retries=5).completions.create(**COMPLETION).usage


def test_a_time_limit(folder: Path) -> None:
    long = COMPLETION | {"max_tokens": 10_000, "ignore_eos": True}
    with serving(load(folder), request_timeout=0.5) as served, served.http() as http:
        response = http.post("/v1/completions", json=long)
        assert check(response, 504)["code"] == "timeout" and response.headers["x-should-retry"] == "false"
        with pytest.raises(openai_package.APIError, match="longer than"):
            list(
                served.openai().completions.create(
                    **COMPLETION | {"max_tokens": 10_000}, stream=True, extra_body={"ignore_eos": True}
                )
            )
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_missing_extra(served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(served.service._grammars, "_compiler", None)
    error = check(http.post("/v1/completions", json=COMPLETION | {"guided_regex": "a+"}))
    assert "pip install 'thinrank[grammar]'" in error["message"]


def test_a_bug_is_a_500_that_tells_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(load(folder)) as served, served.http() as http:
        monkeypatch.setattr(served.service, "encode", lambda *_: 1 / 0)
        error = check(http.post("/v1/completions", json=COMPLETION), 500)
        assert error["type"] == "server_error" and "division" not in error["message"]
