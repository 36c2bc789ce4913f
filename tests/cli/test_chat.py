"""`thinrank chat`: what it reads and where it writes. The session itself is tested in tests/chat."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripted_llm import ScriptedLLM, message
from thinrank.cli.main import main


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> ScriptedLLM:
    llm = ScriptedLLM()
    monkeypatch.setattr("thinrank.llm.LLM", lambda *_, **__: llm)
    return llm


def test_piped_lines(
    llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n two \n/nonsense\n/reset\nthree\n/exit\nfour\n"))
    assert main(["chat", "model", "--system", "be brief"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == "answer 1\nanswer 2\nanswer 3\n"
    assert stderr.startswith("unknown command '/nonsense': known: ")
    assert llm.asked[-1] == [message("system", "be brief"), message("user", "three")]


def test_one_prompt(llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "model", "--prompt", "/help"]) == 0
    assert capsys.readouterr() == ("answer 1\n", "")
    assert llm.asked == [[message("user", "/help")]]


def test_one_prompt_that_is_too_long(llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "model", "--prompt", "word " * 1000]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("error: the message has 1001 tokens")


def test_a_terminal(
    llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["one", EOFError()])

    def fake_input(prompt: str) -> str:
        event = next(typed)
        if isinstance(event, str):
            return event
        raise event

    monkeypatch.setattr("builtins.input", fake_input)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["chat", "model"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == "answer 1\n\n" and "/help lists the commands" in stderr


def test_a_model(
    converted: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(converted("asvd-mha-80"), tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    options = ["--temperature", "0", "--max-tokens", "3"]
    arguments = ["chat", str(model), "--prompt", "hello", "--chat-template", str(template)]
    assert main([*arguments, *options]) == 0
    answer = capsys.readouterr()
    assert main(["generate", str(model), "--prompt", "user: hello\n", *options]) == 0
    assert capsys.readouterr() == answer
