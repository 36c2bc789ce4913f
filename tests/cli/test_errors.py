"""Every mistake a person can make: exit code 2, one line on stderr that says what, why and what next,
nothing on stdout and nothing left on the disk."""

import builtins
import errno
import json
import os
import pickle
import re
import shlex
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from thinrank.cli.main import main


class Sandbox(NamedTuple):
    """What commands below name: {model} is converted, {asvd} and {svdllm} (a pickle) foreign, {base} dense"""

    tmp: Path
    model: Path
    asvd: Path
    base: Path
    svdllm: Path

    @property
    def out(self) -> Path:
        return self.tmp / "out"

    def command(self, text: str) -> list[str]:
        return shlex.split(text.format(**self._asdict(), out=self.out))

    def copy(self, folder: Path, **config: object) -> Path:
        """A copy to damage, with changes to its config.json; None removes a key."""
        copy = self.tmp / "copy"
        shutil.copytree(folder, copy)
        if config:
            path = copy / "config.json"
            changed = {**json.loads(path.read_text()), **config}
            path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
        return copy


@pytest.fixture
def sandbox(tmp_path: Path, checkpoints: Path, converted: Callable[[str], Path]) -> Sandbox:
    [svdllm] = (checkpoints / "svdllm_v1-whitening_only-0.8").glob("*.pt")
    asvd = checkpoints / "asvd-mha-80"
    return Sandbox(tmp_path, converted(asvd.name), asvd, checkpoints / "base-llama-mha", svdllm)


