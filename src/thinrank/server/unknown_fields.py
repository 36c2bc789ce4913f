"""What becomes of request fields that `schema` does not list.

Fields of OpenAI or vLLM that would change the output, and that we do not implement, are refused by name: a client that
asked for them must not get something else. All others (`user`, `metadata`, what the next client invents) are ignored,
and the log names each once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .errors import ApiError, bad_request

logger = logging.getLogger("thinrank.server")

#: Field -> values that ask for nothing, beside null.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "chat_template": (),
    "documents": ([],),
    "guided_whitespace_pattern": (),
}
_HINTS = {
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
    "chat_template": "the server has --chat-template",
}
#: Names that the log remembers; a stranger could send any number of them.
_MAX_REMEMBERED = 256


class UnknownFields:
    """Judges the unlisted fields of one server's requests."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def check(self, fields: Mapping[str, Any] | None) -> None:
        """Raises ApiError for a field that must not be ignored."""
        for name, value in (fields or {}).items():
            if name in _REFUSED:
                if value is not None and value not in _REFUSED[name]:
                    raise self._refusal(name)
            elif name not in self._seen and len(self._seen) < _MAX_REMEMBERED:
                self._seen.add(name)
                logger.warning("ignored the unknown request field %.64r", name)

    def _refusal(self, name: str) -> ApiError:
        hint = _HINTS.get(name)
        return bad_request(f"{name} is not supported" + (f": {hint}" if hint else ""), name)
