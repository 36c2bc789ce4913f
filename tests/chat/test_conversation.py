"""Turns, what of them fits, and files."""

import json
from pathlib import Path

import pytest

from scripted_llm import ScriptedLLM, message
from thinrank import LLM
from thinrank.chat.conversation import Conversation, Turn
from thinrank.config import SamplingParams
from thinrank.errors import OptionError, OutputError, RequestError
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_tokenizers import CHAT_TEMPLATE, save_byte_level


def conversation(llm: ScriptedLLM | LLM, max_tokens: int = 10, **options: str) -> Conversation:
    return Conversation(llm, SamplingParams(max_tokens=max_tokens), **options)  # type: ignore[arg-type]


def ask(conversation: Conversation, text: str) -> str:
    return "".join(conversation.ask(text))


def test_the_model_sees_system_message_and_turns() -> None:
    llm = ScriptedLLM()
    talk = conversation(llm, system="be brief")
    assert [ask(talk, "one"), ask(talk, "two")] == ["answer 1", "answer 2"]
    system = message("system", "be brief")
    assert llm.asked == [
        [system, message("user", "one")],
        [system, message("user", "one"), message("assistant", "answer 1"), message("user", "two")],
    ]
    assert talk.turns == [Turn("one", "answer 1"), Turn("two", "answer 2")]
    assert talk.last is not None
    assert (talk.last.tokens, talk.last.cached_tokens, talk.last.finish_reason) == (2, 7, "stop")
    assert 0 < (talk.last.first_token or 0) <= talk.last.seconds
    talk.reset()
    ask(talk, "three")
    assert llm.asked[-1] == [system, message("user", "three")]


def test_undo() -> None:
    talk = conversation(ScriptedLLM())
    ask(talk, "one")
    assert talk.undo() == Turn("one", "answer 1")
    assert talk.turns == []
    with pytest.raises(OptionError, match="no turn yet"):
        talk.undo()


def test_an_answer_that_is_given_up_stays_as_far_as_it_came() -> None:
    talk = conversation(ScriptedLLM())
    pieces = talk.ask("one")
    assert next(pieces) == "answer "
    pieces.close()
    assert talk.turns == [Turn("one", "answer ")]


@pytest.mark.parametrize("limit", [{"max_model_len": 64}, {"num_blocks": 1}], ids=str)
def test_the_oldest_turns_make_room(limit: dict[str, int]) -> None:
    """64 tokens, 16 of them for the answer. A message of 9 words and its answer are 13, the system message 3."""
    llm = ScriptedLLM(**limit)
    talk = conversation(llm, max_tokens=1000, system="be brief")
    assert talk.capacity == 64
    words = ["word " * 8 + str(number) for number in range(6)]
    dropped = []
    for text in words:
        ask(talk, text)
        assert talk.last is not None
        dropped.append(talk.last.num_dropped)
    assert dropped == [0, 0, 0, 1, 2, 3]
    assert [each["content"] for each in llm.asked[-1]] == [
        *("be brief", words[3], "answer 4", words[4], "answer 5", words[5])
    ]
    assert llm.params[-1].max_tokens == 64 - 39
    assert len(talk.turns) == 6, "what the model no longer sees is not forgotten"
    talk.params = SamplingParams(max_tokens=1)
    ask(talk, "and " * 20)  # 3 + 3 * 13 + 21 = 63 tokens: a short answer leaves room for one turn more
    assert talk.last is not None and (talk.last.num_dropped, talk.last.prompt_tokens) == (3, 63)


def test_a_message_that_cannot_fit() -> None:
    talk = conversation(ScriptedLLM(max_model_len=20))
    ask(talk, "one")
    with pytest.raises(RequestError, match=r"the message has 41 tokens.* it may have 20: shorten it"):
        ask(talk, "word " * 40)
    assert talk.turns == [Turn("one", "answer 1")]
    ask(talk, "word " * 17)  # leaves two tokens to the answer
    assert talk.last is not None and talk.last.limit == 2


def test_a_model_without_template() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        conversation(ScriptedLLM(has_template=False))
    conversation(ScriptedLLM(has_template=False), chat_template="one of mine")


def test_files(tmp_path: Path) -> None:
    talk = conversation(ScriptedLLM(), system="sei höflich")
    ask(talk, "größer\nals")
    file = tmp_path / "talk.json"
    talk.save(file)
    assert json.loads(file.read_text(encoding="utf-8")) == {"messages": talk.messages()}
    with pytest.raises(OutputError, match="exists: name another file"):
        talk.save(file)
    with pytest.raises(OutputError, match="cannot write"):
        talk.save(tmp_path / "no" / "folder")
    other = conversation(ScriptedLLM(), system="another")
    other.load(file)
    assert (other.system, other.turns) == (talk.system, talk.turns)
    file.unlink()
    conversation(ScriptedLLM()).save(file)
    other.load(file)
    assert (other.system, other.turns) == (None, [])


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"messages": 3}',
        '{"messages": [{"role": "user", "content": "no answer"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}',
        '{"messages": [{"role": "user"}, {"role": "assistant"}]}',
        '{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]}',
    ],
)
def test_files_that_are_no_conversation(tmp_path: Path, text: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    talk = conversation(ScriptedLLM())
    ask(talk, "one")
    with pytest.raises(OptionError, match="is no conversation"):
        talk.load(file)
    assert len(talk.turns) == 1
    file.write_text("no json")
    for path, expected in ((tmp_path / "nothing", "cannot read"), (file, "is no JSON")):
        with pytest.raises(OptionError, match=expected):
            talk.load(path)
    assert len(talk.turns) == 1


def test_a_real_model_talks_beyond_its_context(tmp_path: Path) -> None:
    """Byte-level tokens: each message has some 30, so that turns have to go."""
    config = tiny_config(vocab_size=400, max_position_embeddings=192)
    write_folder(tmp_path / "model", config, random_tensors(config))
    save_byte_level(tmp_path / "model", CHAT_TEMPLATE)
    llm = LLM(tmp_path / "model", device="cpu", kv_cache_memory=2**22)
    talk = Conversation(llm, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for number in range(8):
        ask(talk, f"message number {number} of some length")
        assert talk.last is not None and talk.last.tokens == 20
    assert talk.last is not None and 0 < talk.last.num_dropped < 8
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks
