"""The prompts of a fidelity run: pieces of the built-in text, a file's, or random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..builtin_text import held_out_text
from ..config import ModelConfig
from ..errors import OptionError
from ..model.batch import check_token_ids
from ..text import Tokenizer, has_tokenizer
from ..text_files import json_strings, lines_of, read_text_file


@dataclass(frozen=True)
class Prompts:
    """source: what they were taken from, in words. token_ids: of each prompt."""

    source: str
    token_ids: list[list[int]]


def read_prompts(path: str | Path, count: int, folder: Path, config: ModelConfig) -> Prompts:
    """The first `count` prompts of a UTF-8 file: one a line, or {"prompt": text} a line if it ends in .jsonl.

    Special tokens are added as the tokenizer in `folder` does. Raises OptionError for a file that cannot be
    read or has fewer; RequestError where there is no tokenizer.
    """
    text = read_text_file(path, "the prompts", "name a UTF-8 text file")
    texts = json_strings(text, "prompt", path) if Path(path).suffix == ".jsonl" else lines_of(text)
    if len(texts) < count:
        raise OptionError(f"{path} has {len(texts)} prompts, {count} are wanted", "lower --num-prompts")
    tokenizer = Tokenizer(folder)
    token_ids = [tokenizer.encode(text) for text in texts[:count]]
    for ids in token_ids:
        check_token_ids(ids, config.vocab_size)
    return Prompts(str(path), token_ids)


def make_prompts(count: int, length: int, folder: Path, config: ModelConfig, seed: int) -> Prompts:
    """`count` prompts of `length` tokens.

    They are pieces of the held-out built-in text, evenly spaced, without BOS; random tokens for a model
    without a tokenizer. Raises OptionError when the text is too short.
    """
    if not has_tokenizer(folder):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(config.vocab_size, (count, length), generator=generator)
        return Prompts(f"random tokens, seed {seed}", ids.tolist())
    tokens = Tokenizer(folder).encode(held_out_text(), add_special_tokens=False)
    step = len(tokens) // count
    if step < length:
        raise OptionError(
            f"the built-in text has {len(tokens)} tokens, {count} prompts of {length} are wanted",
            "lower --num-prompts or --prompt-len, or name a file with --prompts",
        )
    pieces = [tokens[start : start + length] for start in range(0, count * step, step)]
    return Prompts("built-in text, held-out part, no BOS", pieces)
