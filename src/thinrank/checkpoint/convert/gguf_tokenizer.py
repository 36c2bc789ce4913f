"""Tokenizer files from the `tokenizer.*` metadata of a GGUF file.

Two kinds exist in llama models: byte-level BPE ("gpt2", with merges and a named rule that splits text
first) and SentencePiece BPE ("llama", with scores from which the merges follow). Where GGUF leaves
something open, the result does what llama.cpp does (src/llama-vocab.cpp); the splitting expressions
are those of the models' own tokenizer.json. Knows nothing about tensors or the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .gguf_file import Metadata

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

#: tokenizer.ggml.model of files that bring no vocabulary.
_NO_VOCABULARY = ("none", "no_vocab")

# Each split of a SentencePiece token is tried as a merge; real tokens are far shorter.
_LONGEST_PIECE = 512

_SPACE = "\u2581"

_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
#: Ids that end a text beside EOS: end of turn, end of message.
_FURTHER_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class _Splitting(NamedTuple):
    """How a byte-level vocabulary cuts text before merging: expressions, applied one after the other."""

    patterns: tuple[str, ...]
    #: A piece that is a token is taken whole, whatever the merges say.
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}{_CASED_TAIL}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{_CASED_TAIL}"
)
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"

_WORDS_ONLY = _Splitting((_GPT2,))
_SINGLE_DIGITS = _Splitting((r"\p{N}", _GPT2))
_LIKE_LLAMA3 = _Splitting((_LLAMA3,), ignore_merges=True, add_bos=True)

#: tokenizer.ggml.pre -> rule.
_SPLITTINGS = {
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "mpt", "olmo", "phi-2", "gigachat", "mellum", "trillion", "granite-docling", "exaone4"),
        _WORDS_ONLY,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LIKE_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Splitting((_LLAMA3,))),
    "qwen2": _Splitting((_QWEN2,), nfc=True),
    "megrez": _Splitting((_QWEN2,)),
    "tekken": _Splitting((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Splitting((_GPT4O,))),
    "seed-coder": _Splitting((_SEED_CODER,)),
    "deepseek-coder": _Splitting(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "falcon": _Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
}


def special_token_ids(metadata: Metadata, vocab_size: int) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (a list if there are several) and `pad_token_id`, where known.

    Raises CheckpointError for an id outside the vocabulary.
    """
    ends = [_token_id(metadata, key, vocab_size) for key in (_ROLES["eos_token"], *_FURTHER_ENDS)]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    ids = {
        "bos_token_id": _token_id(metadata, _ROLES["bos_token"], vocab_size),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": _token_id(metadata, _ROLES["pad_token"], vocab_size),
    }
    return {name: value for name, value in ids.items() if value is not None}


