"""A conversation with a model: its turns, which of them fit into the context, and the next answer.

Knows nothing about terminals or commands.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from ..config import BLOCK_SIZE, SamplingParams
from ..errors import OptionError, OutputError, RequestError
from ..llm import LLM
from ..text_files import read_json_file

#: Share of the context that an answer may count on: older turns make room for it, unless max_tokens is less.
ANSWER_SHARE = 0.25


class Turn(NamedTuple):
    """A message and its answer."""

    user: str
    assistant: str


@dataclass
class AnswerStats:
    """How an answer came about. seconds: until its last token; first_token: until its first, None before it.

    limit: tokens that it could have. num_dropped: turns that the model did not see.
    """

    prompt_tokens: int
    limit: int
    num_dropped: int
    cached_tokens: int = 0
    tokens: int = 0
    first_token: float | None = None
    seconds: float = 0.0
    finish_reason: str | None = None


class Conversation:
    """params: of every answer, and may be replaced at any time. system: the system message.

    Raises RequestError when the model has no chat template, or it rejects messages.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None = None, chat_template: str | None = None
    ):
        self.params = params
        self.system = system
        self.turns: list[Turn] = []
        self.last: AnswerStats | None = None
        self._llm = llm
        self._chat_template = chat_template
        # A model that cannot chat says so now, not after the first message.
        self._encode([], "")

    @property
    def capacity(self) -> int:
        """Tokens that a prompt and its answer can have together."""
        engine = self._llm.engine
        return min(engine.max_model_len, engine.pool.num_blocks * BLOCK_SIZE)

    def ask(self, message: str) -> Generator[str, None, None]:
        """The answer in pieces. It joins the turns when the iterator ends or is closed, as far as it has come.

        Where not all turns fit, the oldest are left out. Raises RequestError when the message alone does not fit.
        """
        token_ids, num_dropped = self._prompt(message)
        limit = min(self.params.max_tokens, self.capacity - len(token_ids))
        self.last = stats = AnswerStats(len(token_ids), limit, num_dropped)
        params = replace(self.params, max_tokens=limit)
        answer, started = "", perf_counter()
        try:
            with closing(self._llm.stream({"prompt_token_ids": token_ids}, params)) as chunks:
                for chunk in chunks:
                    stats.seconds = perf_counter() - started
                    stats.first_token = stats.first_token or stats.seconds
                    stats.tokens += len(chunk.token_ids)
                    stats.finish_reason = chunk.finish_reason
                    stats.cached_tokens = chunk.metrics.num_cached_tokens if chunk.metrics else 0
                    answer += chunk.text
                    yield chunk.text
        finally:
            self.turns.append(Turn(message, answer))

    def reset(self) -> None:
        """Forget the turns."""
        self.turns, self.last = [], None

    def undo(self) -> Turn:
        """Take the last turn back. Raises OptionError when there is none."""
        if not self.turns:
            raise OptionError("there is no turn yet", "send a message first")
        return self.turns.pop()

    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, in OpenAI's form."""
        return self._messages(self.turns)

    def save(self, path: str | Path) -> None:
        """Write {"messages": [...]}. Raises OutputError when the file exists or cannot be written."""
        text = json.dumps({"messages": self.messages()}, indent=2, ensure_ascii=False) + "\n"
        try:
            with Path(path).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise OutputError(f"{path} exists", "name another file") from error
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}", "name another file") from error

    def load(self, path: str | Path) -> None:
        """Take system message and turns from a file that `save` wrote. Raises OptionError for any other."""
        content = read_json_file(path, "the conversation", "name a file that /save wrote")
        try:
            system, turns = _parse(content["messages"])
        except (ValueError, TypeError, KeyError) as error:
            raise OptionError(
                f"{path} is no conversation",
                'it must be {"messages": [...]}: a system message or none, then user and assistant in turn',
            ) from error
        self.system, self.turns, self.last = system, turns, None

    def _prompt(self, message: str) -> tuple[list[int], int]:
        """Token ids, and how many of the oldest turns are not among them."""
        room = self.capacity - min(self.params.max_tokens, int(ANSWER_SHARE * self.capacity))
        for num_dropped in range(len(self.turns) + 1):
            token_ids = self._encode(self.turns[num_dropped:], message)
            if len(token_ids) <= room:
                return token_ids, num_dropped
        if len(token_ids) >= self.capacity:
            raise RequestError(
                f"the message has {len(token_ids)} tokens, with what the chat template and the system message add; "
                f"with its answer it may have {self.capacity}",
                "shorten it, or raise --max-model-len or --kv-cache-memory",
            )
        return token_ids, num_dropped

    def _encode(self, turns: list[Turn], message: str) -> list[int]:
        messages = [*self._messages(turns), {"role": "user", "content": message}]
        return self._llm.tokenizer.encode_chat(messages, chat_template=self._chat_template)

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return opening + [
            {"role": role, "content": content}
            for turn in turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]


def _parse(messages: Any) -> tuple[str | None, list[Turn]]:
    """Raises ValueError, TypeError or KeyError for messages that are not a conversation."""
    roles = [message["role"] for message in messages]
    contents = [message["content"] for message in messages]
    if not all(isinstance(content, str) for content in contents):
        raise TypeError("content is no text")
    start = 1 if roles[:1] == ["system"] else 0
    rest = contents[start:]
    if roles[start:] != ["user", "assistant"] * (len(rest) // 2):
        raise ValueError("roles do not alternate")
    return contents[0] if start else None, [Turn(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
