"""`thinrank plan`: a table within 80 columns, one JSON object, one line for a mistake."""

import json
from pathlib import Path

import pytest

from thinrank.bench.shapes import SHAPES
from thinrank.cli.main import main
from thinrank.planning import plan


def test_the_table_and_the_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--shape", "llama-13b", "--gpu", "rtx 4090", "--batch-size", "8"]) == 0
    stdout, stderr = capsys.readouterr()
    lines = stdout.splitlines()
    [row] = [line for line in lines if line.startswith("dense 4 ")]
    assert len(row.split()) == 10  # "dense 4" are two, lr KV is empty
    assert lines[0] == "model    llama-13b"
    assert "RTX 4090" in lines[1]
    assert all(sentence in lines for sentence in plan(shape="llama-13b", gpu="RTX 4090", batch_size=8).advice)
    assert stderr == ""


def test_several_cards(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ["plan", "--shape", "llama3-8b", "--gpu", "h100 sxm", "--tensor-parallel-size", "8"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("card     8 times H100 SXM: ")
    header = next(line for line in lines if line.startswith("keep_ratio "))
    assert header.split()[1:] == ["params", "weights", "KV", "fits", "longest", "reads", "sends", "floor"]
    [row] = [line for line in lines if line.startswith("0.5 ")]
    choice = plan(shape="llama3-8b", gpu="H100 SXM", tensor_parallel_size=8).choices[2]
    assert row.split()[2] == f"{choice.weight_bytes / 2**30:.2f}"
    assert row.split()[7] == f"{choice.sent_bytes / 2**10:.0f}"
    assert max(map(len, lines[: lines.index("", 4)])) <= 80


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    command = ["plan", str(tmp_path), "--memory", "24", "--bandwidth", "1008", "--context", "512", "--json"]
    assert main(command) == 0
    planned = plan(tmp_path, memory=24 * 2**30, bandwidth=1008e9, context=512)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(planned.to_json()))


@pytest.mark.parametrize("memory", ["24", "24G", "24GiB", "24576M"])
def test_memory(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "tiny", "--memory", memory, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["card"]["memory"] == 24 * 2**30


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu", "H200"],
        ["--shape", "tiny", "--gpu", "GTX 9999"],
        ["--shape", "tiny", "--memory", "much"],
        ["--shape", "tiny", "--memory", ""],
        ["--shape", "tiny", "--memory", "24", "--context", "99999"],
        ["--shape", "tiny", "--gpu", "H200", "--tensor-parallel-size", "3"],
        ["missing", "--gpu", "H200"],
    ],
)
def test_mistakes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
