"""The whole compression of small models, against a plain implementation that keeps everything in memory."""

import json

import pytest
import torch
from safetensors.torch import load_file

from thinrank import LLM, ThinrankError, compress
from thinrank.compression.truncate import rank_for
from thinrank.model.registry import parse_config
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_text_models import TEXT, dense_model


def reference_products(folder, config, keep_ratio, samples, length):
    """W' of every module by the textbook: transformers' activations, Cholesky, SVD, V^T S^-1."""
    from transformers import AutoModelForCausalLM

    from thinrank.text import Tokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(Tokenizer(folder).encode(TEXT, add_special_tokens=False))[: samples * length]
    inputs: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(
                lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].flatten(0, 1).double())
            )
    with torch.inference_mode():
        model(ids.view(samples, length))
    products = {}
    for name, seen in inputs.items():
        x = torch.cat(seen)
        weight = model.get_submodule(name).weight.detach().double()
        scaling = torch.linalg.cholesky(x.T @ x)
        u, s, vt = torch.linalg.svd(weight @ scaling, full_matrices=False)
        rank = rank_for(keep_ratio, *weight.shape)
        products[name] = u[:, :rank] * s[:rank] @ vt[:rank] @ torch.linalg.inv(scaling)
    return products


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_svd_llm_equals_the_textbook(model_type, tmp_path, text_file):
    config, folder = dense_model(tmp_path, model_type=model_type)
    (report,) = compress(
        folder, tmp_path / "out", method="svd-llm", keep_ratio=0.6, calibration_text=text_file,
        calibration_samples=8, calibration_length=32, device="cpu", progress=False,
    )  # fmt: skip
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = reference_products(folder, config, 0.6, 8, 32)
    assert set(report.ranks) == set(expected)
    for module, product in expected.items():
        factor_in = tensors[f"{module}.factor_in.weight"].double()
        factor_out = tensors[f"{module}.factor_out.weight"].double()
        error = (factor_out @ factor_in - product).norm() / product.norm()
        assert error < 1e-3, f"{module}: {error}"  # float32 activations, then an ill-conditioned S
    dense = load_file(folder / "model.safetensors")
    for name, tensor in dense.items():
        if name.endswith(".bias"):
            module = name.removesuffix(".bias")
            assert torch.equal(tensors[f"{module}.factor_out.bias"], tensor)
    assert LLM(tmp_path / "out", device="cpu").logits([1, 2, 3]).isfinite().all()


def test_several_ratios_share_a_pass_and_equal_single_runs(tmp_path, text_file):
    _, folder = dense_model(tmp_path)
    options = {"calibration_text": text_file, "calibration_samples": 4, "device": "cpu", "progress": False}
    options |= {"calibration_length": 32}
    reports = compress(folder, tmp_path / "r-{keep_ratio}", keep_ratio=[0.5, 0.9], **options)
    assert [report.keep_ratio for report in reports] == [0.5, 0.9]
    compress(folder, tmp_path / "alone", keep_ratio=0.9, **options)
    together, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("r-0.9", "alone"))
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[name], alone[name]) for name in alone)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_factors_stay_close(dtype, tmp_path, text_file):
    _, folder = dense_model(tmp_path)
    options = {"keep_ratio": 0.8, "calibration_text": text_file, "calibration_samples": 4, "progress": False}
    options |= {"calibration_length": 64, "device": "cpu"}
    compress(folder, tmp_path / "full", **options)
    compress(folder, tmp_path / "half", dtype=dtype, **options)
    full, half = (
        LLM(tmp_path / name, device="cpu", dtype="float32").logits(list(range(3, 30)))
        for name in ("full", "half")
    )
    # A relative rounding of 2^-11 (2^-8 in bfloat16) a weight, averaged over the inputs.
    assert (full - half).abs().max() < (0.02 if dtype == "float16" else 0.15)


def test_keep_ratio_one_is_the_dense_model(tmp_path):
    _, folder = dense_model(tmp_path)
    (report,) = compress(folder, tmp_path / "out", method="svd", keep_ratio=1.0, progress=False)
    assert report.ranks == {}
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tied_embeddings_stay_tied(tmp_path):
    config, folder = dense_model(tmp_path, tie_word_embeddings=True)
    compress(folder, tmp_path / "out", method="svd", keep_ratio=0.5, progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert parse_config(config).tie_word_embeddings


def test_too_few_calibration_tokens_are_warned_about(tmp_path, text_file):
    _, folder = dense_model(tmp_path)
    with (
        pytest.warns(UserWarning, match="fewer than the 80"),
        pytest.warns(UserWarning, match="Gram matrices were damped"),
    ):
        compress(
            folder, tmp_path / "out", keep_ratio=0.5, calibration_text=text_file,
            calibration_samples=1, calibration_length=16, device="cpu", progress=False,
        )  # fmt: skip
    assert LLM(tmp_path / "out", device="cpu").logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_ratio": 0.0}, "above 0, to 1"),
        ({"keep_ratio": 1.2}, "above 0, to 1"),
        ({"keep_ratio": float("nan")}, "above 0, to 1"),
        ({"keep_ratio": []}, "no keep_ratio"),
        ({"keep_ratio": [0.5, 0.6]}, r"\{keep_ratio\}"),
        (
            {"keep_ratio": 0.5, "method": "magic"},
            "known: adasvd, asvd, basis-sharing, dobi-svd, svd, svd-llm, svd-llm-v2",
        ),
        ({"keep_ratio": 0.5, "dtype": "int4"}, "known: bfloat16, float16, float32"),
        ({"keep_ratio": 0.5, "calibration_text": "nowhere.txt"}, "cannot read the calibration text"),
        ({"keep_ratio": 0.5, "calibration_length": 10**7}, "one sample takes"),
        ({"keep_ratio": 0.5, "calibration_samples": 0}, "at least 1"),
    ],
)
def test_mistakes(options, message, tmp_path):
    _, folder = dense_model(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ThinrankError, match=message):
        compress(folder, tmp_path / "out", progress=False, device="cpu", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_low_rank_sources_are_refused(tmp_path):
    _, folder = dense_model(tmp_path)
    compress(folder, tmp_path / "out", method="svd", keep_ratio=0.5, progress=False)
    with pytest.raises(ThinrankError, match="low-rank already"):
        compress(tmp_path / "out", tmp_path / "again", method="svd", keep_ratio=0.5, progress=False)


def test_nan_weights_are_refused_and_nothing_is_left(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    folder = write_folder(tmp_path / "dense", config, tensors)
    with pytest.raises(ThinrankError, match=r"layers.1.mlp.up_proj.weight has NaN"):
        compress(folder, tmp_path / "out", method="svd", keep_ratio=0.5, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]
