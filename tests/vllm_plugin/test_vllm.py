"""thinrank folders in vLLM, on a CPU: the engine's tokens, tensor parallel, over HTTP; damaged folders are refused;
the bytes that `model.tensor_parallel` computes."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import CHECKPOINTS
from engine_matrix import MAX_TOKENS, PROMPTS, thinrank_tokens, vllm_tokens
from thinrank.checkpoint.load import open_checkpoint
from thinrank.errors import CheckpointError
from thinrank.model.tensor_parallel import share
from tiny_low_rank_models import MODELS, write_low_rank
from tiny_text_models import with_tokenizer
from vllm_engine import engine
from vllm_engine import generate as vllm_generate
from vllm_processes import parameter_bytes

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-vllm")


def generate(llm, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    return vllm_generate(llm, PROMPTS, max_tokens)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder of each tiny model, by its name. Tests must not change them."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        write_low_rank(folder / name, name)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_engines(name, folders):
    llm = engine(folders / name)
    assert generate(llm) == thinrank_tokens(folders / name)
    assert llm.apply_model(parameter_bytes) == [part(folders / name, 1).weight_bytes]
    if name == "tied":
        assert llm.apply_model(shared_factor_ins) == [["self_attn.qkv_proj", "mlp.down_proj"]]


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if not name.startswith("base-")])
def test_every_family(name, converted):
    assert vllm_tokens(converted(name)) == thinrank_tokens(converted(name))


def part(folder: Path, size: int):
    """What one of `size` processes has, as it is computed for a plan."""
    return share(open_checkpoint(folder).config, size, itemsize=4)


def shared_factor_ins(model) -> list[str]:
    """The layers of vLLM whose factor_in is in memory once for both decoder layers."""
    first, second = model.model.layers
    return [
        name
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        if first.get_submodule(name).factor_in.weight is second.get_submodule(name).factor_in.weight
    ]


#: As vLLM pads it.
VOCAB = 128
#: Per row of a step: what two processes add up, in float32. Embedding; layer 0: o, down; layer 1: o, down.
REDUCED_VALUES = {
    "mixed": [128, 24, 128, 128, 32],  # ranks 19 and 26, padded; 128 where a module is dense
    "head": [128, 24, 24, 24, 24],
}


@pytest.mark.parametrize("name", REDUCED_VALUES)
def test_tensor_parallel(name, folders, monkeypatch):
    """The engine's tokens from two processes, which add up latents instead of outputs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    llm = engine(folders / name, tensor_parallel_size=2, worker_extension_cls="vllm_processes.Observer")
    assert generate(llm) == thinrank_tokens(folders / name)
    llm.reset_prefix_cache()
    llm.collective_rpc("record_exchanges")
    generate(llm, max_tokens=1)
    rows = sum(map(len, PROMPTS))
    reductions = [((rows, values), 4 * rows * values) for values in REDUCED_VALUES[name]]
    gathered = [
        ((len(PROMPTS), VOCAB // 2), 4 * len(PROMPTS) * VOCAB // 2)
    ]  # a row of each prompt: its logits
    exchanges = {"all_reduce": reductions, "all_gather": gathered}
    assert llm.collective_rpc("recorded_exchanges") == [exchanges, exchanges]

    computed = part(folders / name, 2)
    assert llm.collective_rpc("parameter_bytes") == [computed.weight_bytes] * 2
    # Around a ring of two, each sends half of a sum, half of its result, and its half of what is gathered.
    assert computed.sent_bytes == 4 * (sum(REDUCED_VALUES[name]) + VOCAB / 2)
    assert computed.exchanges == len(reductions) + len(gathered)


def test_api_server(folders, tmp_path):
    folder = with_tokenizer(shutil.copytree(folders / "heterogeneous", tmp_path / "model"), 101)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        "--served-model-name=m",
    ]
    command += ["--host=127.0.0.1", f"--port={url.rpartition(':')[2]}", "--dtype=float32", "--enforce-eager"]
    command += ["--max-model-len=256", "--max-num-seqs=8"]
    environment = {key: value for key, value in os.environ.items() if "MULTIPROCESSING" not in key}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    try:
        wait_for(f"{url}/health", server)
        body = {"model": "m", "prompt": PROMPTS, "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            choices = json.load(response)["choices"]
        assert [choice["token_ids"] for choice in choices] == thinrank_tokens(folder)
    except Exception as error:
        error.add_note((tmp_path / "log").read_text()[-5000:])
        raise
    finally:
        server.terminate()
        server.wait(30)


def wait_for(url: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise TimeoutError("the server did not start")


def documented_commands() -> list[list[str]]:
    """The arguments of every `vllm serve` in our pages."""
    pages = (Path(__file__).parents[2] / "docs").glob("*.md")
    lines = [line for page in pages for line in page.read_text().splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("vllm serve ")]


@pytest.mark.parametrize("arguments", documented_commands(), ids=" ".join)
def test_vllm_knows_the_flags_in_our_pages(arguments):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    assert parsed.tensor_parallel_size * parsed.pipeline_parallel_size > 1


def test_without_the_plugin_vllm_refuses(folders):
    program = (
        "import sys\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_engine_config()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, folders / "gqa"],
        env=os.environ | {"VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode and "Unknown quantization method: thinrank" in result.stderr


K_PROJ = "model.layers.0.self_attn.k_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"
DENSE_O_PROJ = "model.layers.1.self_attn.o_proj"  # in "mixed", as is its k_proj


def damage(folder: Path, copy: Path, tensors: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a folder with other tensors; None: without it."""
    shutil.copytree(folder, copy)
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({k: v for k, v in stored.items() if v is not None}, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("gqa", {f"{K_PROJ}.factor_out.weight": None}, f"lacks tensor {K_PROJ}.factor_out.weight"),
        ("gqa", {"model.norm.weight": None}, "lacks tensor model.norm.weight"),
        (
            "gqa",
            {f"{K_PROJ}.factor_in.weight": torch.ones(23, 128)},
            f"wrong shape for tensor {K_PROJ}.factor_in",
        ),
        (
            "mixed",
            {f"{DENSE_O_PROJ}.factor_in.weight": torch.ones(9, 128)},
            f"unexpected tensor {DENSE_O_PROJ}",
        ),
    ],
)
def test_damaged_folders_are_refused(name, tensors, message, folders, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        engine(damage(folders / name, tmp_path / "model", tensors))


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("gqa", {f"{K_PROJ}.factor_out.weight": None}, f"lacks tensor {K_PROJ}.factor_out.weight"),
        (
            "gqa",
            {f"{K_PROJ}.weight": None, f"{K_PROJ}.factor_in.weight": None},
            rf"lacks tensors {K_PROJ}.weight, {K_PROJ}.factor_in",
        ),
        ("biased", {f"{K_PROJ}.factor_out.bias": None}, f"lacks tensor {K_PROJ}.factor_out.bias"),
        ("mixed", {f"{K_PROJ}.weight": None}, f"lacks tensor {K_PROJ}.weight"),
        (
            "tied",
            {"model.layers.0.mlp.up_proj.factor_in.weight": None},
            "lacks tensor .*0.mlp.up_proj.factor_in",
        ),
        (
            "gqa",
            {f"{K_PROJ}.factor_in.weight": torch.ones(23, 128)},
            f"wrong shape for {K_PROJ}.factor_in.weight",
        ),
        (
            "gqa",
            {f"{O_PROJ}.factor_out.weight": torch.ones(129, 24)},
            f"wrong shape for {O_PROJ}.factor_out.weight",
        ),
        ("gqa", {f"{O_PROJ}.weight": torch.ones(128, 128)}, f"wrong shape for {O_PROJ}.weight"),
        ("gqa", {f"{O_PROJ}.factor_out.bias": torch.ones(128)}, "unexpected tensor .*o_proj"),
        ("mixed", {f"{K_PROJ}.factor_in.weight": torch.ones(9, 128)}, r"unexpected tensor .*qkv_proj \(k\)"),
        (
            "tied",
            {"model.layers.1.mlp.up_proj.factor_in.weight": torch.ones(24, 128)},
            "up_proj.factor_in.* twice",
        ),
    ],
)
def test_damage_is_noticed_while_loading(name, tensors, message, folders, tmp_path, monkeypatch):
    """Where there is no folder to look at beforehand, as with models that vLLM downloads."""
    monkeypatch.setattr("thinrank.integrations.vllm.config.open_checkpoint", lambda path: None)
    with pytest.raises(CheckpointError, match=message):
        engine(damage(folders / name, tmp_path / "model", tensors))
