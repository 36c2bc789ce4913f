"""`thinrank bench latency`: output, JSON, mistakes."""

import inspect
import json
import shlex
from pathlib import Path

import pytest

from thinrank.bench import timing
from thinrank.bench.latency import latency as library
from thinrank.bench.systems import BASELINES
from thinrank.cli.bench import latency
from thinrank.cli.main import main

TINY = shlex.split("bench latency --shape tiny --device cpu --input-len 6 --output-len 3 --num-iters 1")


@pytest.fixture(autouse=True)
def small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.BANDWIDTH_BYTES, "cpu", 2**20)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*TINY, *arguments]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    return stdout


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys)
    assert "read, measured in this run" in text
    assert "tiny, uniform, keep_ratio 0.5, bfloat16, batch 1, 6 tokens in, 3 out" in text
    for word in ("thinrank-dense", "ms/token", "MBU", "1.00x"):
        assert word in text


def test_json_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    text = run(capsys, "--json", "--baseline", "densekv", "--output-json", str(file))
    assert text.count("\n") == 1
    report = json.loads(text)
    assert [row["system"] for row in report["rows"]] == ["thinrank", "densekv"]
    assert report == json.loads(file.read_text())


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--verify")
    assert "checked    thinrank: decode logits within" in text
    assert "ms/token" not in text


@pytest.mark.parametrize("command", ["bench", "bench latency"])
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert f"thinrank {command} " in capsys.readouterr().out


def test_help_lists_every_baseline() -> None:
    [parameter] = [p for name, p in inspect.signature(latency).parameters.items() if name == "baseline"]
    for name in BASELINES:
        assert name in str(parameter.annotation)


def test_options_and_defaults_are_those_of_the_library() -> None:
    options, known = inspect.signature(latency).parameters, inspect.signature(library).parameters
    assert set(options) - {"json"} == set(known) - {"command", "on_progress"}
    for name in set(options) - {"json", "baseline"}:
        assert options[name].default == known[name].default


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("bench latency", "there is no model: pass one of MODEL and --shape NAME"),
        ("bench latency no/such --device cpu", "no/such does not exist"),
        ("bench latency --shape gpt-2", "unknown shape 'gpt-2': known: llama-13b"),
        ("bench latency --shape tiny --structure x", "unknown structure 'x'"),
        ("bench latency --shape tiny --baseline vllm --device cpu", "unknown baseline 'vllm': known: all"),
        ("bench latency --shape tiny --device tpu", "unknown device 'tpu'"),
        ("bench latency --shape tiny --keep-ratio 2", "keep_ratio is 2.0"),
        ("bench latency --shap tiny", "thinrank bench --help"),
        ("bench latensy", "thinrank bench --help"),
    ],
)
def test_mistakes(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("\n") == 1
    assert stderr.startswith("error: ") and expected in stderr
