"""A person at a terminal, or a script behind a pipe, and a conversation: messages, /commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import OptionError, ThinrankError, unknown_name
from .conversation import Conversation

#: Begins and ends a message of several lines.
QUOTES = '"""'


@dataclass
class Session:
    """read: gives the line that is typed after a prompt, as `input` does; EOFError is the end, KeyboardInterrupt
    gives up the line. write: takes what the model says. note: takes a line that the model did not say. interactive:
    somebody watches, so Ctrl-C ends an answer and not the session.
    """

    conversation: Conversation
    read: Callable[[str], str]
    write: Callable[[str], None]
    note: Callable[[str], None]
    interactive: bool

    def run(self) -> None:
        """Until the end of the lines, or /exit. A mistake is noted, and the conversation goes on."""
        if self.interactive:
            self.note(f"one message a line; {QUOTES} begins and ends a longer one; /help lists the commands")
        while True:
            try:
                text = self._read()
                if text.startswith("/") and not text.startswith("//"):
                    self._command(text)
                elif text:
                    self.answer(text.removeprefix("/") if text.startswith("//") else text)
            except ThinrankError as error:
                self.note(str(error))
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.write("\n")
            except EOFError:
                return

    def answer(self, message: str) -> None:
        """Stream one answer. Raises RequestError when the message does not fit into the context."""
        conversation = self.conversation
        dropped_before = 0 if conversation.last is None else conversation.last.num_dropped
        try:
            with closing(conversation.ask(message)) as pieces:
                for piece in pieces:
                    self.write(piece)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
        self.write("\n")
        stats = conversation.last
        if stats is None:
            return
        if stats.num_dropped > dropped_before:
            self.note(
                f"the context of {conversation.capacity} tokens is full: the model no longer sees "
                f"{_turns(stats.num_dropped, 'oldest')}; /reset begins anew"
            )
        if self.interactive and stats.finish_reason == "length":
            full = stats.limit < conversation.params.max_tokens
            reason = (
                "the context is full" if full else f"max_tokens is {stats.limit}; /set max_tokens changes it"
            )
            self.note(f"cut after {stats.tokens} tokens: {reason}")

    def _read(self) -> str:
        """One message or command, without surrounding space."""
        try:
            text = self.read("> ").strip()
        except EOFError:
            if self.interactive:
                self.write("\n")
            raise
        if not text.startswith(QUOTES):
            return text
        lines = [text.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self.read("... ").removesuffix("\n"))
            except EOFError:
                self.note(f"the last message was not sent: it has no closing {QUOTES}")
                raise
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip()

    def _command(self, text: str) -> None:
        name, _, argument = text[1:].partition(" ")
        if name not in COMMANDS:
            raise unknown_name("command", f"/{name}", [f"/{known}" for known in COMMANDS])
        COMMANDS[name].run(self, argument.strip())


@dataclass(frozen=True)
class Command:
    """argument: as the help shows it. run: takes the session and what follows the name."""

    argument: str
    help: str
    run: Callable[[Session, str], None]


def _help(session: Session, argument: str) -> None:
    for name, command in COMMANDS.items():
        session.note(f"{f'/{name} {command.argument}':<22}{command.help}")
    session.note(f"{'//TEXT':<22}a message that begins with /")
    session.note(f"{'Ctrl-C':<22}ends an answer; what there is of it stays")


def _reset(session: Session, argument: str) -> None:
    session.conversation.reset()


def _system(session: Session, argument: str) -> None:
    conversation = session.conversation
    if argument:
        conversation.system = None if argument == "none" else argument
    session.note(
        "no system message" if conversation.system is None else f"system message: {conversation.system}"
    )


def _set(session: Session, argument: str) -> None:
    name, _, text = argument.partition(" ")
    params = session.conversation.params
    if not name:
        session.note("  ".join(f"{known} {_shown(getattr(params, known))}" for known in SETTINGS))
        return
    if name not in SETTINGS:
        raise unknown_name("setting", name, list(SETTINGS))
    if text.strip():
        session.conversation.params = replace(params, **{name: _parse(name, text.strip())})
    session.note(f"{name} {_shown(getattr(session.conversation.params, name))}")


