"""What keeps `thinrank serve` from starting: exit code 2 and one line that says what to do."""

import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thinrank.cli.main import main


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--port 70000", ["port is 70000", "65535"]),
        ("--port {busy}", ["cannot listen", "{busy}", "--port"]),
        ("--host no.such.host.invalid", ["cannot listen on no.such.host.invalid", "--host"]),
        ("--api-key ''", ["API key is empty"]),
        ("--api-key-file {tmp}/no", ["cannot read", "--api-key-file"]),
        ("--api-key-file {tmp}/empty", ["has no key"]),
        ("--served-model-name ''", ["served model name is empty"]),
        ("--chat-template {tmp}/no", ["cannot read", "--chat-template"]),
        ("--generation-config maybe", ["'maybe'", "auto, none"]),
        ("--max-request-size lots", ["--max-request-size is 'lots'", "512M"]),
        ("--max-concurrent-requests 0", ["max_concurrent_requests is 0", "at least 1"]),
        ("--request-timeout 0", ["request_timeout is 0", "above 0"]),
        ("--shutdown-timeout -1", ["shutdown_timeout is -1"]),
        ("--shutdown-timeout inf", ["shutdown_timeout is inf"]),
        ("--max-num-seqs 0 --port 0", ["max_num_seqs is 0"]),
        ("--port 0 --tokenizer {tmp}", ["has no tokenizer"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line(
    converted: Callable[[str], Path],
    tmp_path: Path,
    busy_port: int,
    capfd: pytest.CaptureFixture[str],
    options: str,
    words: list[str],
) -> None:
    (tmp_path / "empty").write_text("\n")
    names = {"tmp": tmp_path, "busy": busy_port}
    model = converted("asvd-mha-80")
    arguments = shlex.split(options.format(**names))
    assert main(["serve", str(model), "--device", "cpu", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for word in words:
        assert word.format(**names) in captured.err


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for module in [name for name in sys.modules if name.startswith("thinrank.server.run")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "MODEL"]) == 2
    assert "pip install 'thinrank[serve]'" in capfd.readouterr().err
