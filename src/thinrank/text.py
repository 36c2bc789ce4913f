"""Text to token ids and back: tokenizer, chat template, incremental detokenisation, stop strings.

Knows nothing about models or the engine. The only module that uses Hugging Face's tokenizer classes; they
read local files only and never run code from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer

from .checkpoint.folder import VOCABULARY_FILES
from .errors import CheckpointError, RequestError, UnsupportedModelError

Messages = Sequence[Mapping[str, Any]]


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder holds tokenizer files."""
    return any((Path(path) / name).is_file() for name in VOCABULARY_FILES)


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, path: str | Path):
        """Raises RequestError when the folder has no tokenizer, CheckpointError when its files are damaged,
        UnsupportedModelError when the `tokenizers` library has no counterpart of it."""
        if not has_tokenizer(path):
            raise RequestError(
                f"{path} has no tokenizer", "pass token ids instead of text, or name a tokenizer folder"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except MemoryError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the tokenizer of {path} cannot be read: {error}", "copy the tokenizer files again"
            ) from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise UnsupportedModelError(
                f"the tokenizer of {path} is a {type(tokenizer).__name__}", "a tokenizer.json is needed"
            )
        self._tokenizer = tokenizer
        self.path = Path(path)
        self.backend = backend

    @property
    def huggingface(self) -> Any:
        """The transformers tokenizer, for libraries that ask for one."""
        return self._tokenizer

    @property
    def bos_token_id(self) -> int | None:
        value: int | None = self._tokenizer.bos_token_id
        return value

    @property
    def eos_token_id(self) -> int | None:
        value: int | None = self._tokenizer.eos_token_id
        return value

    @property
    def chat_template(self) -> str | None:
        template: str | None = self._tokenizer.chat_template
        return template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A text that already starts with BOS does not get a second one."""
        # verbose: a long text is not necessarily one prompt, so its length deserves no warning here.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def encode_start(self, text: str, count: int) -> list[int]:
        """The first `count` token ids of a text, without special tokens; all of them if there are fewer.

        Reads no more of it than that takes: tokenizers hold about 150 bytes a character, and take 2 seconds a
        megabyte.
        """
        length = max(4096, 8 * count)
        while True:
            ids = self.encode(text[:length], add_special_tokens=False)
            # A cut within a word changes its last tokens.
            if length >= len(text) or len(ids) >= count + 64:
                return ids[:count]
            length *= 2

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, exactly: spaces before punctuation are not tidied away."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> str:
        """The prompt text of a conversation, special tokens included.

        messages: mappings with "role" and "content". chat_template: Jinja text; None: the checkpoint's own.
        Raises RequestError when there is no template or it rejects the messages.
        """
        if chat_template is None and self.chat_template is None:
            raise RequestError(
                "this model has no chat template", "use generate with a plain prompt, or pass chat_template"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                **template_arguments,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise RequestError(f"the chat template rejects the messages: {error}") from error
        return text

    def encode_chat(self, messages: Messages, **options: Any) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself, so none is added. Options and errors
        are those of `render_chat`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


#: Tokens of a prompt that its continuation is decoded with: enough for the text of at least one to show.
_PROMPT_TAIL = 8


class Detokenizer:
    """Turns token ids into text one at a time. The pieces joined are the decoded whole.

    After a prompt they are what the whole has more than the prompt: the space before a first word stays.

    A token that ends amid a character gives "" and the character comes with the token that completes it.
    One exception is inherent to streaming: decoding a run of byte-fallback tokens that is not UTF-8 replaces
    every byte of the run, also those that were good characters when they were shown.

    Not `tokenizers.decoders.DecodeStream`: that raises an error in the middle of such a run.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The tokens of the previous piece, and those since. A piece is decoded together with the one before
        # it, because the decoder strips a space from the start of whatever it is given.
        self._window = list(prompt_token_ids[-_PROMPT_TAIL:])
        self._num_shown = len(self._window)
        self._shown = self._decode()

    def push(self, token_id: int) -> str:
        """The text that this token adds."""
        self._window.append(token_id)
        text = self._decode()
        # A replacement character at the end may be a character whose other bytes are to come.
        if len(text) <= len(self._shown) or text.endswith("\ufffd"):
            return ""
        piece = text[len(self._shown) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode()
        return piece

    def finish(self) -> str:
        """What is left: the replacement characters of an incomplete one."""
        return self._decode()[len(self._shown) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and holds back what may be the start of one."""

    def __init__(self, stop: Sequence[str], include_stop: bool):
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string if one is complete; nothing may follow then.

        Of several the one that starts first counts. The stop string itself is left out of the text unless
        `include_stop`.
        """
        text = self._held + text
        self._held = ""
        matches = [(position, stop) for stop in self._stop if (position := text.find(stop)) >= 0]
        if matches:
            position, stop = min(matches, key=lambda match: match[0])
            return text[: position + len(stop)] if self._include_stop else text[:position], stop
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        if held:
            text, self._held = text[:-held], text[-held:]
        return text, None

    def flush(self) -> str:
        """The text held back, when no more will come or it must not be matched."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with, less than all of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
