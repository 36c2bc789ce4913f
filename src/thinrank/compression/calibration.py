"""Calibration text as sequences of tokens."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.load import OpenCheckpoint
from ..errors import OptionError, unknown_name
from ..model.batch import check_token_ids
from ..text import Tokenizer
from .self_generated import self_generated
from .texts import read_text

#: How calibration text is presented to the model.
FORMATS = ("text", "chat")

#: The text that the model writes itself.
SELF = "self"


@dataclass(frozen=True)
class Calibration:
    """What to calibrate with. text: as `texts.read_text` has it, or "self" for text that the model writes itself,
    with `seed`. samples sequences of length tokens; format: as `calibration_sequences` has it."""

    text: str | Path
    samples: int
    length: int
    format: str
    seed: int

    def sequences(
        self, checkpoint: OpenCheckpoint, root: Path, device: torch.device, progress: bool
    ) -> Tensor:
        """Token ids, int64 [samples, length]. root: keeps what the model has written. Raises as
        `calibration_sequences` does, and OptionError for samples that the model has no positions for."""
        positions = checkpoint.config.max_position_embeddings
        if self.length > positions:
            raise OptionError(
                f"calibration samples of {self.length} tokens are longer than the model's {positions} positions",
                "lower --calibration-length",
            )
        if self.text != SELF:
            tokenizer = Tokenizer(checkpoint.path)
            sequences = calibration_sequences(tokenizer, self.text, self.samples, self.length, self.format)
            check_token_ids(sequences.flatten().tolist(), checkpoint.config.vocab_size)
            return sequences
        if self.format != "text":
            raise OptionError(
                f"text of the model's own is not written as {self.format}", "leave the calibration format out"
            )
        check_size(self.samples, self.length)
        return self_generated(checkpoint, self.samples, self.length, self.seed, root, device, progress)


def calibration_sequences(
    tokenizer: Tokenizer, text: str | Path, samples: int, length: int, format: str = "text"
) -> Tensor:
    """Token ids, int64 [samples, length], one after another from the start of the text.

    text: as `texts.read_text` has it. format: "text" for nothing but the text; "chat" to
    wrap every sample as a turn of the user, with the first quarter of its text, and one of the assistant.
    A text that is too short gives fewer samples, with a warning.

    Raises OptionError when the text cannot be read or has less than one sample, or when the format is "chat" and
    the model has no chat template.
    """
    if format not in FORMATS:
        raise unknown_name("calibration format", format, list(FORMATS))
    check_size(samples, length)
    if format == "chat" and tokenizer.chat_template is None:
        raise OptionError("the model has no chat template", "leave --calibration-format out")
    opening, middle = _chat_frame(tokenizer) if format == "chat" else ([], [])
    step = length - len(opening) - len(middle)
    tokens = tokenizer.encode_start(read_text(text), samples * max(step, 1))
    available = len(tokens) // step if step > 0 else 0
    if not available:
        raise OptionError(
            f"the calibration text has {len(tokens)} tokens and one sample takes {step} of {length}",
            "name a longer text or change --calibration-length",
        )
    if available < samples:
        warnings.warn(
            f"the calibration text gives {available} samples of {length} tokens instead of {samples}",
            stacklevel=2,
        )
    rows = []
    for start in range(0, min(samples, available) * step, step):
        turn = start + step // 4
        rows.append(opening + tokens[start:turn] + middle + tokens[turn : start + step])
    return torch.tensor(rows)


def check_size(samples: int, length: int) -> None:
    """Raises OptionError unless both are at least 1."""
    if samples < 1 or length < 1:
        raise OptionError(f"{samples} calibration samples of {length} tokens", "both must be at least 1")


def _chat_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens before the user's text, and those between it and the answer."""
    mark = "\x00"
    rendered = tokenizer.render_chat([{"role": "user", "content": mark}])
    opening, _, middle = rendered.partition(mark)
    return (
        tokenizer.encode(opening, add_special_tokens=False),
        tokenizer.encode(middle, add_special_tokens=False),
    )
