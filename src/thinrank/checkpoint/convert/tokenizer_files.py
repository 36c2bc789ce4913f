"""Repairs of tokenizer files that would otherwise break generation."""

from __future__ import annotations

import json
from typing import Any

from ...errors import CheckpointError
from ..folder import parse_json


def drop_unknown_pad_token(files: dict[str, bytes]) -> list[str]:
    """Remove a padding token that is not in the vocabulary; return what was dropped.

    Basis Sharing saves `"pad_token": "[PAD]"` without adding it: a loader then gives it the id behind the
    last one, which lies outside the embedding.
    """
    config = _load(files, "tokenizer_config.json")
    pad = _text(config.get("pad_token")) or _text(_load(files, "special_tokens_map.json").get("pad_token"))
    if pad is None or pad in _vocabulary(files, config):
        return []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        content = _load(files, name)
        if content.pop("pad_token", None) is not None:
            files[name] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return [f"padding token {pad!r} (not in the vocabulary)"]


def _vocabulary(files: dict[str, bytes], config: dict[str, Any]) -> set[str]:
    """Every token that has an id, as far as it can matter for a special token."""
    known = _texts(config.get("added_tokens_decoder")) | set(_load(files, "added_tokens.json"))
    tokenizer = _load(files, "tokenizer.json")
    known |= _texts(tokenizer.get("added_tokens"))
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        known |= set(vocabulary)
    elif isinstance(vocabulary, list):  # of pairs [token, score]
        known |= _texts([entry[0] for entry in vocabulary if isinstance(entry, list) and entry])
    known |= set(_load(files, "vocab.json"))
    if "tokenizer.model" in files and not tokenizer:
        known |= _pieces(files["tokenizer.model"])
    return known


def _pieces(model: bytes) -> set[str]:
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise CheckpointError("tokenizer.model cannot be read", "copy the file again") from error
    return {processor.id_to_piece(i) for i in range(processor.vocab_size())}


def _load(files: dict[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(files[name], name) if name in files else {}


def _texts(tokens: object) -> set[str]:
    """Of a list of tokens, or of the values of an object."""
    items = tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else ()
    return {text for item in items if (text := _text(item)) is not None}


def _text(token: object) -> str | None:
    """A token is a string or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
