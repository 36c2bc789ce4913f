"""Log-probabilities in OpenAI's two shapes: parallel lists for completions, nested objects for chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ..engine.logprobs import TokenLogprob
from .responses import ChatLogprobs, CompletionLogprobs, TokenLogprobs, TopLogprob
from .token_text import TextOffsets, TokenTexts


class HasLogprob(Protocol):
    @property
    def logprob(self) -> float: ...


#: Of one position: the token that is there first, then the most likely ones, by token id.
Entry = Mapping[int, HasLogprob]


def prompt_entry(logprobs: Iterable[TokenLogprob]) -> Entry:
    return {entry.token_id: entry for entry in logprobs}


class LogprobFormat:
    """as_ids: write "token_id:5" instead of a token's text, which several tokens may share. top: how many of the most
    likely tokens to list."""

    def __init__(self, texts: TokenTexts, as_ids: bool, top: int):
        self._texts = texts
        self._as_ids = as_ids
        self._top = top

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], offsets: TextOffsets
    ) -> CompletionLogprobs:
        """entries: None for a token that nothing predicts. offsets: advanced by the tokens."""
        return CompletionLogprobs(
            tokens=[self._token(token_id) for token_id in token_ids],
            token_logprobs=[
                None if entry is None else entry[token_id].logprob
                for token_id, entry in zip(token_ids, entries, strict=True)
            ],
            top_logprobs=[None if entry is None else self._by_text(entry) for entry in entries],
            text_offset=[offsets.push(token_id) for token_id in token_ids],
        )

    def chat(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                TokenLogprobs(
                    token=self._token(token_id),
                    logprob=entry[token_id].logprob,
                    bytes=list(self._texts.bytes_of(token_id)),
                    top_logprobs=[self._ranked(*each) for each in _likeliest(entry)[: self._top]],
                )
                for token_id, entry in zip(token_ids, entries, strict=True)
            ]
        )

    def _by_text(self, entry: Entry) -> dict[str, float] | None:
        """The most likely tokens, and the token itself. Of tokens with one text the likeliest counts."""
        if not self._top:
            return None
        found: dict[str, float] = {}
        for token_id, logprob in _likeliest(entry):
            found.setdefault(self._token(token_id), logprob.logprob)
        return found

    def _ranked(self, token_id: int, entry: HasLogprob) -> TopLogprob:
        return TopLogprob(
            token=self._token(token_id), logprob=entry.logprob, bytes=list(self._texts.bytes_of(token_id))
        )

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.text(token_id)


def _likeliest(entry: Entry) -> list[tuple[int, HasLogprob]]:
    return sorted(entry.items(), key=lambda item: -item[1].logprob)
