"""Stands in for `LLM` in conversations: numbers its answers, takes words for tokens, remembers what it was asked."""

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from thinrank.config import BLOCK_SIZE, SamplingParams
from thinrank.errors import RequestError

Messages = list[dict[str, str]]


class ScriptedLLM:
    """A prompt has a token for each word, and one for each message. has_template: whether it can chat.

    A message "interrupt" raises KeyboardInterrupt after the first piece of its answer.
    """

    def __init__(self, max_model_len: int = 1000, num_blocks: int = 1000, has_template: bool = True):
        self.asked: list[Messages] = []
        self.params: list[SamplingParams] = []
        self.engine = SimpleNamespace(
            max_model_len=max_model_len, pool=SimpleNamespace(num_blocks=num_blocks)
        )
        self.tokenizer = SimpleNamespace(encode_chat=self._encode)
        self._has_template = has_template
        self._encoded: Messages = []

    def _encode(self, messages: Messages, chat_template: str | None = None) -> list[int]:
        if not self._has_template and chat_template is None:
            raise RequestError("this model has no chat template", "use generate")
        self._encoded = messages
        return [0] * sum(1 + len(message["content"].split()) for message in messages)

    def stream(self, prompt: dict[str, list[int]], params: SamplingParams) -> Generator[Any, None, None]:
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= min(
            self.engine.max_model_len, self.engine.pool.num_blocks * BLOCK_SIZE
        )
        self.asked.append(self._encoded)
        self.params.append(params)
        number = len(self.asked)
        yield self._chunk("answer ")
        if self._encoded[-1]["content"] == "interrupt":
            raise KeyboardInterrupt
        yield self._chunk(str(number), "length" if params.max_tokens == 2 else "stop")

    def _chunk(self, text: str, finish_reason: str | None = None) -> Any:
        metrics = SimpleNamespace(num_cached_tokens=7)
        return SimpleNamespace(text=text, token_ids=[0], finish_reason=finish_reason, metrics=metrics)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
