"""`thinrank bench`: output, JSON, mistakes."""

import inspect
import json
import shlex
from pathlib import Path

import pytest

from thinrank.bench import ablation as ablation_module
from thinrank.bench import sweep as sweep_module
from thinrank.bench import throughput as throughput_module
from thinrank.bench import timing
from thinrank.bench.ablation import AblationRow
from thinrank.bench.gate import Check
from thinrank.bench.latency import latency as library
from thinrank.bench.report import Report
from thinrank.bench.sweep import SweepRow
from thinrank.bench.systems import BASELINES
from thinrank.cli import bench as commands
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


def test_a_sampled_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--temperature", "0.8", "--baseline", "densekv")
    assert "3 out, thinrank at temperature 0.8" in " ".join(run(capsys, *arguments).split())
    rows = json.loads(run(capsys, *arguments, "--json"))["rows"]
    assert [row["temperature"] for row in rows] == [0.8, 0.0]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--explain", "--baseline", "densekv")
    assert "explained  thinrank\n  decoder    reference: the kernels of the packed decoder need" in text
    explained = json.loads(run(capsys, "--explain", "--baseline", "densekv", "--json"))["header"]["explained"]
    assert list(explained) == ["thinrank"] and "graphs     none" in explained["thinrank"]


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--verify")
    assert "checked    thinrank: decode logits within" in text
    assert "ms/token" not in text


@pytest.mark.parametrize(
    "command", ["bench", "bench latency", "bench ablation", "bench sweep", "bench throughput", "bench serve"]
)
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


@pytest.mark.parametrize("name", ["ablation", "sweep", "throughput"])
def test_options_and_defaults_of_the_others(name: str) -> None:
    options = inspect.signature(getattr(commands, name)).parameters
    module = {"ablation": ablation_module, "sweep": sweep_module, "throughput": throughput_module}[name]
    known = inspect.signature(getattr(module, name)).parameters
    assert set(options) - {"json"} == set(known) - {"command", "on_progress"}
    for option in set(options) - {"json"}:
        default = known[option].default
        lists = isinstance(default, tuple)
        assert options[option].default == (",".join(map(str, default)) if lists else default)


HEADER = {
    "device": "card", "driver": None, "thinrank": "1", "torch": "2", "triton": "3", "transformers": None,
    "commit": None, "dtype": "bfloat16", "shape": "tiny", "structure": "uniform", "keep_ratio": 0.5, "context_len": 512,
    "read_bandwidth_bytes_per_s": None,
}  # fmt: skip


def test_the_tables_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How the rows of the two benchmarks are shown."""
    settings = (True, False, False, "split", False)
    measured = (98.0, 0.0, 3.0, 4.0, 5.0, 6.0, 2.5, 1.25)
    rows = [
        AblationRow("low-rank", series, change, *settings, *measured)
        for series, change in [
            ("base", ""),
            ("alone", "pdl=on"),
            ("ladder", "graph=split"),
            ("without", "pdl=off"),
        ]
    ]
    report = Report(HEADER, (Check("dense", "variants' logits", 1e-3, 4e-2, "the full path's"),), tuple(rows))
    monkeypatch.setattr(ablation_module, "ablation", lambda *_, **__: report)
    assert main(["bench", "ablation"]) == 0
    text = capsys.readouterr().out
    assert "tiny, uniform, keep_ratio 0.5, bfloat16, batch 1, context 512" in text
    assert "checked    dense: variants' logits within 0.001 of the full path's (allowed 0.04)" in text
    for step in ("base ", "base, pdl=on", "+ graph=split", "full, pdl=off"):
        assert f"low-rank: {step}" in text
    for cell in ("98", "3.000", "5.000", "1.25x", "2.50x"):
        assert cell in text

    points = (
        SweepRow(0.3, "uniform", input_len=512, ttft_ms=12.5),
        SweepRow(1.0, "dense", None, None, 16384, 1.0, 2.0, 3.0, 2**30, 0.75),
    )
    monkeypatch.setattr(sweep_module, "sweep", lambda *_, **__: Report(HEADER, (), points))
    assert main(["bench", "sweep"]) == 0
    text = capsys.readouterr().out
    for cell in ("0.3 uniform", "512", "12.50", "1 dense", "16384", "2.000", "75.0%", "1.0 GiB", "-"):
        assert cell in text


def test_the_table_of_many_streams(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--streams 1,2 --input-len 5 --output-len 3 --prefix-len 128 --num-iters 1 --num-iters-warmup 0"
    assert main(["bench", "throughput", "--shape", "tiny", "--device", "cpu", *sizes.split()]) == 0
    text = capsys.readouterr().out
    assert "tiny, bfloat16" in text and "checked    thinrank x2: decode logits within" in text
    for cell in (
        "thinrank 0.5",
        "thinrank-dense 1",
        "decode tok/s",
        "of dense",
        "of 1",
        "1.00x",
        "128",
        "64",
    ):
        assert cell in text


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
        ("bench latency --shape tiny --temperature -1", "temperature is -1.0: it must be 0 or more"),
        ("bench latency --shape tiny --verify --explain", "explain describes what is timed"),
        ("bench latency --shap tiny", "thinrank bench latency --help"),
        ("bench latensy", "thinrank bench --help"),
        ("bench ablation --device cpu", "run it on a machine with an NVIDIA GPU"),
        ("bench ablation --shape gpt-2", "unknown shape 'gpt-2'"),
        ("bench ablation --context-len 1", "context_len is 1: it must be at least 16"),
        ("bench sweep --device cpu", "run it on a machine with an NVIDIA GPU"),
        (
            "bench sweep --keep-ratios 0.5,x",
            "--keep-ratios is '0.5,x': give numbers with commas between them",
        ),
        ("bench sweep --input-lens 0.5", "--input-lens is '0.5'"),
        ("bench sweep --context-lens 0", "context_len is 0"),
        ("bench throughput", "there is no model: pass one of MODEL and --shape NAME"),
        ("bench throughput --shape tiny --device cpu --streams 1,x", "--streams is '1,x'"),
        ("bench throughput --shape tiny --device cpu --streams 0", "streams is 0"),
    ],
)
def test_mistakes(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("\n") == 1
    assert stderr.startswith("error: ") and expected in stderr
