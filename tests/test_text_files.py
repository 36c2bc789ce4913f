"""Text files that people name: lines and JSON strings as they are, whatever separators and marks they hold."""

import codecs
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinrank.errors import OptionError
from thinrank.text_files import json_strings, lines_of, read_json_file, read_text_file

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(TEXTS), st.booleans())
def test_json_strings_come_back(texts, ascii_only):
    """Text of the web has line separators of every kind, which JSON writes as they are."""
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts)
    assert json_strings(lines, "text", "x.jsonl") == texts


@given(st.lists(TEXTS.map(lambda text: text.replace("\n", "")).filter(str.strip)))
def test_lines_come_back(lines):
    assert lines_of("\n\n".join(lines)) == lines


def test_files_of_windows(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "a"}\r\n{"text": "b"}\r\n')
    text = read_text_file(tmp_path / "x.jsonl", "the text", "name another")
    assert json_strings(text, "text", "x.jsonl") == ["a", "b"]


#: Deeper than Python's parser goes.
NESTED = "[" * 100_000


@pytest.mark.parametrize("content", ["{", "", NESTED])
def test_a_file_that_is_no_json(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(OptionError, match=r"the ranks .*x\.json is no JSON.*: name another"):
        read_json_file(tmp_path / "x.json", "the ranks", "name another")
    with pytest.raises(OptionError, match=r"cannot read the ranks .*/no: .*: name another"):
        read_json_file(tmp_path / "no", "the ranks", "name another")


@pytest.mark.parametrize(
    "line", ["{", "[1]", "3", "null", '{"prompt": "x"}', '{"text": 3}', '"text"', NESTED]
)
def test_a_line_without_the_text_is_named(line):
    with pytest.raises(OptionError, match=r'line 2 of x.jsonl.*write {"text": "..."} a line'):
        json_strings(f'{{"text": "a"}}\n{line}', "text", "x.jsonl")


@pytest.mark.parametrize("content", [b"caf\xe9", None])
def test_files_that_cannot_be_read(content, tmp_path):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(OptionError, match=r"cannot read the poem .*file: .*: name a sonnet"):
        read_text_file(tmp_path / "file", "the poem", "name a sonnet")
