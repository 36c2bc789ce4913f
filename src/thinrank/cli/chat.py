"""`thinrank chat`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..text_files import read_text_file
from . import output
from .generate import check_text
from .options import ENGINE, EngineOptions, Model, SamplingOptions, with_option_groups

#: Longer than the few tokens that a completion defaults to.
ANSWER = SamplingOptions(max_tokens=512)


@with_option_groups
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this one message and end.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Jinja chat template.", show_default="the model's")
    ] = None,
    sampling: SamplingOptions = ANSWER,
    engine: EngineOptions = ENGINE,
) -> None:
    """Talk to a model: one message a line.

    /help lists the commands, such as /retry, /set and /save. Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    params = sampling.params()
    template = None if chat_template is None else read_template(chat_template)
    if system is not None:
        check_text("--system", system)
    llm = engine.load(model, max_num_seqs=1)

    from ..chat.conversation import Conversation
    from ..chat.session import Session

    session = Session(
        Conversation(llm, params, system, template),
        read=_type if sys.stdin.isatty() else _next_line,
        write=output.write,
        note=lambda line: output.write_notes([line]),
        interactive=sys.stdin.isatty(),
    )
    if prompt is None:
        session.run()
    else:
        session.answer(check_text("--prompt", prompt))


def _type(prompt: str) -> str:
    import readline  # noqa: F401 (makes `input` editable)

    return check_text("the message", input(prompt))


def _next_line(prompt: str) -> str:
    """Of a piped stdin, which shows no prompt."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return check_text("the message", line)


def read_template(path: str) -> str:
    return read_text_file(path, "the chat template", "check --chat-template")
