"""What each command does when all is well: its output, its JSON, its files."""

import inspect
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import thinrank
from thinrank.checkpoint.inspect import COMMON_MEMORY, max_context
from thinrank.checkpoint.load import open_checkpoint
from thinrank.cli.main import COMMANDS, main
from thinrank.cli.options import parse_size
from thinrank.cli.output import format_bytes
from thinrank.errors import OptionError


@pytest.fixture
def model(converted: Callable[[str], Path]) -> str:
    return str(converted("asvd-mha-80"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must succeed quietly; gives its stdout."""

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 0
        stdout, stderr = capsys.readouterr()
        assert stderr == ""
        return stdout

    return run


# thinrank itself


def test_version(run: Callable[..., str]) -> None:
    assert run("--version") == f"thinrank {thinrank.__version__}\n"


def test_no_command_is_help(run: Callable[..., str]) -> None:
    assert run() == run("--help")
    assert all(f" {name} " in run() for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Callable[..., str], command: str) -> None:
    assert f"thinrank {command} " in run(command, "--help")


def test_help_shows_brackets(run: Callable[..., str]) -> None:
    """Typer takes them for markup unless they are escaped."""
    assert "pip install 'thinrank[lm-eval]'" in run("eval", "tasks", "--help")


@pytest.mark.parametrize("command", ["convert", "export", "compress"])
def test_options_and_defaults_are_those_of_the_library(command: str) -> None:
    library = inspect.signature(getattr(thinrank, command)).parameters
    options = inspect.signature(COMMANDS[command]).parameters
    assert set(options) - {"json"} == set(library) - {"progress"}
    for name in set(options) - {"json"}:
        assert options[name].default == library[name].default


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_options_of_a_request_have_the_defaults_of_sampling_params(command: str) -> None:
    parameters = inspect.signature(COMMANDS[command]).parameters
    defaults = thinrank.SamplingParams()
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "ignore_eos"):
        assert parameters[name].default == getattr(defaults, name)


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "thinrank", "inspect", "no/such/folder"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert (
        process.stderr == "error: no/such/folder does not exist: name a folder that thinrank convert wrote\n"
    )


# convert, export, inspect


def test_convert(run: Callable[..., str], checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "asvd-mha-80"
    assert "family       asvd" in run("convert", source, tmp_path / "out")
    open_checkpoint(tmp_path / "out")
    report = json.loads(run("convert", source, tmp_path / "out", "--force", "--dtype", "bfloat16", "--json"))
    assert report["family"] == "asvd"
    assert set(report["dtypes"]) == {"bfloat16"}


def test_convert_takes_what_is_missing_from_a_base(
    run: Callable[..., str], checkpoints: Path, tmp_path: Path
) -> None:
    base = checkpoints / "base-llama-mha"
    run("convert", checkpoints / "dobisvd-noremap-0.6", tmp_path / "out", "--base", base)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_export(run: Callable[..., str], model: str, tmp_path: Path) -> None:
    assert str(tmp_path / "out") in run("export", model, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").config.ranks == {}
    run("export", model, tmp_path / "out", "--dtype", "float32", "--force")
    dtypes = {str(tensor.dtype) for tensor in open_checkpoint(tmp_path / "out").tensors.values()}
    assert dtypes == {"torch.float32"}


def test_inspect(run: Callable[..., str], model: str) -> None:
    text = run("inspect", model)
    for part in ("family asvd", "llama, 4 layers", "15 low-rank, 14 dense", "gate_proj", "80.0 GiB"):
        assert part in text


def test_inspect_json_is_consistent_with_the_files(run: Callable[..., str], model: str) -> None:
    facts = json.loads(run("inspect", model, "--json"))
    assert facts["parameters"] == sum(facts["dtypes"].values())
    assert facts["weight_bytes"] == 2 * facts["parameters"] < facts["disk_bytes"]
    assert facts["decode_step_bytes"] < facts["dense_decode_step_bytes"]
    assert facts["low_rank_modules"] == sum(ranks["modules"] for ranks in facts["ranks"].values())
    assert facts["ranks"]["up_proj"] == {"modules": 3, "min": 37, "median": 37, "max": 56}
    assert [fit["memory"] for fit in facts["fits"]] == list(COMMON_MEMORY)


def test_inspect_a_dense_model(run: Callable[..., str], checkpoints: Path) -> None:
    facts = json.loads(run("inspect", checkpoints / "base-llama-gqa", "--json"))
    assert (facts["source"], facts["ranks"], facts["low_rank_modules"]) == ({}, {}, 0)
    assert facts["parameters"] == facts["dense_parameters"]
    assert "dense" in run("inspect", checkpoints / "base-llama-gqa")


def test_the_longest_context(run: Callable[..., str], model: str) -> None:
    """1,732,480 bytes of weights, 2,048 a token, blocks of 64 tokens, trained for 2,048 positions."""
    config = open_checkpoint(model).config
    assert max_context(config, 1_732_479) == 0
    assert max_context(config, 1_732_480 + 64 * 2048 - 1) == 0
    assert max_context(config, 1_732_480 + 64 * 2048) == 64
    assert max_context(config, 2**40) == 2048
    assert json.loads(run("inspect", model, "--memory", "2M", "--json"))["fits"] == [
        {"memory": 2**21, "max_context": 128}
    ]
    assert "does not fit" in run("inspect", model, "--memory", "1M")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1536", 1536), ("1K", 1024), ("512M", 2**29), ("2G", 2**31), ("1.5 GiB", 3 * 2**29), ("1tb", 2**40)],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size("--memory", text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "0", "1X", "1e3", "1 2", "0.1", "٣G", "9" * 400])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(OptionError, match="--memory"):
        parse_size("--memory", text)


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**29, 2**50)] == [
        *("0 bytes", "1023 bytes", "1.0 KiB", "1.5 GiB", "1024.0 TiB")
    ]


# generate


def test_generate_streams_what_json_holds(run: Callable[..., str], model: str) -> None:
    options = ("--prompt", "def main", "--temperature", "0", "--max-tokens", "4")
    result = json.loads(run("generate", model, *options, "--json"))
    assert result["prompt"] == "def main"
    [continuation] = result["outputs"]
    assert continuation["finish_reason"] == "length"
    assert len(continuation["token_ids"]) == 4
    timing = result["timing"]
    assert (timing["prompt_tokens"], timing["output_tokens"]) == (len(result["prompt_token_ids"]), 4)
    assert timing["tokens_per_second"] == pytest.approx(4 / timing["seconds"])
    assert run("generate", model, *options) == continuation["text"] + "\n"


def test_generate_explains_on_stderr(
    run: Callable[..., str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "cpu", "--prompt", "def main", "--temperature", "0", "--max-tokens", "4")
    text = run("generate", model, *options)
    assert main(["generate", model, *options, "--explain"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == text
    assert stderr.startswith("decoder    reference: the kernels of the packed decoder need an NVIDIA GPU\n")


@pytest.mark.parametrize(("n", "blocks"), [(1, 2), (3, 6)])
def test_generate_takes_memory_for_its_sequences_alone(
    model: str, capsys: pytest.CaptureFixture[str], n: int, blocks: int
) -> None:
    options = f"--device cpu --prompt x --max-tokens 2 --max-model-len 128 --n {n} --explain"
    assert main(["generate", model, *options.split()]) == 0
    explained = capsys.readouterr().err
    assert f"KV cache   {blocks} blocks of 64 tokens; up to 128 tokens a sequence\n" in explained


def test_generate_passes_every_option_on(run: Callable[..., str], model: str) -> None:
    options = "--seed 7 --temperature 0.9 --top-p 0.8 --top-k 9 --min-p 0.01 --repetition-penalty 1.1 --n 2"
    engine = "--device cpu --dtype float32 --max-model-len 64 --kv-cache-memory 1M --ignore-eos"
    arguments = [
        *options.split(),
        *engine.split(),
        "--prompt",
        "x",
        "--max-tokens",
        "3",
        "--tokenizer",
        model,
    ]
    first, second = (run("generate", model, *arguments, "--json") for _ in range(2))
    assert json.loads(first)["outputs"] == json.loads(second)["outputs"]
    assert [output["index"] for output in json.loads(first)["outputs"]] == [0, 1]
    texts = [output["text"] for output in json.loads(first)["outputs"]]
    assert run("generate", model, *arguments) == f"[1] {texts[0]}\n[2] {texts[1]}\n"


def test_generate_stops(run: Callable[..., str], model: str) -> None:
    options = ("--prompt", "def main", "--temperature", "0", "--json")
    text = json.loads(run("generate", model, *options))["outputs"][0]["text"]
    stopped = json.loads(run("generate", model, *options, "--stop", "~~~", "--stop", text[3:6]))
    assert stopped["outputs"][0]["stop_reason"] == text[3:6]
    assert stopped["outputs"][0]["text"] == text[: text.index(text[3:6])]


def test_generate_reads_the_prompt_from_a_file(
    run: Callable[..., str], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("größer\n", encoding="utf-8")
    options = ("--max-tokens", "1", "--json")
    from_file = json.loads(run("generate", model, "--prompt-file", tmp_path / "prompt.txt", *options))
    assert from_file["prompt"] == "größer\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("größer\n".encode())))
    assert json.loads(run("generate", model, "--prompt-file", "-", *options))["prompt"] == "größer\n"


# compress, demo


def test_compress(run: Callable[..., str], checkpoints: Path, tmp_path: Path) -> None:
    arguments = [checkpoints / "base-llama-gqa", tmp_path / "{keep_ratio}", "--method", "svd"]
    result = json.loads(run("compress", *arguments, "--keep-ratio", "1", "--keep-ratio", "0.9999", "--json"))
    assert [report["keep_ratio"] for report in result["reports"]] == [1.0, 0.9999]
    for report in result["reports"]:
        open_checkpoint(report["destination"])


@pytest.mark.parametrize(("limit", "code"), [("1e9", 0), ("0", 3)])
def test_compress_has_an_exit_code_for_its_gate(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, code: int
) -> None:
    arguments = ["--method", "svd", "--keep-ratio", "0.05", "--max-perplexity-increase", limit]
    source = str(checkpoints / "base-llama-gqa")
    assert main(["compress", source, str(tmp_path / "out"), *arguments, "--device", "cpu"]) == code
    captured = capsys.readouterr()
    assert "perplexity" in captured.out
    assert ("more than the limit" in captured.err) == (code == 3)
    open_checkpoint(tmp_path / "out")


def test_compress_passes_every_option_on(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def compress(*arguments: Any, **options: Any) -> list[SimpleNamespace]:
        calls.append((*arguments, options))
        return [SimpleNamespace(lines=lambda: ["done"], within_limit=None)]

    monkeypatch.setattr("thinrank.compression.compress", compress)
    options = (
        "--keep-ratio 0.5 --method svd --allocate loss --modules *.mlp.* --rank-multiple 8 --alpha 0.4"
        " --group-size 3 --shared q_proj,k_proj --min-ratio 0.8 --steps 9 --update --seed 5 --statistics s"
        " --max-perplexity-increase 0.5 --perplexity-text p"
        " --calibration-text t --calibration-samples 1 --force"
    )
    assert run("compress", "a", "b", *options.split(), "--device", "cpu", "--dtype", "float16") == "done\n"
    [(source, destination, passed)] = calls
    assert (source, destination) == ("a", "b")
    assert passed == {
        "method": "svd",
        "keep_ratio": 0.5,
        "ranks": None,
        "allocate": "loss",
        "modules": "*.mlp.*",
        "rank_multiple": 8,
        "alpha": 0.4,
        "group_size": 3,
        "shared": ["q_proj", "k_proj"],
        "min_ratio": 0.8,
        "steps": 9,
        "update": True,
        "seed": 5,
        "statistics": "s",
        "max_perplexity_increase": 0.5,
        "perplexity_text": "p",
        "calibration_text": "t",
        "calibration_samples": 1,
        "calibration_length": 512,
        "calibration_format": "text",
        "dtype": "float16",
        "device": "cpu",
        "force": True,
        "progress": False,
    }


def test_demo(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def demo(model: str | None, cache_dir: Path | None, *, progress: bool) -> SimpleNamespace:
        facts = {"model": model, "cache_dir": str(cache_dir), "progress": progress}
        return SimpleNamespace(lines=lambda: ["fast"], to_json=lambda: facts)

    module = ModuleType("thinrank.demo")
    module.demo = demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "thinrank.demo", module)
    assert run("demo") == "fast\n"
    assert json.loads(run("demo", "--model", "m", "--cache-dir", tmp_path, "--json")) == {
        "model": "m",
        "cache_dir": str(tmp_path),
        "progress": False,
    }
