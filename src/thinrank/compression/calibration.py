"""Calibration data, and the statistics of the inputs that a layer's projections see on it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..builtin_text import calibration_text
from ..errors import CheckpointError, OptionError, unknown_name
from ..model.batch import ForwardBatch
from ..model.layers import DecoderLayer, Projection
from ..text import Tokenizer

#: Projections that read the same vector: statistics are collected once, at the first of them.
SHARED_INPUTS = {
    "q_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}

#: How calibration text is presented to the model.
FORMATS = ("text", "chat")

#: Tokens that pass through a layer together; bounds the activations in memory.
BATCH_TOKENS = 4096


def calibration_sequences(
    tokenizer: Tokenizer, text: str | Path | None, samples: int, length: int, format: str = "text"
) -> Tensor:
    """Token ids, int64 [samples, length], one after another from the start of the text.

    text: a file, or None for the built-in English text. format: "text" for nothing but the text; "chat" to
    wrap every sample as a turn of the user, with the first quarter of its text, and one of the assistant.
    A text that is too short gives fewer samples, with a warning.

    Raises OptionError when the text cannot be read or has less than one sample, RequestError when the format
    is "chat" and the model has no chat template.
    """
    if format not in FORMATS:
        raise unknown_name("calibration format", format, list(FORMATS))
    if samples < 1 or length < 1:
        raise OptionError(f"{samples} calibration samples of {length} tokens", "both must be at least 1")
    opening, middle = _chat_frame(tokenizer) if format == "chat" else ([], [])
    step = length - len(opening) - len(middle)
    tokens = tokenizer.encode(_read_text(text), add_special_tokens=False)
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


def _chat_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens before the user's text, and those between it and the answer."""
    mark = "\x00"
    rendered = tokenizer.render_chat([{"role": "user", "content": mark}])
    opening, _, middle = rendered.partition(mark)
    return (
        tokenizer.encode(opening, add_special_tokens=False),
        tokenizer.encode(middle, add_special_tokens=False),
    )


def _read_text(text: str | Path | None) -> str:
    if text is None:
        return calibration_text()
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"cannot read the calibration text {text}: {error}", "name a UTF-8 text file"
        ) from error


@dataclass
class GramObserver:
    """A projection that also sums X^T X over all inputs X it sees. gram: float64 [in, in]."""

    projection: Projection
    gram: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        gram = (x.float().T @ x.float()).double()
        self.gram = gram if self.gram is None else self.gram + gram
        return self.projection(x)


def run_layer(layer: DecoderLayer, hidden: Tensor, length: int) -> dict[str, Tensor]:
    """Pass all sequences through one layer.

    hidden: float32 [tokens, hidden_size], sequences of `length` tokens one after another; replaced in place
    by the layer's output. Returns, by the name of each projection, the Gram matrix of the inputs
    that it reads (projections that read the same vector share the matrix).

    Raises CheckpointError when activations are not finite.
    """
    observers: dict[str, Any] = {name: GramObserver(getattr(layer, name)) for name in SHARED_INPUTS}
    watched = replace(layer, **observers)
    device = layer.input_layernorm.device
    step = max(1, BATCH_TOKENS // length) * length
    for start in range(0, len(hidden), step):
        part = hidden[start : start + step]
        positions = torch.arange(length, device=device).repeat(len(part) // length)
        batch = ForwardBatch(positions, positions, (length,) * (len(part) // length))
        hidden[start : start + step] = watched(part.to(device), batch).to(hidden.device)
    if not hidden.isfinite().all():
        raise CheckpointError("the model computes NaN or infinite activations", "its weights are damaged")
    grams: dict[str, Tensor] = {}
    for first, observer in observers.items():
        assert observer.gram is not None
        grams |= dict.fromkeys(SHARED_INPUTS[first], observer.gram)
    return grams