def tokenizer_files(metadata: Metadata, vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json, as bytes by name.

    vocab_size: rows of the embedding; there may be fewer tokens. Without a vocabulary in the metadata
    only generation_config.json is made. Raises CheckpointError for inconsistent metadata,
    UnsupportedModelError for a tokenizer or a splitting rule that is not implemented.
    """
    files = {"generation_config.json": _json(special_token_ids(metadata, vocab_size))}
    model = metadata.typed("tokenizer.ggml.model", str, "none")
    if model in _NO_VOCABULARY:
        return files
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"the GGUF tokenizer {model!r} is not implemented",
            "implemented: gpt2 (byte-level BPE), llama (SentencePiece)",
        )
    tokens = _tokens(metadata, vocab_size)
    types = _token_types(metadata, len(tokens))
    roles = {role: _token_id(metadata, key, len(tokens)) for role, key in _ROLES.items()}
    if model == "gpt2":
        splitting = _splitting(metadata)
        tokenizer = _byte_level(metadata, tokens, splitting)
        add_bos = splitting.add_bos
    else:
        # llama.cpp's defaults, for files that predate the keys.
        for role, default in (("unk_token", 0), ("bos_token", 1), ("eos_token", 2)):
            if roles[role] is None and default < len(tokens):
                roles[role] = default
        tokenizer = _sentencepiece(metadata, tokens, types, roles["unk_token"])
        add_bos = True
    add_bos = metadata.typed("tokenizer.ggml.add_bos_token", bool, add_bos) and roles["bos_token"] is not None
    add_eos = metadata.typed("tokenizer.ggml.add_eos_token", bool, False) and roles["eos_token"] is not None
    _mark_special(tokenizer, tokens, types, roles)
    names = {role: tokens[token_id] for role, token_id in roles.items() if token_id is not None}
    _add_at_ends(tokenizer, names["bos_token"] if add_bos else None, names["eos_token"] if add_eos else None)

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.count("llama.context_length"),
        **names,
    }
    template = metadata.typed("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    files["tokenizer.json"] = tokenizer.to_str(pretty=False).encode()
    files["tokenizer_config.json"] = _json(config)
    return files


# --- metadata ----------------------------------------------------------------------------------------


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(what, "the file is damaged; download it again")


def _token_id(metadata: Metadata, key: str, vocab_size: int) -> int | None:
    token_id = metadata.typed(key, int)
    # Converters write -1, also as an unsigned number, for "none".
    if token_id is None or token_id in (-1, 2**32 - 1):
        return None
    if not 0 <= token_id < vocab_size:
        raise _damaged(f"{key} is {token_id}, the vocabulary has {vocab_size} tokens")
    return token_id


def _tokens(metadata: Metadata, vocab_size: int) -> list[str]:
    tokens = metadata.typed("tokenizer.ggml.tokens", list, [])
    if not 0 < len(tokens) <= vocab_size:
        raise _damaged(f"tokenizer.ggml.tokens has {len(tokens)} tokens, the embedding {vocab_size} rows")
    # llama.cpp gives empty tokens a name; they never match a text.
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        raise _damaged("tokenizer.ggml.tokens lists a token twice")
    return tokens


def _numbers(metadata: Metadata, key: str, count: int) -> list[Any] | None:
    values = metadata.typed(key, np.ndarray)
    if values is not None and len(values) < count:
        raise _damaged(f"{key} has {len(values)} entries for {count} tokens")
    return None if values is None else values[:count].tolist()


def _token_types(metadata: Metadata, count: int) -> list[int]:
    return _numbers(metadata, "tokenizer.ggml.token_type", count) or [_NORMAL] * count


def _splitting(metadata: Metadata) -> _Splitting:
    name = metadata.typed("tokenizer.ggml.pre", str, "default")
    if name not in _SPLITTINGS:
        raise UnsupportedModelError(
            f"the GGUF file splits text by the rule {name!r}, which is not implemented",
            f"implemented: {', '.join(sorted(_SPLITTINGS))}",
        )
    return _SPLITTINGS[name]


# --- tokenizers --------------------------------------------------------------------------------------


def _byte_level(metadata: Metadata, tokens: list[str], splitting: _Splitting) -> Tokenizer:
    """Byte-level BPE, as GPT-2 introduced it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_pair(merge) for merge in metadata.typed("tokenizer.ggml.merges", list, [])]
    for left, right in merges:
        # Checked here because the library's own complaint is a bare Exception.
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise _damaged(f"tokenizer.ggml.merges joins {left!r} and {right!r}, which are no tokens")
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.ignore_merges))
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # From the second character on: the first may be a space itself.
    cut = merge.find(" ", 1)
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, "")


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int], unk_id: int | None) -> Tokenizer:
    """SentencePiece BPE with byte fallback, spaces written as U+2581."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise _damaged("tokenizer.ggml.scores is missing")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    normal = {token: token_id for token, token_id in vocab.items() if types[token_id] == _NORMAL}
    merges = [(left, right) for *_, left, right in sorted(_score_merges(normal, scores))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            merges,
            unk_token=None if unk_id is None else tokens[unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.typed("tokenizer.ggml.add_space_prefix", bool, True)
    # As in llama.cpp, every text between special tokens gets the prefix, not the first one only.
    to_pieces: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*to_pieces, normalizers.Replace(" ", _SPACE)])
    to_text: list[decoders.Decoder] = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *to_text]
    )
    return tokenizer


def _score_merges(
    normal: dict[str, int], scores: list[float]
) -> Iterator[tuple[float, int, int, int, str, str]]:
    """Every way to make a token of two, with a key that sorts the merges as SentencePiece ranks them.

    SentencePiece joins the neighbours whose result scores highest.
    """
    for token, token_id in normal.items():
        if len(token) > _LONGEST_PIECE or scores[token_id] != scores[token_id]:
            raise _damaged(f"the token {token_id} is longer than {_LONGEST_PIECE} or has no score")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                yield -scores[token_id], token_id, normal[left], normal[right], left, right


def _mark_special(
    tokenizer: Tokenizer, tokens: list[str], types: list[int], roles: dict[str, int | None]
) -> None:
    """Make control tokens special, and user-defined ones indivisible, so that each stays one id."""
    from tokenizers import AddedToken

    special = {token_id for token_id, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    special.update(token_id for token_id in roles.values() if token_id is not None)
    added = [
        AddedToken(token, normalized=False, special=token_id in special)
        for token_id, token in enumerate(tokens)
        if token_id in special or types[token_id] == _USER_DEFINED
    ]
    tokenizer.add_tokens(added)


def _add_at_ends(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put BOS before and EOS after a text that is encoded with special tokens."""
    from tokenizers import processors

    if bos is None and eos is None:
        return
    before, after = [bos] if bos is not None else [], [eos] if eos is not None else []
    used = dict.fromkeys([*before, *after])
    try:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in used],
        )
    except ValueError:
        raise _damaged(f"BOS or EOS is an ordinary text: {', '.join(map(repr, used))}") from None


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
