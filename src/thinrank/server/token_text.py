"""The bytes that a single token stands for, which decoding it alone does not give: it may be part of a character, and
decoders strip a leading space."""

from __future__ import annotations

import codecs
import json
import re
from functools import cache
from typing import Any

from ..text import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {
            token_id: token.content
            for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
        decoder = json.loads(tokenizer.backend.to_str())["decoder"]
        self._byte_level = "ByteLevel" in _decoder_types(decoder)
        # Text before the token keeps its leading space; every tokenizer that strips one has the letter a.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor_text = tokenizer.decode(self._anchor)
        self.bytes_of = cache(self._bytes)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def text(self, token_id: int) -> str:
        """With a replacement character for what is no whole character."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _bytes(self, token_id: int) -> bytes:
        token = self._special.get(token_id) or self._tokenizer.backend.id_to_token(token_id)
        if token is None:  # the model's vocabulary is larger than the tokenizer's
            return b""
        if token_id in self._special:
            return token.encode()
        if self._byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte and not self._byte_level:
            return bytes([int(byte[1], 16)])
        text = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text[len(self._anchor_text) :].encode()


class TextOffsets:
    """Where each token of a growing text starts, in characters. A token that starts amid a character starts where the
    character does. start: characters before the first token; -1 when the
    first has a leading space that the text lacks."""

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool, start: int = 0):
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = start

    def push(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = max(0, self._next)
        if not (self._skip_special_tokens and self._texts.is_special(token_id)):
            self._next += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return offset

    @property
    def end(self) -> int:
        return self._next


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_types(each) for each in decoder.get("decoders", ())))


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters: those of Latin-1 that are printable as themselves, the
    others from U+0100 on (Radford et al., GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
