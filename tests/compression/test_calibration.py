"""Where calibration text comes from."""

import json
import sys
from types import ModuleType

import pytest
import torch

from thinrank import LLM, ThinrankError, compress
from thinrank.builtin_text import calibration_text
from thinrank.checkpoint.load import open_checkpoint
from thinrank.compression.calibration import Calibration
from thinrank.compression.texts import read_text
from tiny_text_models import TEXT, dense_model


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    assert read_text(tmp_path / "a.txt") == read_text(str(tmp_path / "a.jsonl")) == "one\n\ntwo"
    assert read_text("builtin") == calibration_text()


def test_a_line_without_text_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"prompt": "x"}\n')
    with pytest.raises(ThinrankError, match=r"line 2 of .*a.jsonl"):
        read_text(tmp_path / "a.jsonl")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ThinrankError, match=r"cannot read .* wiki: .* builtin, wikitext2, c4, self"):
        read_text("wiki")


class Rows(list):
    def __getitem__(self, key):
        return [row["text"] for row in self] if key == "text" else Rows(list.__getitem__(self, key))


def test_datasets_by_name(monkeypatch):
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return Rows([{"text": "one"}, {"text": "two"}])

    package = ModuleType("datasets")
    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    for name in ("wikitext2", "c4", "datasets:ours", "datasets:ns/ours:small:validation"):
        assert read_text(name) == "one\n\ntwo"
    assert calls[0] == (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "train"})
    assert calls[1][1]["split"] == "train"  # perplexity on c4 reads the validation split
    assert calls[2] == (("ours",), {"split": "train"})
    assert calls[3] == (("ns/ours", "small"), {"split": "validation"})


def test_datasets_that_are_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ThinrankError, match=r"pip install 'thinrank\[datasets\]'"):
        read_text("wikitext2")
    package = ModuleType("datasets")

    def load_dataset(*_, **__):
        raise ConnectionError("offline")

    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    with pytest.raises(ThinrankError, match="cannot get nowhere/x: offline"):
        read_text("datasets:nowhere/x")


# The model's own text


def own_text(folder, root, seed=0, samples=3, length=70):
    checkpoint = open_checkpoint(folder)
    calibration = Calibration("self", samples, length, "text", seed)
    with torch.no_grad():
        return calibration.sequences(checkpoint, root, torch.device("cpu"), False)


def test_own_text_is_seeded_and_kept(tmp_path, monkeypatch):
    _, folder = dense_model(tmp_path, bos_token_id=None)
    first = own_text(folder, tmp_path / "a")
    assert first.shape == (3, 70) and len(first.unique()) > 10
    assert torch.equal(first, own_text(folder, tmp_path / "b"))
    assert not torch.equal(first, own_text(folder, tmp_path / "a", seed=1))
    monkeypatch.setattr("thinrank.compression.self_generated._write", None)
    assert torch.equal(first, own_text(folder, tmp_path / "a"))


def test_own_text_follows_the_models_distribution(tmp_path):
    """Past a block of the cache, too: what the model wrote is likelier than the same tokens in another order."""
    _, folder = dense_model(tmp_path)
    ids = own_text(folder, tmp_path / "a", samples=8, length=100)
    assert ids[:, 0].eq(1).all()  # BOS
    logits = LLM(folder, device="cpu").logits(ids)

    def loss(targets):
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(99)])
    expected = torch.distributions.Categorical(logits=logits[:, :-1]).entropy().mean()
    assert loss(ids).item() == pytest.approx(expected.item(), abs=0.2)  # 792 draws
    assert loss(ids[:, order]) > loss(ids) + 0.2


def test_compress_on_own_text(tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    options = calibrated | {"calibration_text": "self"}
    compress(folder, tmp_path / "a", keep_ratio=0.5, **options)
    compress(folder, tmp_path / "b", keep_ratio=0.5, **options)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second
    with pytest.raises(ThinrankError, match="not written as chat"):
        compress(folder, tmp_path / "c", keep_ratio=0.5, calibration_format="chat", **options)


def test_jsonl_equals_the_same_text(tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT}))
    compress(folder, tmp_path / "a", keep_ratio=0.5, **calibrated)
    compress(
        folder, tmp_path / "b", keep_ratio=0.5, **calibrated | {"calibration_text": tmp_path / "text.jsonl"}
    )
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


# The limit on perplexity


def test_the_gate_measures_what_was_written(tmp_path, calibrated, text_file):
    _, folder = dense_model(tmp_path)
    options = calibrated | {"perplexity_text": text_file}
    reports = {
        limit: compress(
            folder, tmp_path / f"{limit}", keep_ratio=0.3, max_perplexity_increase=limit, **options
        )[0]
        for limit in (0.0, 1e6)
    }
    assert reports[0.0].within_limit is False and reports[1e6].within_limit is True
    report = reports[0.0]
    ids = LLM(folder, device="cpu").tokenizer.encode(TEXT, add_special_tokens=False)
    windows = torch.tensor(ids[: len(ids) // 256 * 256]).view(-1, 256)  # the model's longest
    for path, expected in ((folder, report.dense_perplexity), (tmp_path / "0.0", report.perplexity)):
        logits = LLM(path, device="cpu").logits(windows)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        assert loss.exp().item() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ThinrankError, match="max_perplexity_increase is -1"):
        compress(folder, tmp_path / "x", keep_ratio=0.3, max_perplexity_increase=-1, **options)
