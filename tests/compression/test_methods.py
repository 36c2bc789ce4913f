"""Every method on small models: optimal where theory says so, whatever the ratio, and finite in odd cases."""

import json
import warnings
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from thinrank import LLM, ThinrankError, compress
from thinrank.checkpoint.load import open_checkpoint
from thinrank.compression.method import Inputs
from thinrank.compression.methods import METHODS, method_by_name
from thinrank.compression.statistics import INPUT_OF, layer_of
from thinrank.compression.truncate import relative_error, spectrum
from thinrank.compression.units import units_of
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_text_models import TEXT, dense_model, with_tokenizer

WHITENED = ["svd-llm", "svd-llm-v2", "basis-sharing", "adasvd", "dobi-svd"]


@pytest.mark.parametrize("name", WHITENED)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 60), st.integers(0, 2**31), st.data())
@settings(max_examples=25, deadline=None)
def test_weighted_error_is_the_tail_of_the_spectrum(name, out_features, in_features, tokens, seed, data):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    inputs = torch.randn(tokens, in_features, generator=generator, dtype=torch.float64)
    inputs *= torch.logspace(0, 2, in_features, dtype=torch.float64)
    rank = data.draw(st.integers(1, min(out_features, in_features)))
    scaling = method_by_name(name, {}).scaling
    matrix = scaling(Inputs(inputs.T @ inputs, inputs.abs().mean(0))).matrix
    factor_in, factor_out = spectrum(weight, matrix).cut(rank)
    difference = weight.double() - factor_out @ factor_in
    values = torch.linalg.svdvals(weight.double() @ inputs.T)
    total = values.norm().item()
    # On the inputs themselves: damping of a singular Gram matrix (1e-6 of its mean) is all that may differ.
    tail = values[rank:].norm().item() / total
    assert (difference @ inputs.T).norm().item() / total == pytest.approx(tail, rel=1e-3, abs=2e-3)


@pytest.mark.parametrize("name", ["svd", "asvd", *WHITENED])
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 60), st.integers(0, 2**31), st.data())
@settings(max_examples=25, deadline=None)
def test_no_other_factors_lose_less(name, out_features, in_features, tokens, seed, data):
    """Under its own S each method loses the tail of the singular values of W S, which is the least there is."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    inputs = torch.randn(tokens, in_features, generator=generator, dtype=torch.float64)
    rank = data.draw(st.integers(1, min(out_features, in_features)))
    scaling = method_by_name(name, {}).scaling
    matrix = torch.eye(in_features, dtype=torch.float64)
    if scaling is not None:
        matrix = scaling(Inputs(inputs.T @ inputs, inputs.abs().mean(0))).matrix
    cut = spectrum(weight, None if scaling is None else matrix)
    factor_in, factor_out = cut.cut(rank)
    values = torch.linalg.svdvals(weight.double() @ matrix)
    tail = values[rank:].norm().item() / values.norm().item()
    lost = ((weight.double() - factor_out @ factor_in) @ matrix).norm().item() / values.norm().item()
    # Values below the square root of float64's resolution are lost in the Gram matrix that is decomposed.
    assert lost == pytest.approx(tail, rel=1e-3, abs=1e-7)
    assert relative_error(cut.values, rank) == pytest.approx(tail, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("name", ["svd", "asvd", *WHITENED])
def test_every_module_of_a_model_loses_the_tail_of_its_spectrum(name, tmp_path, calibrated):
    """What is written, measured on the statistics that are kept: the end of the way that the tests above begin."""
    _, folder = dense_model(tmp_path)
    options = calibrated | {"statistics": tmp_path / "kept"}
    (report,) = compress(folder, tmp_path / "out", method=name, allocate="uniform", keep_ratio=0.5, **options)
    # Others collect the statistics as well.
    compress(folder, tmp_path / "other", method="svd-llm", keep_ratio=0.9, **options)
    weights, found = load_file(folder / "model.safetensors"), products(tmp_path / "out")
    method = method_by_name(name, {})
    layers = [load_file(file) for file in sorted(tmp_path.glob("kept/statistics-*/layer-*"))]
    assert found.keys() == report.ranks.keys() and len(found) == 14
    for unit in units_of(open_checkpoint(folder).config, "*", method.group_size, method.shared):
        own = [layers[layer_of(module)] for module in unit.modules]
        site = INPUT_OF[unit.modules[0].rpartition(".")[2]]
        gram = sum(each[f"{site}.gram"] for each in own)
        mean = sum(each[f"{site}.abs_mean"] for each in own) / len(own)
        matrix = torch.eye(len(gram), dtype=torch.float64)
        if method.scaling is not None:
            matrix = method.scaling(Inputs(gram, mean)).matrix
        weight = torch.cat([weights[f"{module}.weight"] for module in unit.modules]).double()
        lost = weight - torch.cat([found[module] for module in unit.modules])
        values, rank = torch.linalg.svdvals(weight @ matrix), report.ranks[unit.modules[0]]
        tail = (values[rank:].norm() / values.norm()).item()
        assert 0.01 < tail == pytest.approx(((lost @ matrix).norm() / values.norm()).item(), rel=1e-3)
        assert all(report.relative_errors[m] == pytest.approx(tail, rel=1e-3) for m in unit.modules)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(2, 20), st.integers(0, 2**31), st.data())
@settings(max_examples=25, deadline=None)
def test_a_group_loses_the_tail_of_the_concatenated_matrix(layers, out_features, in_features, seed, data):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(layers, out_features, in_features, generator=generator, dtype=torch.float64)
    inputs = torch.randn(layers, 40, in_features, generator=generator, dtype=torch.float64)
    gram = sum(x.T @ x for x in inputs)
    scaling = method_by_name("basis-sharing", {"group_size": layers}).scaling(Inputs(gram, gram.diagonal()))
    rank = data.draw(st.integers(1, min(layers * out_features, in_features)))
    factor_in, factor_out = spectrum(weights.flatten(0, 1), scaling.matrix).cut(rank)
    difference = weights.flatten(0, 1) - factor_out @ factor_in
    lost = (difference @ scaling.matrix).norm().item()
    values = torch.linalg.svdvals(weights.flatten(0, 1) @ scaling.matrix)
    assert lost == pytest.approx(values[rank:].norm().item(), rel=1e-3, abs=1e-6 * values.norm().item())


def products(folder):
    """W' of every low-rank module, float64."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    result = {}
    for module in config.ranks:
        name = f"{module}.factor_in.weight"
        factor_in = checkpoint.tensors[config.tied_factors.get(name, name)].read().double()
        result[module] = checkpoint.tensors[f"{module}.factor_out.weight"].read().double() @ factor_in
    return result


