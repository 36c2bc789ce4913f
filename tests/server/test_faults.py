"""Clients that vanish, dawdle or flood, engines that die, servers that are told to stop: the next good request is
answered, and nothing is left behind."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai as openai_package
import pytest

from served_model import NAME, Served, load, serving
from thinrank.engine.engine import Engine
from thinrank.engine.runner import Runner
from thinrank.errors import ThinrankError
from thinrank.server import run

LONG = {"prompt": "x", "max_tokens": 15_000, "ignore_eos": True}
SHORT = {"prompt": "x", "max_tokens": 3}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(load(folder)) as served:
        yield served


def wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def is_idle(server: Served) -> bool:
    return not server.llm.engine.has_unfinished and server.free_blocks() == server.llm.engine.pool.num_blocks


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def answers(server: Served) -> None:
    with server.http() as http:
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def send(server: Served, body: dict[str, Any]) -> socket.socket:
    """A raw connection that has sent a request and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    content = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    connection.sendall("\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content)
    return connection


def test_a_client_that_reads_nothing_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers are full of an echoed prompt; the system gives up on it."""
    monkeypatch.setattr(run, "UNREAD_TIMEOUT_MS", 1000)
    body = LONG | {"prompt": [5] * 6000, "max_tokens": 9000, "echo": True, "logprobs": 20, "stream": True}
    with serving(load(folder)) as served, closing(send(served, body)) as connection:
        wait(lambda: served.llm.engine.has_unfinished)
        wait(lambda: is_idle(served), seconds=20)
        assert (
            served.service.metrics.render().decode().count('finished_reason="abort",model_name="tiny"} 1.0')
        )
        assert connection.fileno() >= 0


def test_events_are_not_held_back() -> None:
    """Nagle's algorithm would wait 40 ms for the client's delayed acknowledgement of the event before."""
    with (
        closing(run.bind("127.0.0.1", 0)) as listener,
        closing(socket.socket()) as client,
    ):
        listener.listen()
        client.connect(listener.getsockname())
        connection, _ = listener.accept()
        with closing(connection):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_engine(server: Served, stream: bool) -> None:
    with closing(send(server, LONG | {"stream": stream, "n": 2})) as connection:
        wait(lambda: server.llm.engine.has_unfinished)
        if stream:
            assert b"200 OK" in connection.recv(1000)
    wait(lambda: is_idle(server), seconds=10)
    answers(server)


def test_ten_thousand_tokens(server: Served) -> None:
    """Streams that run meanwhile go on; a prompt that does not fit is refused."""
    with server.http() as http:
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            response = http.post(
                "/v1/completions", json={"prompt": [7] * 10_000, "max_tokens": 2, "logprobs": 1}
            )
            assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] == 10_000
            next(lines)
        assert http.post("/v1/completions", json={"prompt": [7] * 20_000}).status_code == 400
    wait(lambda: is_idle(server))


def test_a_slow_reader_delays_nobody(server: Served) -> None:
    """What it does not read is a few hundred bytes a token, far more than the socket's buffers hold."""
    with closing(send(server, LONG | {"max_tokens": 3000, "logprobs": 20, "stream": True})) as connection:
        wait(lambda: server.llm.engine.has_unfinished)
        started = time.monotonic()
        answers(server)
        assert time.monotonic() - started < 10
        wait(lambda: is_idle(server), seconds=180)  # it is done although nobody reads
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data += connection.recv(2**20)
    body = data[data.index(b"\r\n\r\n") + 4 :]
    assert body.count(b'"finish_reason":"length"') == 1


def test_two_hundred_connections(server: Served) -> None:
    def ask(number: int) -> str:
        body = {"prompt": [number + 5, 9], "max_tokens": 4, "temperature": 0}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200
        return str(response.json()["choices"][0]["text"])

    alone = [ask(number) for number in (0, 100, 199)]
    files = open_files()
    with ThreadPoolExecutor(200) as pool:
        texts = list(pool.map(ask, range(200)))
    assert [texts[0], texts[100], texts[199]] == alone
    wait(lambda: is_idle(server))
    wait(lambda: open_files() <= files)


def test_garbage_on_the_wire(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    bad_length = b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n"
    for data in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", bad_length):
        with closing(socket.create_connection((host, int(port)), timeout=30)) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert b" 500 " not in connection.recv(1000)
    with closing(send(server, SHORT)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # pipelined
        data = b""
        while data.count(b"HTTP/1.1 200") < 2:
            data += connection.recv(1000)
    answers(server)


def test_a_dead_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(load(folder)) as served, served.http() as http:
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["error"]["type"] == "server_error"
        for response in (http.get("/health"), http.post("/v1/completions", json=SHORT)):
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_unavailable"
        with pytest.raises(openai_package.InternalServerError):
            served.openai().completions.create(model=NAME, prompt="x")


def test_nonsense_from_the_model_ends_what_runs_and_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what waits for its turn nor what comes later."""
    with serving(load(folder, max_num_seqs=1)) as served, served.http() as http, ThreadPoolExecutor() as pool:
        decode = Runner.decode

        def fail_once(runner: Runner, sequences: Any) -> Any:
            if not served.llm.engine.scheduler.waiting:
                return decode(runner, sequences)
            monkeypatch.setattr(Runner, "decode", decode)
            raise ThinrankError("the model computed infinite or undefined logits")

        running = pool.submit(http.post, "/v1/completions", json=LONG)
        wait(lambda: bool(served.llm.engine.scheduler.running))
        monkeypatch.setattr(Runner, "decode", fail_once)
        answers(served)  # it waits until the other one fails
        response = running.result()
        assert response.status_code == 500 and "undefined logits" in response.json()["error"]["message"]
        wait(lambda: is_idle(served))


def start(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    program = (
        "import torch, sys; torch.set_num_threads(1); from thinrank.cli.main import main; sys.exit(main())"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "serve",
        str(folder),
        "--port",
        "0",
        "--device",
        "cpu",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    for line in process.stderr:
        if line.startswith("serving "):
            return process, line.split()[-1].removesuffix("/v1")
    raise AssertionError("it ended")


def test_sigterm_under_load(folder: Path) -> None:
    """What can finish in time does; the rest is told; the process ends by itself with 0."""
    process, url = start(folder, "--shutdown-timeout", "2", "--served-model-name", NAME)
    with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(8) as pool:

        def stream(_: int) -> list[str]:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60
            ) as response:
                return [line for line in response.iter_lines() if line]

        streams = [pool.submit(stream, number) for number in range(4)]
        whole = pool.submit(http.post, "/v1/completions", json=LONG)
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        short = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        with httpx.Client(base_url=url) as other:
            wait(lambda: 'num_requests_running{model_name="tiny"} 6.0' in other.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        assert short.result().status_code == 200
        for future in streams:
            *_, error, done = future.result()
            assert done == "data: [DONE]"
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert whole.result().status_code == 503
    assert process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_second_signal_is_impatience(folder: Path) -> None:
    process, url = start(folder, "--shutdown-timeout", "60")
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=60)
        wait(lambda: "num_requests_running" in httpx.get(f"{url}/metrics").text and not whole.done())
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert whole.result().status_code == 503
    assert process.wait(20) == 0
