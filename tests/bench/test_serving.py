"""Load on the real server, on one that fails in every way, and on none."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from served_model import Served, load, save_model
from served_model import serving as served_model
from thinrank.bench.serving import serving
from thinrank.errors import OptionError, OutputError, ThinrankError

SMALL = {"random_input_len": 20, "random_output_len": 6, "num_prompts": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("load") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served_model(load(folder), api_keys=("secret",)) as served:
        yield served
        assert served.free_blocks() == served.llm.engine.pool.num_blocks


def test_token_ids_make_lengths_exact(server: Served) -> None:
    result = serving(server.url, api_key="secret", max_concurrency=2, seed=1, **SMALL)
    assert (result.completed, result.failed, result.failures) == (6, 0, {})
    assert (result.total_input_tokens, result.total_output_tokens) == (6 * 20, 6 * 6)
    assert result.counted and result.total_cached_tokens == 0
    assert result.max_concurrent_requests == 2
    statistics = result.statistics
    means = [statistics[metric].mean for metric in ("ttft", "itl", "e2el")]
    assert all(mean is not None and mean > 0 for mean in means)
    for outcome in result.outcomes:
        assert outcome.start < outcome.times[0] <= outcome.times[-1] <= outcome.end
        assert len(outcome.times) <= outcome.output_len == 6
    assert result.settings["model_id"] == "tiny"


def test_a_shared_prefix_is_cached(server: Served) -> None:
    """After the warm-up, two blocks of 64 of every prompt are there."""
    result = serving(server.url, api_key="secret", random_prefix_len=128, seed=2, **SMALL)
    assert result.total_input_tokens == 6 * 148 and result.total_cached_tokens == 6 * 128


def test_chat_at_a_rate_and_its_file(server: Served, folder: Path, tmp_path: Path) -> None:
    """The last event has the right count of tokens, whatever the template added."""
    file = tmp_path / "result.json"
    result = serving(
        f"{server.url}/v1/",
        backend="openai-chat",
        model="alias",
        api_key="secret",
        tokenizer=folder,
        request_rate=200,
        goodput=["e2el:60000"],
        metric_percentiles=[50, 99],
        output_json=file,
        save_detailed=True,
        **SMALL,
    )
    assert result.completed == 6 and result.total_output_tokens == 36
    assert result.total_input_tokens > 6 * 6
    assert result.request_goodput == result.request_throughput
    written = json.loads(file.read_text())
    assert written == json.loads(json.dumps(result.to_json(detailed=True)))
    assert (written["request_rate"], written["model_id"], written["backend"]) == (200, "alias", "openai-chat")
    assert len(written["ttfts"]) == 6 and written["p99_e2el_ms"] >= written["p50_e2el_ms"]
    assert "secret" not in file.read_text()


def test_a_file_named_after_the_run(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    serving(server.url, api_key="secret", save_result=True, max_concurrency=1, **SMALL | {"num_prompts": 1})
    [file] = tmp_path.iterdir()
    assert file.name.startswith("openai-infqps-concurrency1-tiny-")


def test_what_the_server_refuses(server: Served) -> None:
    with pytest.raises(ThinrankError, match="wants a key: pass --api-key"):
        serving(server.url, **SMALL)
    with pytest.raises(OptionError, match="unknown model 'other': known: alias, tiny"):
        serving(server.url, api_key="secret", model="other", **SMALL)
    with pytest.raises(OptionError, match=r"up to 20006 tokens, tiny has a max_model_len of 16384"):
        serving(server.url, api_key="secret", **SMALL | {"random_input_len": 20000})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"base_url": "localhost:8000"}, "give it as http://HOST:PORT"),
        ({"backend": "tgi"}, "unknown backend 'tgi': known: openai, openai-chat"),
        ({"dataset_name": "sharegpt"}, "unknown dataset 'sharegpt': known: random"),
        ({"percentile_metrics": ["latency"]}, "unknown metric 'latency'"),
        ({"metric_percentiles": [101]}, "metric_percentiles has 101"),
        ({"goodput": ["ttft"]}, "give milliseconds"),
        ({"num_prompts": 0}, "num_prompts is 0"),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        serving(**{"base_url": "http://127.0.0.1:9"} | options)


def test_no_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(ThinrankError, match=rf"cannot reach {url}: .*start the server, or name another"):
        serving(url)


# A server that does as the test says.

EVENT = {"choices": [{"index": 0, "text": "word", "finish_reason": None}]}
END = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}


def stream(*events: Any) -> tuple[int, bytes]:
    return 200, b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


@contextmanager
def scripted(*answers: tuple[int, bytes], **routes: tuple[int, bytes]) -> Iterator[str]:
    """A server whose completions are these, one after the other. routes: other answers, by the path's last part."""
    remaining, lock = iter(answers), threading.Lock()
    known = {
        "models": (200, b'{"data": [{"id": "m"}]}'),
        "tokenize": (200, b'{"tokens": [1, 2, 3]}'),
    } | routes

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            name = self.path.rpartition("/")[2]
            with lock:
                status, body = known[name] if name in known else next(remaining)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_failures_are_counted_by_reason() -> None:
    answers = [
        (429, b'{"error": {"message": "too many\\nrequests"}}'),
        (500, b"<h1>proxy</h1>"),
        (429, b'{"error": {"message": "too many\\nrequests"}}'),
        stream(EVENT, {"error": {"message": "the engine died"}}),
        stream(EVENT),
        (200, b"data: no json\n\n"),
        stream({"object": "x"}),
        stream(EVENT, EVENT, END),
    ]
    with scripted(*answers) as url:
        result = serving(url, num_prompts=8, num_warmups=0, max_concurrency=1)
    assert (result.completed, result.failed) == (1, 7)
    reasons = dict(result.failures)
    assert reasons.pop("HTTP 429: too many requests") == 2
    assert reasons.pop("HTTP 500: <h1>proxy</h1>") == 1
    assert reasons.pop("error event: the engine died") == 1
    assert reasons.pop("the stream ended without a finish_reason") == 1
    assert [reason.partition(":")[0] for reason in reasons] == ["an event is not OpenAI's"] * 2