def test_asvd_equals_the_textbook(tmp_path, calibrated, monkeypatch):
    _, folder = dense_model(tmp_path)
    compress(folder, tmp_path / "out", method="asvd", keep_ratio=0.6, statistics=tmp_path / "s", **calibrated)
    (file,) = tmp_path.glob("s/statistics-*/layer-00001.safetensors")
    mean = load_file(file)["gate_proj.abs_mean"]
    weight = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].double()
    u, s, vt = torch.linalg.svd(weight * mean.sqrt(), full_matrices=False)
    expected = u[:, :18] * s[:18] @ vt[:18] / mean.sqrt()
    found = products(tmp_path / "out")["model.layers.1.mlp.up_proj"]
    assert open_checkpoint(tmp_path / "out").config.ranks["model.layers.1.mlp.up_proj"] == 18
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_v2_cuts_regular_matrices_as_v1_does(tmp_path, calibrated):
    """Cholesky factor and eigenvectors span the same ellipsoid, so only the ranks may differ."""
    _, folder = dense_model(tmp_path)
    ranks = tmp_path / "ranks.json"
    ranks.write_text('{"*": 9}')
    for method in ("svd-llm", "svd-llm-v2"):
        compress(folder, tmp_path / method, method=method, ranks=ranks, **calibrated)
    old, new = products(tmp_path / "svd-llm"), products(tmp_path / "svd-llm-v2")
    assert old.keys() == new.keys()
    for module in old:
        assert (old[module] - new[module]).norm() / old[module].norm() < 1e-4


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_basis_sharing_ties_what_it_shares(layers, tmp_path, calibrated):
    _, folder = dense_model(tmp_path, num_hidden_layers=layers)
    (report,) = compress(folder, tmp_path / "out", method="basis-sharing", keep_ratio=0.7, **calibrated)
    config = open_checkpoint(tmp_path / "out").config
    tied = {name.split(".")[4] for name in config.tied_factors}
    assert tied == ({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} if layers > 1 else set())
    assert all(holder.startswith("model.layers.0.") for holder in config.tied_factors.values())
    if layers > 1:  # 48 x 80 twice: r = 0.7 * 2 * 3840 / (48 + 160)
        assert report.ranks["model.layers.1.mlp.up_proj"] == int(0.7 * 2 * 3840 / 208)
    assert report.ranks["model.layers.0.mlp.down_proj"] == int(0.7 * 3840 / 128)
    assert LLM(tmp_path / "out", device="cpu").logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])  # GQA both; biases on q, k and v
def test_nearly_everything_kept_is_nearly_the_dense_model(method, model_type, tmp_path, calibrated):
    """At full rank the factors reproduce W, and the logits follow."""
    _, folder = dense_model(tmp_path, model_type=model_type)
    linears = open_checkpoint(folder).config.linears()
    ranks = {name: min(s.out_features, s.in_features) for name, s in linears.items() if name != "lm_head"}
    if method == "basis-sharing":
        names = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        ranks = {f"*.{name}": 48 for name in names} | {"*.[kv]_proj": 32}  # of both layers together
    (tmp_path / "ranks.json").write_text(json.dumps(ranks))
    compress(folder, tmp_path / "out", method=method, ranks=tmp_path / "ranks.json", **calibrated)
    dense, full = (LLM(path, device="cpu").logits(list(range(20))) for path in (folder, tmp_path / "out"))
    torch.testing.assert_close(full, dense, atol=1e-3, rtol=1e-3)  # float32 through two layers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("allocate", [None, "loss"])
