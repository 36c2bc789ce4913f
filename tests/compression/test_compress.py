"""The whole compression of small models, against a plain implementation that keeps everything in memory."""

import json

import pytest
import torch
from safetensors.torch import load_file

from thinrank import LLM, ThinrankError, compress
from thinrank.checkpoint.load import open_checkpoint
from thinrank.compression.truncate import rank_for
from thinrank.model.registry import parse_config
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_text_models import TEXT, dense_model, with_tokenizer
from tiny_tokenizers import save_byte_level


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
        ({"keep_ratio": 0.5, "calibration_length": 257}, "longer than the model's 256 positions"),
        ({"keep_ratio": 0.5, "calibration_length": 257, "calibration_text": "self"}, "256 positions"),
        ({"keep_ratio": [0.5, 0.5000001]}, "would all be written"),
        ({"keep_ratio": 0.5, "perplexity_text": "x"}, "set max_perplexity_increase too"),
        ({"ranks": "x.json", "rank_multiple": 8}, "fixes the ranks"),
        ({"ranks": "x.json", "allocate": "loss"}, "fixes the ranks"),
        (
            {"keep_ratio": 0.5, "method": "adasvd", "min_ratio": 0.5, "allocate": "loss"},
            "min_ratio is for adasvd's own ranks, and allocate loss replaces them",
        ),
        ({"ranks": "x.json", "method": "dobi-svd", "steps": 3}, "steps is for dobi-svd's own ranks"),
        ({"keep_ratio": 0.5, "calibration_samples": 0}, "at least 1"),
    ],
)
def test_mistakes(options, message, tmp_path):
    _, folder = dense_model(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ThinrankError, match=message):
        compress(
            folder, tmp_path / "out", progress=False, device="cpu", **{"calibration_length": 32} | options
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_low_rank_sources_are_refused(tmp_path):
    _, folder = dense_model(tmp_path)
    compress(folder, tmp_path / "out", method="svd", keep_ratio=0.5, progress=False)
    with pytest.raises(ThinrankError, match="low-rank already"):
        compress(tmp_path / "out", tmp_path / "again", method="svd", keep_ratio=0.5, progress=False)


def some_of_every_kind():
    """A tensor of every kind that a model has."""
    config = tiny_config("qwen2")
    kinds = {name.replace("layers.0", "layers.1"): None for name in random_tensors(config)}
    return [name for name in kinds if "layers.0" not in name]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", some_of_every_kind())
def test_damaged_weights_are_refused_and_nothing_is_left(name, value, tmp_path, calibrated):
    """Wherever they are: a method may not look there itself."""
    config = tiny_config("qwen2")
    tensors = random_tensors(config)
    tensors[name].view(-1)[3] = value
    folder = with_tokenizer(write_folder(tmp_path / "dense", config, tensors), config["vocab_size"])
    before = sorted(path.name for path in tmp_path.iterdir())
    for method in ("svd", "svd-llm", "dobi-svd"):
        with pytest.raises(ThinrankError, match=f"{name} has NaN or infinite values"):
            compress(folder, tmp_path / "out", method=method, keep_ratio=0.5, **calibrated)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("tied", [False, True])
def test_a_dtype_is_that_of_all_tensors(tied, tmp_path):
    _, folder = dense_model(tmp_path, model_type="qwen2", tie_word_embeddings=tied)
    for ratio in (0.5, 1.0):
        out = tmp_path / f"{ratio}"
        compress(folder, out, method="svd", keep_ratio=ratio, dtype="bfloat16", progress=False)
        dtypes = {tensor.dtype for tensor in load_file(out / "model.safetensors").values()}
        assert dtypes == {torch.bfloat16}
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_tokenizer_of_another_model_is_noticed(tmp_path, text_file):
    config = tiny_config()
    folder = save_byte_level(write_folder(tmp_path / "dense", config, random_tensors(config)))
    options = {"keep_ratio": 0.5, "calibration_length": 32, "device": "cpu", "progress": False}
    for more in ({}, {"method": "svd", "max_perplexity_increase": 1.0}):
        with pytest.raises(ThinrankError, match="outside the vocabulary of 101"):
            compress(folder, tmp_path / "out", calibration_text=text_file, **options, **more)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "text.txt"]


@pytest.mark.parametrize("name", ["{keep_ratio}/model", "a/m-{keep_ratio}/b-{keep_ratio}", "x{keep_ratio}"])
def test_ratios_in_any_part_of_a_destination(name, tmp_path):
    _, folder = dense_model(tmp_path)
    compress(folder, tmp_path / name, method="svd", keep_ratio=[0.5, 0.75], progress=False)
    for ratio in ("0.5", "0.75"):
        assert open_checkpoint(tmp_path / name.replace("{keep_ratio}", ratio)).config.ranks
    assert not [path for path in tmp_path.rglob("*") if "{" in path.name]


def test_the_source_is_never_replaced(tmp_path):
    _, folder = dense_model(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    (folder.parent / "config.json").write_text("{}")  # looks as if it could be replaced as well
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for destination in (folder, tmp_path / "link", tmp_path):
        with pytest.raises(ThinrankError, match="holds the source"):
            compress(folder, destination, method="svd", keep_ratio=0.5, force=True, progress=False)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_multiples_that_miss_the_ratio_are_warned_about(tmp_path):
    _, folder = dense_model(tmp_path)
    with pytest.warns(UserWarning, match=r"^1 of the parameters are kept instead of 0.5"):
        compress(folder, tmp_path / "out", method="svd", keep_ratio=0.5, rank_multiple=64, progress=False)
