"""Streams: joined deltas are the text, events have OpenAI's form."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI

from served_model import NAME, Served, load, save_model, serving
from tiny_tokenizers import save_byte_level, save_sentence_piece_like

PROMPT = "Ünïcödé, naïve"
MESSAGES = [{"role": "user", "content": PROMPT}]
BASE = {"model": NAME, "max_tokens": 40, "temperature": 1, "seed": 11}

#: Random text of these models is full of incomplete characters; a byte a token, max_tokens cuts amid one.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"max_tokens": 1},
    {"max_tokens": 7},
    {"temperature": 0},
    {"logprobs": 2},
    {"skip_special_tokens": False, "ignore_eos": True},
    {"guided_regex": "(é|日|😀|ß){8}", "max_tokens": 60},
    {"guided_regex": "(日|😀){8}", "max_tokens": 8},
    {"guided_regex": "(日|😀){8}", "max_tokens": 9},
    {"guided_regex": "(日|😀){8}", "max_tokens": 10},
]


@pytest.fixture(scope="module", params=[save_byte_level, save_sentence_piece_like], ids=["bytes", "pieces"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = save_model(tmp_path_factory.mktemp("streamed") / "model", request.param)
    with serving(load(folder)) as served, served.http() as http:
        yield http
        assert served.free_blocks() == served.llm.engine.pool.num_blocks


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith(
            "text/event-stream"
        )
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def completion(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Whole and streamed, which must agree; returns the whole."""
    whole = client.post("/v1/completions", json=body).json()
    parts = events(client, "/v1/completions", body)
    assert {(part["object"], part["id"], part["created"]) for part in parts} == {
        ("text_completion", parts[0]["id"], parts[0]["created"])
    }
    for choice in whole["choices"]:
        mine = [each for part in parts for each in part["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        reasons = [each["finish_reason"] for each in mine]
        assert reasons[-1] == choice["finish_reason"] and not any(reasons[:-1])
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                assert [value for each in mine for value in (each["logprobs"] or {key: []})[key]] == values
    return whole


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_joined_completion_deltas_are_the_text(client: httpx.Client, variant: dict[str, Any]) -> None:
    completion(client, BASE | {"prompt": PROMPT} | variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_joined_chat_deltas_are_the_text(client: httpx.Client, variant: dict[str, Any]) -> None:
    body = BASE | {"messages": MESSAGES} | variant
    if "logprobs" in variant:
        body |= {"logprobs": True, "top_logprobs": 2}
    whole = client.post("/v1/chat/completions", json=body).json()
    parts = events(client, "/v1/chat/completions", body)
    assert {(part["object"], part["id"]) for part in parts} == {("chat.completion.chunk", parts[0]["id"])}
    for choice in whole["choices"]:
        mine = [each for part in parts for each in part["choices"] if each["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in each["delta"] for each in mine[1:])
        assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
        reasons = [each["finish_reason"] for each in mine]
        assert reasons[-1] == choice["finish_reason"] and not any(reasons[:-1])
        if choice["logprobs"]:
            tokens = [token for each in mine if each["logprobs"] for token in each["logprobs"]["content"]]
            assert tokens == choice["logprobs"]["content"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_that_straddle_tokens_never_leak(client: httpx.Client, include: bool) -> None:
    body = BASE | {"prompt": PROMPT, "include_stop_str_in_output": include}
    full = completion(client, body)["choices"][0]["text"]
    for start in range(2, 14, 3):
        for length in (1, 2, 3, 5):
            stop = full[start : start + length]
            choice = completion(client, body | {"stop": [stop, full[-3:] + "never"]})["choices"][0]
            assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
            assert choice["text"] == full[: full.index(stop) + (len(stop) if include else 0)]


def test_a_form_of_several_bytes_a_character_is_never_broken(client: httpx.Client) -> None:
    body = BASE | {"prompt": PROMPT, "guided_regex": "(é|日|😀|ß){8}", "max_tokens": 60}
    text = completion(client, body)["choices"][0]["text"]
    assert len(text) == 8 and set(text) <= set("é日😀ß")
    for part in events(client, "/v1/completions", body):
        assert "\ufffd" not in part["choices"][0]["text"]


def test_echo_comes_first(client: httpx.Client) -> None:
    body = BASE | {"prompt": [PROMPT, "Hello"], "echo": True, "logprobs": 1, "n": 2}
    whole = completion(client, body)
    assert [choice["text"].startswith(PROMPT) for choice in whole["choices"]] == [True, True, False, False]
    assert completion(client, body | {"max_tokens": 0})["choices"][2]["text"] == "Hello"


def test_usage_comes_last_when_asked_for(client: httpx.Client) -> None:
    body = BASE | {"prompt": PROMPT, "n": 2}
    whole = client.post("/v1/completions", json=body).json()["usage"]
    parts = events(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert parts[-1]["choices"] == [] and all(part["usage"] is None for part in parts[:-1])
    usage = {key: parts[-1]["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {key: whole[key] for key in usage}
    options = {"include_usage": False, "continuous_usage_stats": True}
    parts = events(client, "/v1/completions", body | {"stream_options": options})
    assert [part["usage"]["completion_tokens"] for part in parts] == sorted(
        part["usage"]["completion_tokens"] for part in parts
    )
    assert parts[-1]["usage"]["completion_tokens"] == whole["completion_tokens"]


def test_the_official_client_reads_streams(openai: OpenAI) -> None:
    request: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 9, "temperature": 0}
    whole = openai.chat.completions.create(**request).choices[0]
    chunks = list(
        openai.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.message.content and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 9
    pieces = list(
        openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=9, temperature=0, stream=True)
    )
    whole_text = (
        openai.completions.create(model=NAME, prompt=PROMPT, max_tokens=9, temperature=0).choices[0].text
    )
    assert "".join(piece.choices[0].text for piece in pieces) == whole_text


def test_streams_run_side_by_side(served: Served) -> None:
    """The second starts and ends while the first one runs."""
    long = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with served.http() as http, http.stream("POST", "/v1/completions", json=long) as stream:
        lines = stream.iter_lines()
        next(lines)
        short = served.openai().completions.create(model=NAME, prompt="b", max_tokens=3)
        assert short.usage and short.usage.completion_tokens == 3
        assert served.llm.engine.has_unfinished
