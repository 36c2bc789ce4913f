"""Perplexity of a model on a text, with its protocol stated beside the number."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import OptionError
from ..llm import LLM
from ..model.batch import ForwardBatch


@dataclass(frozen=True)
class Perplexity:
    """value = exp(mean negative log-likelihood) over `predictions` tokens, in `windows` windows of `window`
    tokens that do not overlap, each scored on its own, without BOS, logits in float32."""

    value: float
    windows: int
    window: int
    predictions: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def perplexity(
    llm: LLM, text: str, *, window: int = 512, max_windows: int | None = None, progress: bool = True
) -> Perplexity:
    """Perplexity of `llm` on `text`. max_windows: score only the first ones; None: all that are complete.

    Raises OptionError when the text is shorter than one window or the window longer than the model allows.
    """
    tokens = torch.tensor(llm.tokenizer.encode(text, add_special_tokens=False))
    windows = len(tokens) // window
    if not windows:
        raise OptionError(
            f"the text has {len(tokens)} tokens and one window takes {window}", "use a longer text"
        )
    if window > llm.config.max_position_embeddings:
        raise OptionError(
            f"a window of {window} tokens is longer than the model's {llm.config.max_position_embeddings}",
            "use a shorter window",
        )
    windows = min(windows, max_windows or windows)
    decoder = llm.engine.decoder
    total = 0.0
    for start in tqdm(range(0, windows, 8), desc="Perplexity", disable=not progress, leave=False):
        ids = tokens[start * window : min(start + 8, windows) * window].view(-1, window).to(decoder.device)
        hidden = decoder.hidden(ForwardBatch.whole_sequences(list(ids), decoder.device))
        # One window at a time: logits of a large vocabulary are the biggest tensor of all.
        for row, states in zip(ids, hidden.split(window), strict=True):
            logits = decoder.head(states[:-1])
            total += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    predictions = windows * (window - 1)
    return Perplexity(math.exp(total / predictions), windows, window, predictions)
