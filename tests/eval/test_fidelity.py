"""Every path against float32: equal in float32, close in 16 bits, and far off when the weights are."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thinrank.bench.shapes import BenchModel, fast_decoder
from thinrank.errors import CheckpointError, OptionError, OutputError, ThinrankError
from thinrank.eval import fidelity as module
from thinrank.eval.fidelity import FidelityReport, FidelityRow, fidelity, position_metrics
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_tokenizers import save_byte_level

CONFIG = tiny_config(vocab_size=300)
PATHS = [
    ("thinrank", "prefill"),
    ("thinrank", "prefill-chunked"),
    ("thinrank", "decode"),
    ("thinrank", "decode-batch"),
    ("hf-static", "prefill"),
    ("hf-static", "decode"),
]
#: What readers of the file rely on.
ROW_KEYS = [
    "system",
    "path",
    "positions",
    "kl_mean",
    "kl_max",
    "logit_difference_mean",
    "logit_difference_max",
    "top1",
    "exact_match",
    "first_token_match",
    "token_match",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fidelity") / "model"
    return save_byte_level(write_folder(path, CONFIG, random_tensors(CONFIG)))


def run(folder: Path, **options: Any) -> FidelityReport:
    """Prompts and outputs cross the end of a block."""
    settings = {"num_prompts": 3, "prompt_len": 60, "output_len": 8, "device": "cpu"}
    return fidelity(folder, **settings | options)


def test_float32_differs_by_the_order_of_summation_only(folder: Path) -> None:
    report = run(folder, dtype="float32")
    assert [(row.system, row.path) for row in report.rows] == PATHS
    for row in report.rows:
        assert row.positions == 24
        # Logits of order one, each a sum of 48 products: some 1e-7 apart, and KL goes with the square.
        assert row.logit_difference_max < 1e-4
        assert abs(row.kl_max) < 1e-9
        assert row.top1 == 1
        generates = row.path.startswith("decode")
        matches = (row.exact_match, row.first_token_match, row.token_match)
        assert matches == ((1, 1, 1) if generates else (None, None, None))


def test_16_bits_are_close(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "fidelity.json"
    report = run(folder, dtype="bfloat16", output_json=file, command="thinrank eval fidelity")
    for row in report.rows:
        # 8 significant bits move logits of order one by about 1e-2; KL is half the square of that.
        assert 1e-8 < row.kl_mean < 1e-3
        assert 1e-4 < row.logit_difference_mean < 5e-2
        assert row.logit_difference_mean < row.logit_difference_max
        assert row.top1 > 0.8
    # In 16 bits, the residual stream of transformers is too; ours is float32.
    by_path = {(row.system, row.path): row.kl_mean for row in report.rows}
    assert by_path["thinrank", "decode"] < by_path["hf-static", "decode"]
    assert json.loads(file.read_text()) == report.to_json()
    assert [field.name for field in fields(FidelityRow)] == ROW_KEYS
    assert report.header["weights"] == "rounded to bfloat16 for all, the reference too"
    assert report.header["prompts"] == "built-in text, held-out part, no BOS"
    assert report.header["prompt_tokens"] == 180


@pytest.mark.parametrize("name", ["svdllm_v1-mistral-gqa-whitening_only-0.8", "basis_sharing-share2-20"])
def test_low_rank_checkpoints(converted: Any, name: str) -> None:
    report = run(converted(name), dtype="float32", num_prompts=2, prompt_len=20)
    assert report.header["keep_ratio"] < 1
    assert len(report.rows) == len(PATHS)
    for row in report.rows:
        assert abs(row.kl_max) < 1e-7 and row.exact_match in (1, None)


def test_wrong_weights_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: BenchModel) -> Any:
        def get(name: str) -> torch.Tensor:
            tensor = model.get(name)
            return tensor.flip(0) if name == "model.layers.1.mlp.down_proj.weight" else tensor

        return fast_decoder(replace(model, get=get))

    monkeypatch.setattr(module, "fast_decoder", broken)
    for row in run(folder, dtype="float32").rows:
        right = row.system == "hf-static"
        assert (abs(row.kl_mean) < 1e-9) if right else (row.kl_mean > 0.1)
        assert row.top1 == 1 if right else row.top1 < 0.9
        assert row.exact_match in ((1, None) if right else (0, None))


def test_infinite_logits_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: BenchModel) -> Any:
        def get(name: str) -> torch.Tensor:
            return model.get(name) * (float("inf") if name == "lm_head.weight" else 1)

        return fast_decoder(replace(model, get=get))

    monkeypatch.setattr(module, "fast_decoder", broken)
    with pytest.raises(ThinrankError, match="thinrank prefill computed infinite or undefined logits"):
        run(folder)


def test_without_hugging_face_and_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    report = run(folder, hf=False, seed=3)
    assert [(row.system, row.path) for row in report.rows] == PATHS[:4]
    assert report.header["prompts"] == "random tokens, seed 3"


def test_tf32_is_off_for_the_reference_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(model: BenchModel, *arguments: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return original(model, *arguments)

    original = module._expect.__globals__["reference_decoder"]
    monkeypatch.setattr(module, "reference_decoder", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run(folder, hf=False, output_len=1)
        assert seen == ["highest"]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_position_metrics() -> None:
    reference = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).log()
    logits = torch.tensor([[1.0, 3.0], [1.0, 1.5]]).log()
    reference[reference.isinf()] = -100.0  # a probability of 0, for all that counts
    kl, mean, largest, same = position_metrics(logits, reference)
    assert kl.tolist() == pytest.approx([-math.log(0.75), -math.log(0.4)], abs=1e-6)
    assert same.tolist() == [1, 0]
    difference = (logits - reference).abs()
    assert mean.tolist() == pytest.approx(difference.mean(-1).tolist())
    assert largest.tolist() == pytest.approx(difference.amax(-1).tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"output_len": 0}, "output_len is 0"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"prompt_len": 200, "output_len": 57}, "have 257 tokens, the model has 256 positions"),
    ],
)
def test_mistakes(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run(folder, **options)


def test_bad_paths(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        run(tmp_path / "nothing")
    with pytest.raises(OutputError, match="cannot write"):
        run(folder, output_json=tmp_path / "no" / "file.json")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Sizes that the kernels take; ours must be at least as close to float32 as transformers."""
    config = tiny_config(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    folder = save_byte_level(write_folder(tmp_path / "model", config, random_tensors(config)))
    report = run(folder, device="cuda", num_prompts=9)
    assert report.header["dtype"] == "bfloat16"
    kl = {(row.system, row.path): row.kl_mean for row in report.rows}
    assert list(kl) == PATHS
    for path in ("prefill", "decode"):
        assert 0 < kl["thinrank", path] <= kl["hf-static", path] < 1e-3
    assert kl["thinrank", "prefill-chunked"] <= kl["hf-static", "prefill"]
    assert kl["thinrank", "decode-batch"] <= kl["hf-static", "decode"]
