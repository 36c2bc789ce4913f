"""The bytes of single tokens, and where they lie in a text."""

from pathlib import Path
from typing import Any

import pytest

from thinrank.server.token_text import TextOffsets, TokenTexts
from thinrank.text import Tokenizer
from tiny_tokenizers import save_byte_level, save_sentence_piece_like

TEXT = "Hello wörld 日本 😀  x, y"


@pytest.mark.parametrize(("save", "first"), [(save_byte_level, ""), (save_sentence_piece_like, " ")])
def test_bytes_of_tokens_joined_are_the_text(tmp_path: Path, save: Any, first: str) -> None:
    tokenizer = Tokenizer(save(tmp_path))
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(texts.bytes_of, ids)).decode() == first + TEXT
    assert texts.bytes_of(2) == b"</s>" and texts.is_special(2) and not texts.is_special(ids[0])
    assert texts.bytes_of(9999) == b""
    assert texts.text(tokenizer.encode("é", add_special_tokens=False)[-1])


@pytest.mark.parametrize(("save", "start"), [(save_byte_level, 0), (save_sentence_piece_like, -1)])
def test_offsets_count_characters(tmp_path: Path, save: Any, start: int) -> None:
    tokenizer = Tokenizer(save(tmp_path))
    ids = [1, *tokenizer.encode(TEXT, add_special_tokens=False), 2]
    texts = TokenTexts(tokenizer)
    offsets = TextOffsets(texts, skip_special_tokens=True, start=start)
    found = [offsets.push(token_id) for token_id in ids]
    assert found == sorted(found) and found[:2] == [0, 0] and found[-1] == offsets.end == len(TEXT)
    smile = next(
        i for i, token_id in enumerate(ids) if texts.bytes_of(token_id).startswith("😀".encode()[:1])
    )
    assert TEXT[found[smile]] == "😀"
    shown = TextOffsets(texts, skip_special_tokens=False, start=start)
    assert [shown.push(token_id) for token_id in ids][-1] == len("<s>") + len(TEXT)
