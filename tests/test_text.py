"""Tokenizer, incremental detokenisation and stop strings."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from thinrank.errors import CheckpointError, RequestError
from thinrank.text import Detokenizer, StopMatcher, Tokenizer, has_tokenizer
from tiny_tokenizers import CHAT_TEMPLATE, save_byte_level, save_sentence_piece_like

TEXTS = [
    "The quick brown fox.",
    "Hello  two   spaces, hello there !",
    " leading and trailing ",
    "emoji 👩‍👩‍👧 and 漢字, naïve",
    "\n\tlines\n",
    "",
]


@pytest.fixture(scope="module", params=[save_byte_level, save_sentence_piece_like])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    save: Callable[..., Path] = request.param
    return Tokenizer(save(tmp_path_factory.mktemp("tokenizer"), CHAT_TEMPLATE))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("count", [1, 7, 600, 5000, 10**6])
def test_the_start_of_a_text_is_that_of_all_its_tokens(tokenizer: Tokenizer, count: int) -> None:
    for text in ("", "short", " ".join(TEXTS) * 300, "lazydog" * 3000, "\n".join(TEXTS * 300)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode_start(text, count) == ids[:count]


def test_a_word_that_is_cut_does_not_count(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token a word of ten characters, the first 4096 end within the 410th."""
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: [hash(word) for word in text.split()])
    text = " ".join(str(10**8 + number) for number in range(3000))
    for count in (409, 410, 411):
        assert tokenizer.encode_start(text, count) == tokenizer.encode(text)[:count]


def test_the_start_of_an_enormous_text_needs_no_more_than_that(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, lengths = tokenizer.encode, []

    def watched(text: str, **options: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", watched)
    assert len(tokenizer.encode_start("one enormous line " * 10**6, 500)) == 500
    assert sum(lengths) < 10**5


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_of_random_tokens_join_to_the_whole(tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
    """Any tokens in any order, as long as byte-fallback tokens form characters; see `Detokenizer`."""
    rng = random.Random(0)
    words = [
        [token_id] for token, token_id in tokenizer.backend.get_vocab().items() if not token.startswith("<0x")
    ]
    words += [
        tokenizer.encode(text, add_special_tokens=False) for text in ("👩", "漢", "☃ ", "fox", "  ")
    ] * 20
    for _ in range(300):
        ids = [token_id for word in rng.choices(words, k=rng.randint(1, 12)) for token_id in word]
        detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        pieces = [detokenizer.push(token_id) for token_id in ids]
        whole = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert "".join(pieces) + detokenizer.finish() == whole, ids


def test_the_space_after_a_prompt_stays(tokenizer: Tokenizer) -> None:
    """Cut a text anywhere: the prompt's text and the continuation's join to the whole."""
    text = "The quick brown fox, hello there"
    ids = tokenizer.encode(text)
    for cut in range(len(ids)):
        detokenizer = Detokenizer(tokenizer, True, ids[:cut])
        pieces = [detokenizer.push(token_id) for token_id in ids[cut:]]
        assert tokenizer.decode(ids[:cut]) + "".join(pieces) + detokenizer.finish() == text


def test_no_tokens_are_an_error(tokenizer: Tokenizer) -> None:
    """A hot model writes anything; text in other than byte-fallback tokens is right even then."""
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.backend.get_vocab_size()) for _ in range(20)]
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
        joined = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        if "<0x00>" not in tokenizer.backend.get_vocab():
            assert joined == tokenizer.decode(ids)


def test_an_incomplete_character_waits(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x👩", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.push(token_id) for token_id in ids[:-1]]
    assert "".join(pieces) == "x"
    assert detokenizer.finish().strip("\ufffd") == ""


def test_exactly_one_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_sentence_piece_like(tmp_path, CHAT_TEMPLATE))
    assert tokenizer.encode("fox").count(1) == tokenizer.encode("<s>fox").count(1) == 1
    assert tokenizer.encode("fox", add_special_tokens=False).count(1) == 0
    chat = tokenizer.encode_chat([{"role": "user", "content": "fox"}])
    assert chat.count(1) == 1 and chat[0] == 1


def test_no_bos_is_invented(tmp_path: Path) -> None:
    assert 1 not in Tokenizer(save_byte_level(tmp_path)).encode("fox")


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "fox"}]
    assert tokenizer.render_chat(messages) == "<s>[user]fox[assistant]"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<s>[user]fox"
    assert tokenizer.render_chat(messages, chat_template="{{ messages[0].content }}!") == "fox!"
    with pytest.raises(RequestError, match="rejects the messages: no tools here"):
        tokenizer.render_chat([{"role": "tool", "content": ""}])
    with pytest.raises(RequestError, match="rejects the messages"):
        tokenizer.render_chat(messages, chat_template="{% if %}")


def test_missing_chat_template(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no chat template.*generate"):
        Tokenizer(save_byte_level(tmp_path)).render_chat([{"role": "user", "content": "fox"}])


def test_missing_and_damaged_tokenizer(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(RequestError, match=r"has no tokenizer.*token ids"):
        Tokenizer(tmp_path)
    save_byte_level(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"5", b"[]", b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "number", "list", "binary", "deep"],
)
def test_tokenizer_files_of_other_kinds(tmp_path: Path, name: str, content: bytes) -> None:
    (save_byte_level(tmp_path) / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.json": {"model": None}},
        {"tokenizer.json": {"model": {"type": "BPE", "vocab": [], "merges": []}}},
        {"tokenizer.json": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": [1]}},
        {"tokenizer_config.json": {"tokenizer_class": ["x"]}},
        {"tokenizer_config.json": {"bos_token": 5}},
    ],
    ids=str,
)
def test_a_tokenizer_of_other_values(tmp_path: Path, change: dict[str, dict[str, object]]) -> None:
    save_byte_level(tmp_path)
    for name, values in change.items():
        path = tmp_path / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages.nothing.there }}",
        "{{ 2.0 ** 99999 }}",
        "{{ [1, 'a'] | sort }}",
        "{{ 'x'.encode('zz') }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_fails_is_a_mistake_of_a_person(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save_byte_level(tmp_path))
    with pytest.raises(RequestError, match="the chat template rejects the messages"):
        tokenizer.render_chat([{"role": "user", "content": "fox"}], chat_template=template)


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    shown = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop:
            return shown, stop
    return [*shown, matcher.flush()], None


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "found"),
    [
        (["END"], ["a", "E", "N", "D", "b"], ["a", "", "", ""], "END"),
        (["END"], ["aE", "Nx"], ["a", "ENx", ""], None),
        (["END"], ["aE"], ["a", "E"], None),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["xyz", "b"], ["abxyz"], ["a"], "b"),
        (["xyz", "z"], ["ax", "yz"], ["a", ""], "xyz"),
        ([], ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_stop_strings(stop: list[str], pieces: list[str], shown: list[str], found: str | None) -> None:
    assert feed(StopMatcher(stop, include_stop=False), pieces) == (shown, found)


def test_a_stop_string_can_be_included() -> None:
    assert feed(StopMatcher(["END"], include_stop=True), ["aE", "NDb"]) == (["a", "END"], "END")


def test_nothing_of_a_stop_string_leaks() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 2))]
        shown, found = feed(StopMatcher(stops, include_stop=False), list(text))
        joined = "".join(shown)
        if found is None:
            assert joined == text and not any(stop in text for stop in stops)
        else:
            assert text.startswith(joined + found)
            assert not any(stop in joined for stop in stops)
