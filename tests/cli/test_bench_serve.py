"""`thinrank bench serve`: what it prints, and its mistakes; tests/bench/test_serving.py has what it measures."""

import inspect
import json
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest

from thinrank.bench import serving as module
from thinrank.bench.endpoint import Outcome
from thinrank.bench.load import RandomLoad
from thinrank.bench.serving import serving
from thinrank.bench.serving_result import ServingResult, summarize
from thinrank.cli.bench_serve import serve
from thinrank.cli.main import main


def result(**options: Any) -> ServingResult:
    load = RandomLoad(num_prompts=3, request_rate=2.5, max_concurrency=8)
    outcomes = [
        Outcome(100, 0.0, 3, True, 40, [0.5, 1.0, 1.5], 2.0),
        *(Outcome(100, 0.0, error=f"HTTP 429: busy{extra}") for extra in ("", "")),
    ]
    settings = {"base_url": "http://there", "model_id": "m", "backend": "openai", "goodput": {"ttft": 600.0}}
    defaults = {"client_cpu": 0.5, "metrics": ("ttft", "tpot"), "percentiles": (50.0, 99.9)}
    return summarize(
        outcomes, settings=settings | load.to_json(), goodput=settings["goodput"], **defaults | options
    )  # type: ignore[arg-type]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the library was called with; it answers with `asked["result"]`."""
    asked: dict[str, Any] = {"result": result()}

    def fake(base_url: str, **options: Any) -> ServingResult:
        asked.update(options, base_url=base_url)
        answer: ServingResult = asked["result"]
        return answer

    monkeypatch.setattr(module, "serving", fake)
    return asked


def test_options_and_defaults_are_those_of_the_library() -> None:
    options, known = inspect.signature(serve).parameters, inspect.signature(serving).parameters
    assert set(options) - {"json", "api_key_file"} == set(known) - {"progress"}
    for name in set(options) - {"json", "api_key_file", "goodput"}:
        default = known[name].default
        if isinstance(default, tuple):
            default = ",".join(f"{part:g}" if isinstance(part, float) else part for part in default)
        assert options[name].default == default


def test_the_lines_and_the_table(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve"]) == 0
    stdout, stderr = capsys.readouterr()
    for line in (
        "server      http://there, m, openai",
        "load        3 requests, 2.5 a second, at most 8 at a time",
        "completed   1 in 2.00 s, up to 1 at a time",
        "failed      2",
        "            2: HTTP 429: busy",
        "tokens      100 in, 40.0% cached, 3 out",
        "requests/s  0.50",
        "goodput/s   0.50 within ttft 600 ms",
        "tokens/s    1.50 out, 51.50 in and out",
    ):
        assert f"{line}\n" in stdout
    for cell in ("TTFT", "TPOT", "500.00", "median", "p99.9"):
        assert cell in stdout
    assert stderr == ""
    assert (asked["base_url"], asked["request_rate"]) == ("http://127.0.0.1:8000", inf)


def test_options_reach_the_library(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret\n")
    options = "--request-rate inf --percentile-metrics ttft,itl --metric-percentiles 50,99.9"
    limits = "--goodput ttft:200 --goodput tpot:50 --api-key-file"
    assert main(["bench", "serve", "--json", *options.split(), *limits.split(), str(tmp_path / "key")]) == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 1
    assert asked["percentile_metrics"] == ["ttft", "itl"] and asked["metric_percentiles"] == [50, 99.9]
    assert asked["goodput"] == ["ttft:200", "tpot:50"] and asked["api_key"] == "secret"


def test_doubtful_numbers(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked["result"] = result(client_cpu=1.9)
    assert main(["bench", "serve"]) == 0
    assert "busy for 95% of the time and may be what was measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--base-url http://127.0.0.1:9", "cannot reach http://127.0.0.1:9: "),
        ("--base-url nowhere", "base_url is 'nowhere'"),
        ("--metric-percentiles 50,x", "--metric-percentiles is '50,x': give numbers"),
        ("--percentile-metrics latency", "unknown metric 'latency': known: e2el, itl, tpot, ttft"),
        ("--goodput ttft=3", "unknown goodput metric 'ttft=3'"),
        ("--api-key-file no/such", "cannot read the API key no/such"),
        ("--request-rate fast", "--request-rate"),
    ],
)
def test_mistakes(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments.split()]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("\n") == 1
    assert stderr.startswith("error: ") and expected in stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "thinrank.bench.serving")
    monkeypatch.delitem(sys.modules, "thinrank.bench.endpoint")
    monkeypatch.setitem(sys.modules, "httpx2", None)
    assert main(["bench", "serve"]) == 2
    assert capsys.readouterr().err == "error: httpx2 is not installed: pip install 'thinrank[bench]'\n"


def test_a_client_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from thinrank.cli.main import main\n"
        "assert main(['bench', 'serve', '--base-url', 'http://127.0.0.1:9']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