def test_a_server_that_counts_nothing() -> None:
    """Events are taken for tokens; its own count goes before where there is one."""
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
    with scripted(stream(EVENT, EVENT, END), stream(EVENT, EVENT, END, usage)) as url:
        result = serving(url, num_prompts=2, num_warmups=0, max_concurrency=1, random_input_len=7)
    assert not result.counted and result.total_cached_tokens is None
    assert [(o.prompt_len, o.output_len, len(o.times)) for o in result.outcomes] == [(7, 2, 2), (9, 5, 2)]


def test_the_role_of_a_chat_is_no_token() -> None:
    def delta(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    role, text = delta({"role": "assistant", "content": ""}), delta({"content": "word"})
    thought, end = delta({"reasoning_content": "hm"}), delta({}, "stop")
    routes = {"detokenize": (200, b'{"prompt": "a text"}')}
    with scripted(stream(role, thought, text, text, end), stream(role, end), **routes) as url:
        result = serving(url, backend="openai-chat", num_prompts=2, num_warmups=0, max_concurrency=1)
    assert [outcome.output_len for outcome in result.outcomes] == [3, 1]
    assert result.outcomes[1].times == [result.outcomes[1].end]


def test_nothing_succeeds() -> None:
    with scripted((500, b"no"), (500, b"no")) as url:
        with pytest.raises(ThinrankError, match="all 1 requests failed, the first with HTTP 500: no"):
            serving(url, num_prompts=1, num_warmups=0)
        with pytest.raises(ThinrankError, match="a warm-up request failed: HTTP 500: no"):
            serving(url, num_prompts=1)


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({"models": (200, b"<html>")}, "does not answer with JSON: is --base-url an OpenAI"),
        ({"models": (404, b"nothing")}, "answers HTTP 404: nothing: is --base-url"),
        ({"models": (200, b'{"data": []}')}, "serves no model"),
        ({"tokenize": (404, b"nothing")}, "name a folder with the model's tokenizer: --tokenizer"),
    ],
    ids=str,
)
def test_servers_that_are_something_else(routes: dict[str, Any], expected: str) -> None:
    with scripted(**routes) as url, pytest.raises(ThinrankError, match=expected):
        serving(url)


def test_a_file_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path) -> None:
    with scripted() as url, pytest.raises(OutputError, match="name a file in a folder that exists"):
        serving(url, output_json=tmp_path / "no" / "result.json")
