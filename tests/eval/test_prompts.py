"""Prompts: pieces of the built-in text, files, random tokens; and files that are no prompts."""

import json
from pathlib import Path

import pytest

from thinrank.builtin_text import held_out_text
from thinrank.errors import OptionError, RequestError
from thinrank.eval.prompts import make_prompts, read_prompts
from thinrank.model.registry import parse_config
from thinrank.text import Tokenizer
from tiny_models import tiny_config
from tiny_tokenizers import save_byte_level, save_sentence_piece_like

CONFIG = parse_config(tiny_config(vocab_size=400))


def test_pieces_of_the_built_in_text(tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path / "model")
    prompts = make_prompts(5, 32, folder, CONFIG, seed=0)
    assert [len(ids) for ids in prompts.token_ids] == [32] * 5
    text = Tokenizer(folder).decode(prompts.token_ids[4])
    place = held_out_text().index(text)
    assert place == pytest.approx(0.8 * len(held_out_text()), rel=0.05), "evenly spaced"
    with pytest.raises(OptionError, match=r"5 prompts of 100000 are wanted"):
        make_prompts(5, 100_000, folder, CONFIG, seed=0)


def test_random_tokens(tmp_path: Path) -> None:
    first, again, other = (make_prompts(3, 7, tmp_path, CONFIG, seed) for seed in (1, 1, 2))
    assert first == again and first.token_ids != other.token_ids
    assert all(0 <= token_id < 400 for ids in first.token_ids for token_id in ids)


def test_files(tmp_path: Path) -> None:
    folder = save_sentence_piece_like(tmp_path / "model")
    texts = ["Hello world", "The quick brown fox", "no third"]
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n\n".join(texts))
    objects = tmp_path / "prompts.jsonl"
    objects.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    for file in (lines, objects):
        prompts = read_prompts(file, 2, folder, CONFIG)
        assert prompts.source == str(file)
        assert prompts.token_ids == [Tokenizer(folder).encode(text) for text in texts[:2]]
        assert all(ids[0] == 1 for ids in prompts.token_ids), "with BOS, as the tokenizer has it"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("few.txt", b"one\n", "has 1 prompts, 2 are wanted"),
        ("bad.txt", b"\xff\xfe\n", "cannot read the prompts"),
        ("bad.jsonl", b"{\n{\n", "line 1 of .* is no JSON object with a"),
        ("bad.jsonl", b'"text"\n{}\n', "line 1 of .* is no JSON object with a"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = save_byte_level(tmp_path / "model")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=message):
        read_prompts(tmp_path / name, 2, folder, CONFIG)


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot read the prompts"):
        read_prompts(tmp_path / "none.txt", 1, tmp_path, CONFIG)
    (tmp_path / "some.txt").write_text("text\n")
    with pytest.raises(RequestError, match="has no tokenizer"):
        read_prompts(tmp_path / "some.txt", 1, tmp_path, CONFIG)


def test_another_models_tokenizer(tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path / "model")
    (tmp_path / "some.txt").write_text("Ünïcödé\n", encoding="utf-8")
    with pytest.raises(RequestError, match="outside the vocabulary of 101"):
        read_prompts(tmp_path / "some.txt", 1, folder, parse_config(tiny_config()))