@pytest.mark.parametrize("keep_ratio", [0.2, 0.8])
def test_every_method_and_allocation_runs(method, allocate, keep_ratio, tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    out = tmp_path / "out"
    (report,) = compress(folder, out, method=method, allocate=allocate, keep_ratio=keep_ratio, **calibrated)
    # One rank of a tiny matrix is 3 % of it: the 0.5 % of real sizes is tested in test_ranks.
    assert keep_ratio - 0.05 < report.kept_ratio <= keep_ratio + 1e-9
    assert LLM(out, device="cpu").logits([1, 2, 3]).isfinite().all()


@contextmanager
def warned(messages):
    """One warning for each message, and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = sorted(str(warning.message) for warning in caught if warning.category is UserWarning)
    assert len(found) == len(messages), found
    assert all(message in text for message, text in zip(sorted(messages), found, strict=True)), found


def dead_channel(tensors):
    for layer in (0, 1):  # of both, or the other one of a group makes up for it
        tensors[f"model.layers.{layer}.input_layernorm.weight"][3] = 0


def all_dead(tensors):
    tensors["model.layers.1.post_attention_layernorm.weight"].zero_()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("damage", [dead_channel, all_dead])
def test_dead_channels_are_warned_about_and_stay_finite(method, damage, tmp_path, calibrated):
    config = tiny_config()
    tensors = random_tensors(config)
    damage(tensors)
    folder = with_tokenizer(write_folder(tmp_path / "dense", config, tensors), config["vocab_size"])
    for allocate in (None, "loss"):
        out = tmp_path / f"out-{allocate}"
        with warned(["do not span all channels"] if method in WHITENED else []):
            compress(folder, out, method=method, allocate=allocate, keep_ratio=0.6, **calibrated)
        assert LLM(out, device="cpu").logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("allocate", [None, "loss"])
@pytest.mark.parametrize("length", [1, 4])
def test_one_short_sample_is_warned_about(method, allocate, length, tmp_path, calibrated):
    """One token or four, for 48 channels: Gram matrices of rank one or four."""
    _, folder = dense_model(tmp_path)
    options = calibrated | {"calibration_samples": 1, "calibration_length": length}
    messages = [f"{length} calibration tokens are fewer than the 80"] if method != "svd" or allocate else []
    messages += ["do not span all channels"] * (method in WHITENED)
    if length == 1 and (allocate == "loss" or method == "dobi-svd"):
        with warned(messages), pytest.raises(ThinrankError, match="a sample of one token has no next one"):
            compress(folder, tmp_path / "out", method=method, allocate=allocate, keep_ratio=0.6, **options)
        return
    with warned(messages):
        compress(folder, tmp_path / "out", method=method, allocate=allocate, keep_ratio=0.6, **options)
    assert LLM(tmp_path / "out", device="cpu").logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("allocate", [None, "loss"])
def test_one_layer(method, allocate, tmp_path, calibrated):
    _, folder = dense_model(tmp_path, num_hidden_layers=1)
    (report,) = compress(
        folder, tmp_path / "out", method=method, allocate=allocate, keep_ratio=0.6, **calibrated
    )
    assert report.ranks and report.kept_ratio == pytest.approx(0.6, abs=0.05)
    assert LLM(tmp_path / "out", device="cpu").logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_rank_one(method, tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    (report,) = compress(folder, tmp_path / "out", method=method, keep_ratio=1e-9, **calibrated)
    assert set(report.ranks.values()) == {1}
    assert LLM(tmp_path / "out", device="cpu").logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("allocate", [None, "loss"])
def test_keep_ratio_one_is_the_dense_model(method, allocate, tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    (report,) = compress(
        folder, tmp_path / "out", method=method, allocate=allocate, keep_ratio=1, **calibrated
    )
    assert report.ranks == {} and report.kept_ratio == 1
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("method", METHODS)
def test_nan_weights_are_refused_by_name(method, tmp_path, calibrated):
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    folder = with_tokenizer(write_folder(tmp_path / "dense", config, tensors), config["vocab_size"])
    with pytest.raises(ThinrankError, match=r"layers.1.mlp.up_proj.weight has NaN"):
        compress(folder, tmp_path / "out", method=method, keep_ratio=0.5, **calibrated)
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.work").exists()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("svd", {"alpha": 0.5}, "svd has no option alpha: it has none of its own"),
        ("asvd", {"group_size": 2}, "no option group_size: it takes alpha"),
        ("asvd", {"alpha": 1.5}, "alpha is 1.5"),
        ("basis-sharing", {"group_size": 0}, "group_size is 0"),
        ("basis-sharing", {"shared": ["q"]}, "unknown projection 'q': known: down_proj, gate_proj"),
        ("adasvd", {"min_ratio": 0.0}, "min_ratio is 0"),
        ("dobi-svd", {"steps": 0}, "steps is 0: it must be at least 1"),
        ("svd-llm", {"steps": 3}, "svd-llm has no option steps"),
    ],
)
def test_options_of_another_method_are_refused(method, options, message):
    with pytest.raises(ThinrankError, match=message):
        method_by_name(method, options)


def test_the_text_has_enough_tokens():
    assert len(TEXT) >= 8 * 32
