"""What is typed, and what comes of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripted_llm import ScriptedLLM, message
from thinrank.chat.conversation import Conversation, Turn
from thinrank.chat.session import COMMANDS, SETTINGS, Session
from thinrank.config import SamplingParams


class Terminal:
    """A session whose lines are written down before. An exception among them is raised instead."""

    def __init__(
        self, *lines: str | BaseException, interactive: bool = False, llm: ScriptedLLM | None = None
    ):
        self.llm = llm or ScriptedLLM()
        self.talk = Conversation(self.llm, SamplingParams(max_tokens=10))  # type: ignore[arg-type]
        self.written = ""
        self.notes: list[str] = []
        self.prompts: list[str] = []
        self._lines = iter([*lines, EOFError()])
        self.session = Session(self.talk, self._read, self._write, self.notes.append, interactive)
        self.session.run()

    def _read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines)
        if isinstance(line, str):
            return line
        raise line

    def _write(self, text: str) -> None:
        self.written += text


def test_messages_and_reset() -> None:
    terminal = Terminal("one\n", "\n", " two \n", "/reset\n", "three\n", "/exit\n", "four\n")
    assert terminal.written == "answer 1\nanswer 2\nanswer 3\n"
    assert [asked[-1]["content"] for asked in terminal.llm.asked] == ["one", "two", "three"]
    assert [len(asked) for asked in terminal.llm.asked] == [1, 3, 1]
    assert terminal.notes == []


def test_several_lines() -> None:
    terminal = Terminal('"""one\n', "  two\n", '"""\n', '"""three"""\n', "//four\n")
    assert [asked[-1]["content"] for asked in terminal.llm.asked] == ["one\n  two", "three", "/four"]
    assert terminal.prompts == ["> ", "... ", "... ", "> ", "> ", "> "]


def test_a_message_without_an_end_is_not_sent() -> None:
    terminal = Terminal('"""one\n', "two\n")
    assert terminal.llm.asked == [] and "has no closing" in terminal.notes[0]


def test_a_person_interrupts() -> None:
    """Ctrl-C ends an answer or a half-typed line, Ctrl-D the session."""
    terminal = Terminal("one", KeyboardInterrupt(), "interrupt", "two", interactive=True)
    assert terminal.written == "answer 1\n\nanswer \nanswer 3\n\n"
    assert terminal.talk.turns == [
        *(Turn("one", "answer 1"), Turn("interrupt", "answer "), Turn("two", "answer 3"))
    ]
    assert "/help" in terminal.notes[0]


def test_a_script_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        Terminal("interrupt")


def test_help_names_every_command() -> None:
    notes = Terminal("/help").notes
    for name in COMMANDS:
        assert any(note.startswith(f"/{name} ") for note in notes)


def test_retry_and_undo() -> None:
    terminal = Terminal("one", "two", "/retry", "/undo", "/undo", "/undo")
    assert terminal.written == "answer 1\nanswer 2\nanswer 3\n"
    assert terminal.llm.asked[2] == terminal.llm.asked[1]
    assert terminal.talk.turns == []
    assert terminal.notes == [
        "taken back: two",
        "taken back: one",
        "there is no turn yet: send a message first",
    ]


def test_a_retry_that_fails_loses_nothing() -> None:
    terminal = Terminal("one", f"/system {'word ' * 30}", "/retry", llm=ScriptedLLM(max_model_len=20))
    assert terminal.talk.turns == [Turn("one", "answer 1")]
    assert "tokens" in terminal.notes[-1]


def test_system() -> None:
    terminal = Terminal("/system", "/system be brief", "one", "/system none", "two")
    assert terminal.notes == ["no system message", "system message: be brief", "no system message"]
    assert terminal.llm.asked[0][0] == message("system", "be brief")
    assert terminal.llm.asked[1][0] == message("user", "one")


def test_set() -> None:
    terminal = Terminal(
        "/set temperature 0.5", "/set seed 3", "/set stop the end", "/set ignore_eos on", "one",
        "/set seed none", "/set stop none", "two", "/set temperature", "/set",
    )  # fmt: skip
    first, second = terminal.llm.params
    assert first == SamplingParams(max_tokens=10, temperature=0.5, seed=3, stop=["the end"], ignore_eos=True)
    assert second == SamplingParams(max_tokens=10, temperature=0.5, ignore_eos=True)
    assert terminal.notes[-2] == "temperature 0.5"
    for name in SETTINGS:
        assert f"{name} " in terminal.notes[-1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/set temperature hot", "temperature is 'hot': give a number"),
        ("/set temperature -1", "temperature is -1.0: it must be 0 or more"),
        ("/set max_tokens 1.5", "max_tokens is '1.5': give a whole number"),
        ("/set seed x", "seed is 'x': give a whole number, or none"),
        ("/set ignore_eos maybe", "ignore_eos is 'maybe': give on or off"),
        ("/set n 3", "unknown setting 'n': known: frequency_penalty"),
        ("/bye", "unknown command '/bye': known: /exit, /help"),
        ("/save", "there is no file name"),
        ("/load no/such/file", "cannot read the conversation no/such/file"),
        ("/retry", "there is no turn yet"),
        ("word " * 1000, "the message has 1001 tokens"),
    ],
)
def test_mistakes_end_nothing(line: str, expected: str) -> None:
    terminal = Terminal(line, "one")
    assert expected in terminal.notes[0]
    assert terminal.written == "answer 1\n"


def test_save_and_load(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    terminal = Terminal("one", f"/save {file}", "/reset", f"/load {file}", "two")
    assert terminal.notes == [f"1 turn written to {file}", f"1 turn read from {file}"]
    assert len(terminal.llm.asked[-1]) == 3


def test_stats() -> None:
    notes = Terminal("/stats", "one", "/stats").notes
    assert notes[:2] == ["0 turns, a context of 1000 tokens", "1 turn, a context of 1000 tokens"]
    assert notes[2].startswith(
        "last prompt: 2 tokens, 7 of them cached, 0 oldest turns left out; first token"
    )
    assert notes[3].startswith("last answer: 2 tokens in ")


@pytest.mark.parametrize("interactive", [False, True])
def test_a_full_context_is_explained_once(interactive: bool) -> None:
    lines = ["word " * 20] * 4
    notes = Terminal(*lines, interactive=interactive, llm=ScriptedLLM(max_model_len=64)).notes[interactive:]
    assert notes == [
        "the context of 64 tokens is full: the model no longer sees 1 oldest turn; /reset begins anew",
        "the context of 64 tokens is full: the model no longer sees 2 oldest turns; /reset begins anew",
    ]


@pytest.mark.parametrize(
    ("lines", "llm", "expected"),
    [
        (["/set max_tokens 2", "one"], ScriptedLLM, "cut after 2 tokens: max_tokens is 2; /set max_tokens"),
        (["word " * 17], lambda: ScriptedLLM(max_model_len=20), "cut after 2 tokens: the context is full"),
    ],
)
def test_a_person_hears_why_an_answer_ends(
    lines: list[str], llm: Callable[[], ScriptedLLM], expected: str
) -> None:
    assert Terminal(*lines, interactive=True, llm=llm()).notes[-1].startswith(expected)
    assert not any("cut" in note for note in Terminal(*lines, llm=llm()).notes)