def _save(session: Session, argument: str) -> None:
    session.conversation.save(_named(argument))
    session.note(f"{_turns(len(session.conversation.turns))} written to {argument}")


def _load(session: Session, argument: str) -> None:
    session.conversation.load(_named(argument))
    session.note(f"{_turns(len(session.conversation.turns))} read from {argument}")


def _retry(session: Session, argument: str) -> None:
    turn = session.conversation.undo()
    try:
        session.answer(turn.user)
    except ThinrankError:
        session.conversation.turns.append(turn)
        raise


def _undo(session: Session, argument: str) -> None:
    turn = session.conversation.undo()
    first_line = turn.user.partition("\n")[0]
    session.note(f"taken back: {first_line[:60]}{'...' if len(turn.user) > 60 else ''}")


def _stats(session: Session, argument: str) -> None:
    conversation = session.conversation
    session.note(f"{_turns(len(conversation.turns))}, a context of {conversation.capacity} tokens")
    stats = conversation.last
    if stats is None or stats.first_token is None:
        return
    session.note(
        f"last prompt: {stats.prompt_tokens} tokens, {stats.cached_tokens} of them cached, "
        f"{_turns(stats.num_dropped, 'oldest')} left out; first token after {stats.first_token:.3f} s"
    )
    decoding = stats.seconds - stats.first_token
    speed = f", {(stats.tokens - 1) / decoding:.1f} tokens/s" if stats.tokens > 1 and decoding > 0 else ""
    session.note(f"last answer: {stats.tokens} tokens in {stats.seconds:.3f} s{speed}")


def _exit(session: Session, argument: str) -> None:
    raise EOFError


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "help": Command("", "this list", _help),
        "reset": Command("", "forget the conversation", _reset),
        "system": Command("[TEXT|none]", "the system message, or another one", _system),
        "set": Command("[NAME [VALUE]]", "settings of the next answers, such as temperature 0.5", _set),
        "retry": Command("", "another answer to the last message", _retry),
        "undo": Command("", "take the last message and its answer back", _undo),
        "save": Command("FILE", "write the conversation to a new file", _save),
        "load": Command("FILE", "go on with one from a file", _load),
        "stats": Command("", "tokens, speed, cache", _stats),
        "exit": Command("", "end, as Ctrl-D does", _exit),
    }
)


def _switch(text: str) -> bool:
    return {"on": True, "true": True, "off": False, "false": False}[text]


def _optional_int(text: str) -> int | None:
    return None if text == "none" else int(text)


def _optional_text(text: str) -> str | None:
    return None if text == "none" else text


#: What /set changes: a field of SamplingParams -> its value from a text.
SETTINGS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "temperature": float,
        "top_p": float,
        "top_k": int,
        "min_p": float,
        "max_tokens": int,
        "seed": _optional_int,
        "stop": _optional_text,
        "repetition_penalty": float,
        "presence_penalty": float,
        "frequency_penalty": float,
        "ignore_eos": _switch,
    }
)


def _parse(name: str, text: str) -> Any:
    """Raises OptionError for a text that is no value of the setting."""
    parse = SETTINGS[name]
    try:
        return parse(text)
    except (ValueError, KeyError) as error:
        accepted = {float: "a number", int: "a whole number", _optional_int: "a whole number, or none"}
        raise OptionError(f"{name} is {text!r}", f"give {accepted.get(parse, 'on or off')}") from error


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(repr, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _named(argument: str) -> str:
    if not argument:
        raise OptionError("there is no file name", "such as /save talk.json")
    return argument


def _turns(count: int, kind: str = "") -> str:
    """ "3 turns", "the oldest turn"."""
    return f"{count} {kind} turn{'' if count == 1 else 's'}".replace("  ", " ")
