"""The parts of a folder come from strangers: read as what they are, or refused in one line, in bounded time."""

import json
from pathlib import Path
from time import process_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from thinrank.checkpoint import safetensors_reader
from thinrank.checkpoint.convert.tokenizer_files import drop_unknown_pad_token
from thinrank.checkpoint.folder import MAX_JSON_BYTES, parse_json, read_json, read_shards, weight_files
from thinrank.checkpoint.load import open_checkpoint
from thinrank.checkpoint.safetensors_reader import read_safetensors
from thinrank.errors import MAX_MESSAGE, CheckpointError, ThinrankError
from tiny_models import random_tensors, tiny_config, write_folder

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "no valid JSON"),
        (b"{", "no valid JSON"),
        (b"\xff\xfe\x00", "no valid JSON"),
        (b'{"a": ' * 100_000, "no valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no valid JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": [-Infinity]}', "-Infinity is no number"),
        (b'{"a": 1e999}', "1e999 is no number"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' stands there twice"),
        (b'{"x": {"a": 1, "a": 1}}', "'a' stands there twice"),
        (b"[1]", "holds no JSON object"),
        (b"null", "holds no JSON object"),
    ],
)
def test_what_is_no_json_object(text: bytes, expected: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json .*{expected}"):
        parse_json(text, "config.json")


def test_a_key_that_stands_twice_is_found_among_many() -> None:
    """In time linear in the file, which may have a million of them."""
    keys = [*range(200_000), 199_999]
    text = ("{" + ", ".join(f'"{key}": 1' for key in keys) + "}").encode()
    started = process_time()
    with pytest.raises(CheckpointError, match="'199999' stands there twice"):
        parse_json(text, "config.json")
    assert process_time() - started < 10


def test_a_json_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match="no plausible JSON file"):
        read_json(path)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/b",
        "",
        ".",
        "..",
        "x\0y",
        "\ud800",
        "\x1b[2J",
        "a\nb",
        "x" * 256,
        5,
        None,
        {},
        ["a"],
    ],
    ids=repr,
)
def test_a_shard_has_a_bare_name(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="shards must lie beside the index"):
        weight_files(tmp_path, "model", "safetensors")


def test_an_index_of_many_shards_that_are_not_there(tmp_path: Path) -> None:
    weight_map = {f"t{i}": f"s{i}" for i in range(100_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="100000 of 100000 shards"):
        weight_files(tmp_path, "model", "safetensors")


def test_two_files_with_the_same_tensor(tmp_path: Path) -> None:
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, files[0])
    save_file({"b": torch.ones(1)}, files[1])
    assert set(read_shards(files[:1], read_safetensors)) == {"a", "b"}
    with pytest.raises(CheckpointError, match=r"2\.safetensors holds b, and so does another file"):
        read_shards(files, read_safetensors)


def test_a_file_of_absurdly_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_reader, "MAX_TENSORS", 3)
    save_file({f"t{i}": torch.zeros(0) for i in range(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds 4 tensors: no model has so many"):
        read_safetensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool], ids=str)
def test_weights_that_are_no_floating_point_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    config = tiny_config("llama")
    tensors = random_tensors(config)
    folder = write_folder(
        tmp_path / "model", config, {**tensors, "model.norm.weight": tensors["model.norm.weight"].to(dtype)}
    )
    with pytest.raises(
        CheckpointError, match=r"stores no floating-point numbers in tensor model\.norm\.weight"
    ):
        open_checkpoint(folder)


def test_a_message_is_one_line_of_bounded_length() -> None:
    error = CheckpointError("a\n" * 10_000, "hint")
    assert "\n" not in str(error)
    assert len(str(error)) < MAX_MESSAGE + 20
    assert str(error).endswith(" ...: hint")


NAMES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
    "vocab.json",
)
CONTENTS = JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=8)


@settings(max_examples=300, deadline=None)
@given(
    config=st.dictionaries(st.just("added_tokens_decoder"), JSON),
    added=JSON,
    model=JSON | st.fixed_dictionaries({"vocab": JSON}),
    files=st.dictionaries(st.sampled_from([*NAMES, "tokenizer.model"]), CONTENTS),
)
def test_any_tokenizer_files_are_repaired_or_refused(
    config: dict[str, object], added: object, model: object, files: dict[str, bytes]
) -> None:
    """A padding token makes all of them be read."""
    tokenizer = {"added_tokens": added, "model": model}
    files = {
        "tokenizer_config.json": json.dumps({**config, "pad_token": "[PAD]"}).encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
        **files,
    }
    try:
        drop_unknown_pad_token(files)
    except ThinrankError as error:
        assert "\n" not in str(error)