@pytest.fixture
def fails(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail, and returns its message."""

    def run(command: str | list[str], *expected: str, code: int = 2) -> str:
        arguments = sandbox.command(command) if isinstance(command, str) else command
        before = sorted(sandbox.tmp.rglob("*"))
        assert main(arguments) == code
        stdout, stderr = capsys.readouterr()
        assert stdout == ""
        assert stderr.count("\n") == 1
        assert stderr.startswith("error: ")
        for part in expected:
            assert part in stderr
        assert sorted(sandbox.tmp.rglob("*")) == before
        return stderr

    return run


USAGE = {
    "unknown command": ("generat", "no such command 'generat'", "Did you mean 'generate'"),
    "unknown command without a neighbour": ("xyzzy", "no such command 'xyzzy'", "thinrank --help"),
    "unknown option": ("convert {asvd} {out} --bas x", "--bas", "--base", "thinrank convert --help"),
    "unknown root option": ("--verison", "--verison", "--version", "thinrank --help"),
    "missing argument": ("convert {asvd}", "missing argument 'DST'", "thinrank convert --help"),
    "no argument": ("inspect", "missing argument 'MODEL'"),
    "extra argument": ("inspect {model} more", "unexpected extra argument", "more"),
    "option without value": ("generate {model} --prompt", "--prompt", "requires an argument"),
    "missing keep-ratio": ("compress {base} {out}", "missing option", "--keep-ratio"),
    "words for a number": ("generate {model} --prompt x --max-tokens many", "--max-tokens", "valid"),
    "keep-ratio abc": ("compress {base} {out} --keep-ratio abc", "--keep-ratio", "valid"),
}

OPTIONS = {
    "no prompt": ("generate {model}", "there is no prompt", "--prompt TEXT"),
    "two prompts": ("generate {model} --prompt x --prompt-file y", "both", "pass one of"),
    "prompt file missing": ("generate {model} --prompt-file {tmp}/no", "cannot read", "--prompt-file"),
    "prompt file is a folder": ("generate {model} --prompt-file {tmp}", "cannot read", "--prompt-file"),
    "negative temperature": (
        "generate {model} --prompt x --temperature -1",
        "temperature is -1",
        "0 or more",
    ),
    "temperature nan": ("generate {model} --prompt x --temperature nan", "temperature is nan"),
    "max-tokens 0": ("generate {model} --prompt x --max-tokens 0", "max_tokens is 0", "at least 1"),
    "n 0": ("generate {model} --prompt x --n 0", "n is 0", "at least 1"),
    "top-p 0": ("generate {model} --prompt x --top-p 0", "top_p is 0", "above 0"),
    "top-k": ("generate {model} --prompt x --top-k -2", "top_k is -2", "-1 or more"),
    "min-p": ("generate {model} --prompt x --min-p 2", "min_p is 2", "0 to 1"),
    "repetition-penalty": ("generate {model} --prompt x --repetition-penalty 0", "repetition_penalty is 0"),
    "seed": ("generate {model} --prompt x --seed 99999999999999999999", "seed is", "64-bit"),
    "empty stop": ("generate {model} --prompt x --stop ''", "stop contains an empty string"),
    "bad size": ("generate {model} --prompt x --kv-cache-memory lots", "--kv-cache-memory is 'lots'", "512M"),
    "tiny cache": ("generate {model} --prompt x --kv-cache-memory 1K", "less than one block"),
    "small cache": (
        "generate {model} --prompt x --kv-cache-memory 256K --max-tokens 500",
        "500",
        "raise kv_cache_memory or lower max_tokens",
    ),
    "max-model-len": ("generate {model} --prompt x --max-model-len 4096", "4096", "2048", "lower it"),
    "max-model-len 0": ("generate {model} --prompt x --max-model-len 0", "max_model_len is 0", "at least 1"),
    "long prompt": ("generate {model} --prompt 'a b c d' --max-model-len 3", "prompt", "3", "max_model_len"),
    "bad memory": ("inspect {model} --memory 12X", "--memory is '12X'", "24G"),
    "memory 0": ("inspect {model} --memory 0", "--memory is '0'"),
    "unknown device": ("generate {model} --prompt x --device tpu", "unknown device 'tpu'", "auto, cpu, cuda"),
    "generate dtype": ("generate {model} --prompt x --dtype int3", "unknown dtype 'int3'", "bfloat16"),
    "convert dtype": ("convert {asvd} {out} --dtype int3", "unknown dtype 'int3'", "bfloat16"),
    "export dtype": ("export {model} {out} --dtype int3", "unknown dtype 'int3'", "bfloat16"),
    "compress dtype": ("compress {base} {out} --keep-ratio 0.5 --dtype int3", "unknown dtype 'int3'"),
    "method": ("compress {base} {out} --keep-ratio 0.5 --method asvdd", "'asvdd'", "svd, svd-llm"),
    "keep-ratio 0": ("compress {base} {out} --keep-ratio 0", "keep_ratio is 0", "above 0"),
    "keep-ratio 1.5": ("compress {base} {out} --keep-ratio 1.5", "keep_ratio", "1.5", "to 1"),
    "ratios without placeholder": (
        "compress {base} {out} --keep-ratio 0.5 --keep-ratio 0.6",
        "{{keep_ratio}}".format(),
    ),
    "calibration text": (
        "compress {base} {out} --keep-ratio 0.5 --calibration-text {tmp}/no",
        "no",
    ),
    "calibration samples": (
        "compress {base} {out} --keep-ratio 0.5 --calibration-samples 0",
        "0 calibration samples",
        "at least 1",
    ),
    "calibration length": (
        "compress {base} {out} --keep-ratio 0.5 --calibration-length 0",
        "0 tokens",
        "at least 1",
    ),
    "no chat template": ("chat {model} --prompt x", "no chat template", "generate"),
    "chat template missing": ("chat {model} --chat-template {tmp}/no", "cannot read", "--chat-template"),
    "tokenizer folder": ("generate {model} --prompt x --tokenizer {tmp}", "has no tokenizer"),
}

PATHS = {
    "demo: foreign": ("demo --model {asvd} --cache-dir {tmp}/cache", "thinrank convert"),
    "convert: missing": ("convert {tmp}/no {out}", "does not exist", "check the path"),
    "convert: empty folder": ("convert {tmp} {out}", "holds no model", "name the folder"),
    "convert: base missing": ("convert {svdllm} {out} --base {tmp}/no", "does not exist"),
    "convert: itself": ("convert {model} {out}", "is a thinrank checkpoint already", "use it as it is"),
    "export: missing": ("export {tmp}/no {out}", "does not exist"),
    "export: foreign": ("export {asvd} {out}", "thinrank convert"),
    "inspect: missing": ("inspect {tmp}/no", "does not exist"),
    "inspect: empty folder": ("inspect {tmp}", "is empty", "name a folder"),
    "inspect: foreign": ("inspect {asvd}", "thinrank convert"),
    "generate: missing": ("generate {tmp}/no --prompt x", "does not exist"),
    "generate: hub id": ("generate org/name --prompt x", "does not exist"),
    "chat: missing": ("chat {tmp}/no --prompt x", "does not exist"),
    "compress: missing": ("compress {tmp}/no {out} --keep-ratio 0.5", "does not exist"),
    "compress: foreign": ("compress {asvd} {out} --keep-ratio 0.5", "not a thinrank checkpoint"),
    "compress: low-rank": ("compress {model} {out} --keep-ratio 0.5", "low-rank already", "dense"),
    "demo: missing": ("demo --model {tmp}/no --cache-dir {tmp}/cache", "no", "does not exist"),
    "demo: low-rank": ("demo --model {model} --cache-dir {tmp}/cache", "low-rank already", "dense"),
    "demo: cache below a file": ("demo --model {base} --cache-dir {asvd}/config.json", "cannot write"),
    "destination exists": ("convert {asvd} {model}", "exists already", "--force"),
    "export: destination exists": ("export {model} {asvd}", "exists already", "--force"),
    "compress: destination exists": ("compress {base} {asvd} --keep-ratio 0.5", "exists already", "--force"),
    "force on the system": ("convert {asvd} /usr --force", "is no checkpoint", "remove it yourself"),
    "destination below a file": (
        "convert {asvd} {asvd}/config.json/out",
        "cannot write",
        "another destination",
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in (USAGE | OPTIONS | PATHS).items()]
)
def test_a_mistake_is_one_line(fails: Callable[..., str], case: tuple[str, ...]) -> None:
    fails(*case)


@pytest.mark.parametrize("command", ["generate {folder} --prompt x", "inspect {folder}", "chat {folder}"])
def test_a_foreign_checkpoint_is_told_the_command_that_converts_it(
    sandbox: Sandbox, fails: Callable[..., str], command: str
) -> None:
    folder = sandbox.tmp / "my model"
    shutil.copytree(sandbox.asvd, folder)
    message = fails(shlex.split(command.format(folder=shlex.quote(str(folder)))))
    suggested = shlex.split(message.partition("convert it with: ")[2])
    assert suggested == ["thinrank", "convert", str(folder), f"{folder}-thinrank"]
    assert main(suggested[1:]) == 0


def test_a_prompt_that_is_no_utf8(fails: Callable[..., str], sandbox: Sandbox) -> None:
    fails(["generate", str(sandbox.model), "--prompt", os.fsdecode(b"\xff")], "--prompt is no valid UTF-8")
    path = sandbox.tmp / "prompt.txt"
    path.write_bytes(b"abc\xff")
    fails(f"generate {{model}} --prompt-file {path}", "prompt.txt is no valid UTF-8")


def test_a_chat_template_that_is_no_template(fails: Callable[..., str], sandbox: Sandbox) -> None:
    path = sandbox.tmp / "template.jinja"
    path.write_text("{% for %}")
    fails(f"chat {{model}} --prompt x --chat-template {path}", "chat template")
    path.write_bytes(b"\xff")
    fails(f"chat {{model}} --prompt x --chat-template {path}", "cannot read", "--chat-template")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(fails: Callable[..., str]) -> None:
    fails("generate {model} --prompt x --device cuda", "'cuda' is not available", "--device cpu")
    fails("compress {base} {out} --keep-ratio 0.5 --device cuda:3", "'cuda:3' is not available")


def test_a_hub_id_that_is_not_cached(fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails("convert no-such-org/no-such-model {out}", "no-such-org/no-such-model", "check the name")


# Damaged checkpoints: a change to a copy of a good one, and what the message must name.


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        (folder / name).unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def absurd_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")


def text_as_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def weights_are_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{ 'a': 1 }")


def config_is_binary(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def config_is_a_bomb(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)


def index(folder: Path, name: str) -> None:
    """Replace the single file by an index that puts one tensor into the named file."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"model.norm.weight": "model-00001-of-00002.safetensors", "lm_head.weight": name}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def missing_shard(folder: Path) -> None:
    index(folder, "model-00002-of-00002.safetensors")


def shard_outside(folder: Path) -> None:
    index(folder, "../x")


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


DAMAGES = [
    (truncated_weights, ["model.safetensors", "damaged or incomplete"]),
    (empty_weights, ["model.safetensors", "damaged or incomplete"]),
    (absurd_header, ["model.safetensors", "damaged or incomplete"]),
    (text_as_weights, ["model.safetensors", "damaged or incomplete"]),
    (weights_are_a_folder, ["copy", "convert"]),
    (config_is_no_json, ["config.json is no valid JSON"]),
    (config_is_binary, ["config.json is no valid JSON"]),
    (config_is_a_list, ["config.json holds no JSON object"]),
    (config_is_a_bomb, ["config.json is no valid JSON"]),
    (no_config, ["convert"]),
    (missing_shard, ["lacks model-00002-of-00002.safetensors", "1 of 2"]),
    (shard_outside, ["names the file '../x'"]),
    (empty_index, ["has no weight_map"]),
]


@pytest.mark.parametrize("command", ["generate {folder} --prompt x", "convert {folder} {out}"])
@pytest.mark.parametrize(("damage", "expected"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_checkpoint(
    sandbox: Sandbox,
    fails: Callable[..., str],
    command: str,
    damage: Callable[[Path], None],
    expected: list[str],
) -> None:
    folder = sandbox.copy(sandbox.base if command.startswith("convert") else sandbox.model)
    damage(folder)
    if command.startswith("convert"):
        expected = {no_config: ["no config.json", "--base"], weights_are_a_folder: ["holds no model"]}.get(
            damage, expected
        )
    fails(shlex.split(command.format(folder=folder, out=sandbox.out)), *expected)


@pytest.mark.parametrize("damage", [no_tokenizer, broken_tokenizer])
@pytest.mark.parametrize("command", ["generate {folder} --prompt x", "chat {folder} --prompt x"])
def test_a_missing_or_damaged_tokenizer(
    sandbox: Sandbox, fails: Callable[..., str], damage: Callable[[Path], None], command: str
) -> None:
    folder = sandbox.copy(sandbox.model)
    damage(folder)
    fails(shlex.split(command.format(folder=folder)), "tokenizer", str(folder))


CONFIGS = {
    "opt": ({"model_type": "opt", "architectures": ["OPTForCausalLM"]}, "the architecture 'opt'"),
    "gpt2": ({"model_type": "gpt2"}, "the architecture 'gpt2'"),
    "no model_type": ({"model_type": None}, "model_type"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantis"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "quantis"),
    "quantized with nonsense": ({"quantization_config": "int4"}, "quantis"),
    "no hidden_size": ({"hidden_size": None}, "hidden_size"),
    "hidden_size 0": ({"hidden_size": 0}, "hidden_size = 0"),
    "negative vocabulary": ({"vocab_size": -1}, "vocab_size = -1"),
    "absurd vocabulary": ({"vocab_size": 10**30}, "vocab_size"),
    "absurd layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "many layers": ({"num_hidden_layers": 50}, "lacks tensors"),
    "layers as text": ({"num_hidden_layers": "4"}, "num_hidden_layers"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "heads do not divide": ({"num_key_value_heads": 3}, "key-value heads"),
    "odd head_dim": ({"head_dim": 15}, "head_dim"),
    "other hidden_size": ({"hidden_size": 256}, "wrong shape"),
    "activation": ({"hidden_act": "relu"}, "hidden_act"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    "rope is a list": ({"rope_scaling": [1]}, "rope_scaling"),
    "rope factor 0": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    "eps as text": ({"rms_norm_eps": "small"}, "rms_norm_eps"),
}


@pytest.mark.parametrize("command", ["generate {folder} --prompt x", "convert {folder} {out}"])
@pytest.mark.parametrize(("change", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_cannot_be_run(
    sandbox: Sandbox, fails: Callable[..., str], command: str, change: dict[str, object], expected: str
) -> None:
    folder = sandbox.copy(sandbox.base, **change)
    fails(shlex.split(command.format(folder=folder, out=sandbox.out)), expected)


UP_PROJ = "model.layers.0.mlp.up_proj"

SECTIONS = {
    "newer format": ({"format_version": 2}, "format_version 2"),
    "no modules": ({"modules": None}, "lacks modules"),
    "no module": ({"modules": {}}, "unexpected tensors"),
    "unknown module": (
        {"modules": {"model.layers.9.mlp.up_proj": {"rank": 4}}},
        "model.layers.9.mlp.up_proj",
    ),
    "rank 0": ({"modules": {UP_PROJ: {"rank": 0}}}, f"gives {UP_PROJ} the rank 0"),
    "no rank": ({"modules": {UP_PROJ: {}}}, f"gives {UP_PROJ} the rank None"),
    "other rank": ({"modules": {UP_PROJ: {"rank": 1}}}, UP_PROJ),
    "absurd rank": ({"modules": {UP_PROJ: {"rank": 10**40}}}, UP_PROJ),
    "tie to nothing": ({"tied_factors": {"a": "b"}}, "ties a to b"),
}


@pytest.mark.parametrize(("change", "expected"), SECTIONS.values(), ids=SECTIONS)
def test_a_damaged_section(
    sandbox: Sandbox, fails: Callable[..., str], change: dict[str, object], expected: str
) -> None:
    section = json.loads((sandbox.model / "config.json").read_text())["quantization_config"]
    if change.get("modules"):
        change = {"modules": {**section["modules"], **change["modules"]}}
    folder = sandbox.copy(sandbox.model, quantization_config={**section, **change})
    fails(["inspect", str(folder)], expected)


# Foreign files


def test_a_truncated_pickle(sandbox: Sandbox, fails: Callable[..., str]) -> None:
    path = sandbox.tmp / "model.pt"
    path.write_bytes(sandbox.svdllm.read_bytes()[:100_000])
    fails(f"convert {path} {{out}}", "model.pt")


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return builtins.exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("protocol", ["zip", "plain"])
def test_a_hostile_pickle(sandbox: Sandbox, fails: Callable[..., str], name: str, protocol: str) -> None:
    path = sandbox.tmp / "folder" / name
    path.parent.mkdir()
    value = {"weight": torch.zeros(2), "bomb": Hostile()}
    if protocol == "zip":
        torch.save(value, path)
    else:
        path.write_bytes(pickle.dumps(value))
    fails(f"convert {path} {{out}}", name)


def test_a_file_of_another_kind(sandbox: Sandbox, fails: Callable[..., str]) -> None:
    path = sandbox.tmp / "notes.txt"
    path.write_text("nothing")
    fails(f"convert {path} {{out}}", "notes.txt is neither safetensors")
    fails(f"convert {sandbox.tmp} {{out}}", "holds no model")
    fails(f"generate {path} --prompt x", "notes.txt is not a thinrank checkpoint")


def test_a_truncated_gguf(sandbox: Sandbox, fails: Callable[..., str]) -> None:
    path = sandbox.tmp / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**40, 2**40) + b"\0" * 64)
    fails(f"convert {path} {{out}}", "model.gguf")


# The destination


def test_force_does_not_replace_what_is_no_checkpoint(sandbox: Sandbox, fails: Callable[..., str]) -> None:
    sandbox.out.mkdir()
    (sandbox.out / "thesis.tex").write_text("ten years of work")
    fails("convert {asvd} {out} --force", "is no checkpoint", "remove it yourself")
    fails("export {model} {out} --force", "is no checkpoint")
    fails("compress {base} {out} --keep-ratio 0.5 --force", "is no checkpoint")


WRITERS = [
    "convert {asvd} {out}",
    "export {model} {out}",
    "compress {base} {out} --keep-ratio 1 --method svd",
]


@pytest.mark.parametrize("command", WRITERS)
def test_a_disk_that_is_full_from_the_start(
    fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    fails(command, "GB", "free some space")


@pytest.mark.parametrize("command", WRITERS)
def test_a_disk_that_fills_up(
    fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("thinrank.checkpoint.save.write_safetensors", full)
    fails(command, "the disk filled up", "free some space")


@pytest.mark.parametrize(
    "command",
    [
        "convert {copy} {copy} --force",
        "convert {asvd} {copy} --base {copy} --force",
        "export {copy} {copy} --force",
        "compress {copy} {copy} --keep-ratio 0.5 --method svd --force",
    ],
)
def test_a_source_that_would_be_replaced(sandbox: Sandbox, fails: Callable[..., str], command: str) -> None:
    copy = sandbox.tmp / "copy"
    shutil.copytree(sandbox.base, copy)
    fails(command.replace("{copy}", str(copy)), "holds the source", "choose another destination")


@pytest.mark.parametrize("command", WRITERS)
def test_a_destination_without_permission(
    fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def forbidden(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    fails(command, "cannot write", "Permission denied", "another destination")


def test_a_source_without_permission(
    sandbox: Sandbox, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(self: Path, *_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    fails("inspect {model}", "cannot read", "config.json", "Permission denied")


@pytest.mark.parametrize(
    "command",
    [
        "inspect {name}",
        "generate {name} --prompt x",
        "generate {{model}} --prompt x --tokenizer {name}",
        "convert {name} {{out}}",
        "convert {{asvd}} {{out}} --base {name}",
        "convert {{asvd}} {name}",
        "export {{model}} {name}",
        "bench latency --shape tiny --verify --device cpu --output-json {name}",
    ],
)
def test_a_name_that_no_file_system_has(fails: Callable[..., str], command: str) -> None:
    fails(command.format(name="x" * 5000), "File name too long")


@pytest.mark.parametrize("name", ["a--b/c..d", "x/..y", "-x/y", "x." * 60 + "/y"])
def test_a_source_that_is_neither_path_nor_hub_id(
    sandbox: Sandbox, fails: Callable[..., str], name: str
) -> None:
    fails(["convert", "--", name, str(sandbox.out)], "does not exist", "no hub id")


def test_a_folder_that_may_not_be_read(fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    fails("inspect {model}", "cannot use", "Permission denied")


# What is no mistake of a person


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out(
    fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("thinrank.llm.load_model", exhausted)
    fails("generate {model} --prompt x", "out of memory", "lower --kv-cache-memory")


def test_an_interrupt(fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("thinrank.llm.load_model", interrupted)
    fails("generate {model} --prompt x", "interrupted", code=130)


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), ZeroDivisionError(), OSError("a bug"), EOFError()])
def test_a_bug_is_not_hidden(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, bug: Exception) -> None:
    def broken(*_: object, **__: object) -> None:
        raise bug

    monkeypatch.setattr("thinrank.llm.load_model", broken)
    with pytest.raises(type(bug)):
        main(sandbox.command("generate {model} --prompt x"))


def test_a_warning_is_one_line(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*_: object, **__: object) -> None:
        warnings.warn("two\n  lines", stacklevel=1)

    monkeypatch.setattr("thinrank.cli.inspect.parse_size", lambda *_: warn() or 2**30)
    assert main(sandbox.command("inspect {model} --memory 1G --json")) == 0
    assert capsys.readouterr().err == "warning: two lines\n"


def test_escape_sequences_do_not_reach_the_terminal(fails: Callable[..., str]) -> None:
    assert "\x1b" not in fails(["inspect", "\x1b]0;title\x07"], r"\x1b]0;title\x07")


def test_a_reader_that_leaves(sandbox: Sandbox) -> None:
    command = [sys.executable, "-m", "thinrank", "inspect", str(sandbox.model)]
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert process.stderr == ""
    assert process.returncode != 0


def test_messages_do_not_repeat_themselves(fails: Callable[..., str]) -> None:
    message = fails("convert {asvd}")
    assert not re.search(r"error.*error|\.\s*:|\s\s", message)
