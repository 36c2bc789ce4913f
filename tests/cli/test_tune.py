"""`thinrank tune`: output, JSON, mistakes."""

import inspect
import json

import pytest

from thinrank.bench import tune as module
from thinrank.bench.tune import TunedLaunch, TuneReport
from thinrank.cli.main import main
from thinrank.cli.tune import tune
from thinrank.kernels.tuning import GemvConfig, Launch

LAUNCHES = (
    TunedLaunch(Launch("project", 1024, 4096), GemvConfig(8, 4, 8), GemvConfig(16, 4, 8), 11, 351.25, 340.0),
    TunedLaunch(Launch("project_rope", 12288, 1024), GemvConfig(2, 4), GemvConfig(2, 4), 5, 340.0, 340.0),
)
REPORT = TuneReport("NVIDIA H200", 4, (1, 8), (351.2, 500.0), (340.0, 501.5), LAUNCHES, "/a/table.json", 7)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tune", lambda *_, **__: REPORT)


def test_options_and_defaults_are_those_of_the_library() -> None:
    options, known = inspect.signature(tune).parameters, inspect.signature(module.tune).parameters
    assert set(options) - {"json", "output_file"} == set(known) - {"output", "on_progress"}
    for name in set(options) - {"json", "output_file"}:
        assert options[name].default == known[name].default


def test_the_table(found: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--shape", "llama-7b"]) == 0
    text = capsys.readouterr().out
    for part in (
        "NVIDIA H200: a step of 4 layers and the head",
        "1024 x 4096",
        "8 warps, 4 ahead, 8 rows",
        "16 warps, 4 ahead, 8 rows",
        "the same",
        "351.2",
        "batch 1   351.2 -> 340.0 us a step",
        "batch 8   500.0 -> 501.5 us a step",
        "written   /a/table.json, which has 7 launches",
    ):
        assert part in text


def test_json(found: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--shape", "llama-7b", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step_us_after"] == [340.0, 501.5]
    assert report["launches"][0]["after"] == {"num_warps": 16, "ahead": 4, "rows": 8, "splits": 1}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "there is no model: pass one of MODEL and --shape NAME"),
        ("no/such", "no/such does not exist"),
        ("no/such --shape tiny", "both MODEL and --shape are given"),
        ("--shape gpt-2", "unknown shape 'gpt-2': known: llama-13b"),
        ("--shape tiny --dtype int8", "unknown dtype 'int8'"),
        ("--shape tiny --layers 0", "layers is 0: it must be at least 1"),
        ("--shape tiny --layers 4", "layers is 4, the model has 3: lower it"),
        (
            "--shape tiny --device cpu",
            "tune measures GPU kernels and CUDA graphs, and the device is cpu: run it on a machine with an NVIDIA GPU",
        ),
        ("--shap tiny", "thinrank tune --help"),
    ],
)
def test_mistakes(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments.split()]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("\n") == 1
    assert stderr.startswith("error: ") and expected in stderr
