"""`thinrank eval`: output, JSON, mistakes."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from thinrank.cli import eval as commands
from thinrank.cli.main import main
from thinrank.eval.fidelity import fidelity
from thinrank.eval.perplexity_report import perplexities
from thinrank.eval.tasks import tasks
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_tokenizers import save_byte_level

FIDELITY = ["--device", "cpu", "--num-prompts", "2", "--prompt-len", "6", "--output-len", "3"]
PERPLEXITY = ["--device", "cpu", "--window", "8", "--max-windows", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny_config(vocab_size=300)
    folder = tmp_path_factory.mktemp("eval") / "model"
    return str(save_byte_level(write_folder(folder, config, random_tensors(config))))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must succeed quietly; gives its stdout."""

    def run(*arguments: str) -> str:
        assert main(["eval", *arguments]) == 0
        stdout, stderr = capsys.readouterr()
        assert stderr == ""
        return stdout

    return run


def test_fidelity(run: Callable[..., str], model: str) -> None:
    text = run("fidelity", model, *FIDELITY, "--dtype", "bfloat16")
    for words in (
        "prompts    2, 12 tokens, built-in text, held-out part, no BOS",
        "weights    rounded to bfloat16 for all, the reference too",
        "keep_ratio 1, bfloat16, 2 prompts x 3 tokens",
        "prefill-chunked",
        "hf-static",
        "2/2",
    ):
        assert words in text


def test_fidelity_json_is_one_line(run: Callable[..., str], model: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    text = run("fidelity", model, *FIDELITY, "--no-hf", "--json", "--output-json", str(file))
    assert text.count("\n") == 1
    report = json.loads(text)
    assert [row["system"] for row in report["rows"]] == ["thinrank"] * 4
    assert report == json.loads(file.read_text())


def test_perplexity(run: Callable[..., str], model: str) -> None:
    text = run("perplexity", model, model, *PERPLEXITY, "--stride", "4")
    for words in (
        "text       builtin, held-out",
        "protocol   windows of 8 tokens, stride 4, each on its own, BOS none, path prefill",
        "1.000x",
    ):
        assert words in text
    report = json.loads(run("perplexity", model, *PERPLEXITY, "--path", "decode", "--json"))
    assert report["header"]["path"] == "decode"
    assert [row["model"] for row in report["rows"]] == [model]


@pytest.mark.parametrize(
    ("command", "library"), [("fidelity", fidelity), ("perplexity", perplexities), ("tasks", tasks)]
)
def test_options_and_defaults_are_those_of_the_library(command: str, library: Callable[..., object]) -> None:
    options = inspect.signature(getattr(commands, command)).parameters
    known = inspect.signature(library).parameters
    assert set(options) - {"json"} == set(known) - {"command", "progress", "on_progress"}
    for name in set(options) - {"json"}:
        assert options[name].default == known[name].default


@pytest.mark.parametrize("command", ["eval", "eval fidelity", "eval perplexity", "eval tasks"])
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert f"thinrank {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("eval fidelity no/such --device cpu", "no/such does not exist"),
        ("eval fidelity no/such --device tpu", "unknown device 'tpu'"),
        ("eval fidelity no/such --num-prompts 0", "num_prompts is 0"),
        ("eval perplexity no/such --path x", "unknown path 'x'"),
        ("eval perplexity no/such --text x", "cannot read the text x"),
        ("eval tasks no/such --tasks x --device cpu", "no/such does not exist"),
        ("eval tasks no/such", "thinrank eval tasks --help"),
        ("eval perplexity", "thinrank eval perplexity --help"),
        ("eval fidelitee", "thinrank eval --help"),
    ],
)
def test_mistakes(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.count("\n") == 1
    assert stderr.startswith("error: ") and expected in stderr
